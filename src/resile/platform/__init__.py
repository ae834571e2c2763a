"""Runs nodes: one interface (`base.Platform`), with an adapter for pods and one for local processes."""
