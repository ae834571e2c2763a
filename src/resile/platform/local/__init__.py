"""Nodes as local process groups: the same job, on one machine and without a cluster."""

from resile.platform.local.platform import LocalPlatform

__all__ = ["LocalPlatform"]
