"""Reconciles plans: refuses those that no master will execute."""
