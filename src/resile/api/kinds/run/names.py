"""The two names of this front door that agents need at their start, apart because an agent must start quickly."""

FRONT_DOOR = "run"
"""In a `JobSpec`."""
WORKER = "worker"
"""The role of a node that is told no other."""
