"""Checkpoints in the agent's memory: served to processes, replicated to a node, flushed to storage."""
