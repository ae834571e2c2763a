"""Reconciles ScalePlans that no master will take up."""
