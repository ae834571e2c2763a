"""Checkpoints in the agent's memory: given to processes, copied to another node, written to storage."""
