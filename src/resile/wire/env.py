"""The environment variables by which a training process finds its agent, in a module that costs nothing to import."""

AGENT_SOCKET = "RESILE_AGENT_SOCKET"
WORKER = "RESILE_WORKER"
ROUND = "RESILE_ROUND"
OWNER = "RESILE_WORKER_PID"
"""Set by the first client of a process tree, so that a spawned child knows that the name is taken."""
