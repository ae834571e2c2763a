"""What people type: `resile …` and `dlrover-run`.

May import every other layer, but only when a command needs it: `resile run` starts agents, and an agent's start is
part of recovery.
"""
