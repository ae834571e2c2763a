"""Reads and steers jobs, on this machine or on a cluster. The command line stands on it."""
