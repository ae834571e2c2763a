"""The commands on a cluster: the same words as on this machine, read from and written to the API server."""
