"""The agent of a node: it joins rounds through the master, runs the training processes and reports on them.

It imports neither torch nor the master: its start is part of every recovery, and it must outlive both.
"""
