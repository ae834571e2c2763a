"""What agents and training processes share about checkpoints: the buffers in memory, and how they come to storage.

Imports neither torch nor numpy: the agent writes checkpoints that torch reads, and does not know what is in them.
"""
