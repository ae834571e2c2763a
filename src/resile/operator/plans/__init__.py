"""Reconciles plans that no master will take up."""
