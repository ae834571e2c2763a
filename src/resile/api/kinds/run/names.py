"""The names of this kind that agents need. They are in a module of their own because an agent must start quickly."""

RUN_KIND = "run"
WORKER = "worker"
"""The role of a node whose agent was given none."""
