"""How a log line looks on the terminal of a run: an agent's lines stand between those of its training processes."""

from __future__ import annotations

LOG_FORMAT = "[%(asctime)s] [%(levelname)s] %(message)s"
