"""The parts of the simulated cluster: agents, masters, network, platform and training."""
