"""The two names of this kind that agents need at their start, apart because an agent must start quickly."""

RUN_KIND = "run"
"""In `JobSpec.kind`."""
WORKER = "worker"
"""The role of a node that is told no other."""
