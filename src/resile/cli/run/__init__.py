"""`resile run` and `dlrover-run`: flags, their checks and their help."""
