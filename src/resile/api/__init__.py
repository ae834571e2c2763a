"""The resources users write and the one `JobSpec` they all become; the ids, units and reports that all packages share.

Nothing here does I/O and nothing here imports another layer, so every layer may rely on it.
"""
