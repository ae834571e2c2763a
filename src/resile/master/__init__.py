"""The shell around `core`: it listens, keeps the journal, tells the time and executes decisions on a platform.

The shell decides nothing. What it adds is order (one queue), memory (nothing is executed before the event that
caused it is in the journal) and hands (connections, nodes).
"""
