"""What agents and training processes share about checkpoints: the buffers in memory, and how they reach storage.

This package imports neither torch nor numpy. The agent writes files that torch reads without knowing their contents.
"""
