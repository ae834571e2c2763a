"""What agents, masters, command lines and training processes say to each other: typed values, without any I/O."""
