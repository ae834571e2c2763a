"""One agent per node: it meets the others through the master, runs the training processes and reports how they fare.

It imports neither torch nor anything of the master: its start is part of every recovery, and it must outlive both.
"""
