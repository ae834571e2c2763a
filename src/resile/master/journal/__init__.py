"""The master's journal: one interface, kept in SQLite on a machine or in a ConfigMap on a cluster."""
