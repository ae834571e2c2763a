"""The environment variables by which a training process finds its agent, in a module that costs nothing to import."""

AGENT_SOCKET = "RESILE_AGENT_SOCKET"
WORKER = "RESILE_WORKER"
ROUND = "RESILE_ROUND"
OWNER = "RESILE_WORKER_PID"
"""The pid of the process that goes by the worker's name, so that a process which it spawns takes another name."""
