"""The commands `resile …` and `dlrover-run`.

They may import every other package, but only when a command needs it: `resile run` starts agents, and the time that an
agent takes to start is part of every recovery.
"""
