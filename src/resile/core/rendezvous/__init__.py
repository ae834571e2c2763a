"""Forms and ends rounds, and knows which nodes have the training state and which node keeps whose replicas."""
