"""Every interval of the Kubernetes client, with its reason."""

from __future__ import annotations

from resile.api.ids import Seconds
from resile.common.backoff import Backoff

SILENCE = Seconds(10.0)
"""For a connection, and between two parts of an answer; an API server under load answers in one or two seconds."""
CALL = Seconds(30.0)
"""For one whole call: a list of ten thousand objects arrives in a few seconds."""
WATCH = Seconds(60.0)
"""The API server is asked to end a watch after this time; it is opened again where it ended."""
WATCH_SLACK = Seconds(15.0)
"""A watch that is silent for this much longer than `WATCH` hangs on a dead connection."""
WATCH_WELL = Seconds(1.0)
"""A watch that lived this long was well and is opened again at once; shorter ones wait for `BACKOFF`."""
BACKOFF = Backoff(0.1, 5.0)
"""Between attempts to reach an API server that does not answer: one that restarts is back within seconds."""
