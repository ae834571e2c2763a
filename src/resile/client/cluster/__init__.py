"""Jobs of a cluster, read from and written to its API server."""
