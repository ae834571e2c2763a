"""Nodes as local process groups: the same job, on one machine and without a cluster."""
