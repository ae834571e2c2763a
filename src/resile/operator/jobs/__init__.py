"""Reconciles jobs: provisions each job's master and keeps it alive."""
