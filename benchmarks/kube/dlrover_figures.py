"""DLRover's figures for the same events. They were measured earlier on a machine like ours, not in this run.

DLRover 0.6.1 on Kubernetes 1.20.2 with 2 nodes on 2 cores and 24 GB, 3 workers, DDP over gloo, torch 2.13 (2026-11-15).
Each is the longest that was seen, as ours are.
"""

from __future__ import annotations

NAME = "DLRover*"
ABOUT = "* measured earlier on a machine like this (0.6.1, Kubernetes 1.20.2, 2 nodes, 3 workers), not in this run"

FIRST_STEP = 22.7
"""From `kubectl apply` of the job and its master, without its network check; 39.6 with it."""
REPLACEMENT = 8.6
NEXT_STEP = 18.9
"""Its survivors wait for the replacement."""
KILLED_STEP = 11.7
"""A training process killed in a pod; to the step of the full world, since its survivors are restarted with it."""
NEXT_STEP_NO_ROOM = 66.2
RECREATED = 600.0
"""30 of 500 pods: ten minutes, by a report of its users (its issue 1690)."""
