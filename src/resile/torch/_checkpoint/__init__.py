"""Checkpoints of one rank: flattening, packing, saving, choosing a step and restoring it."""
