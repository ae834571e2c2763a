"""Rounds of agreed membership, which nodes hold the training state, and which node replicates whose checkpoints."""
