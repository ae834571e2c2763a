"""Nodes as pods of a Kubernetes cluster."""
