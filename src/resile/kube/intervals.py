"""Every interval of the Kubernetes client, with its reason."""

from __future__ import annotations

from resile.api.ids import Seconds
from resile.common.backoff import Backoff

SILENCE = Seconds(10.0)
"""The longest wait for a connection or for more of an answer. A busy API server answers in one or two seconds."""
CALL = Seconds(30.0)
"""How long a whole call may take. A list of ten thousand objects arrives in a few seconds."""
WATCH = Seconds(60.0)
"""How long the API server keeps a watch open. Then it is opened again from the last resourceVersion seen."""
WATCH_SLACK = Seconds(15.0)
"""A watch that is silent for this much longer than `WATCH` counts as a dead connection."""
WATCH_WELL = Seconds(1.0)
"""A watch that was open this long is opened again at once, a shorter one after `BACKOFF`."""
BACKOFF = Backoff(0.1, 5.0)
"""Pauses between calls to an API server that does not answer. They stay short: a restart takes it seconds."""
