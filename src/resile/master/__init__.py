"""The shell around `core`: it listens, keeps the journal, tells the time and executes decisions on a platform.

The shell decides nothing. It adds one ordered queue of events, a journal that has every event before its decisions are
executed, and the connections and platform that carry them out.
"""
