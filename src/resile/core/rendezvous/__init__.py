"""Rounds of agreed membership, who holds the training state, and who replicates whose checkpoints."""
