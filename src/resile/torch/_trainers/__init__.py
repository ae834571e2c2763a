"""What the adapters for other libraries' trainers share."""
