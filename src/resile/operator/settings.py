"""Every interval, limit and name of the operator, with its reason."""

from __future__ import annotations

from resile.api.ids import Seconds

FIELD_MANAGER = "resile-operator"
LEASE = "resile-operator"

REQUEST = Seconds(10.0)
"""One request to the API server; it answers within milliseconds or is in trouble."""
RECONCILE = Seconds(60.0)
"""One look at one object: a dozen requests at most."""
WATCH = Seconds(120.0)
"""A watch ends after so long and everything is listed anew: the level-triggered net below the events."""
WATCH_SLACK = Seconds(15.0)
"""A watch that the server should have ended this long ago hangs on a dead connection."""
WATCH_WELL = Seconds(5.0)
"""A watch that lived so long was well; those that end sooner are opened again with growing pauses."""
RELIST_FIRST, RELIST_LONGEST = Seconds(0.1), Seconds(10.0)
"""Pauses after a failed list or watch, doubling: an API server that restarts is back within seconds."""
RETRY_FIRST, RETRY_LONGEST = Seconds(0.1), Seconds(60.0)
"""Pauses after a failed look at one object, doubling."""
LOOK_AFTER = Seconds(600.0)
"""How often it is seen to that what a running master needs is still there. Secrets cannot be watched, since the right
to do so is the right to read all of them."""
WORKERS = 8
"""Objects looked at concurrently: enough to hide the latency of requests, few enough to spare the API server."""

DELETIONS = 16
"""Pods deleted at a time: a job may have hundreds, and the renewal of the lease must not wait behind them."""

LEASE_DURATION = Seconds(15.0)
"""How long a silent leader is believed to live."""
RENEW_DEADLINE = Seconds(10.0)
"""How long a leader tries to renew before it steps down; less than the above, so that two never lead."""
RETRY_PERIOD = Seconds(2.0)

FREE_STARTS = 5
"""Masters in a row that are started at once: a master that was killed or moved must be back without a pause."""
START_FIRST, START_LONGEST = Seconds(0.5), Seconds(30.0)
"""Pauses before the starts after those, doubling."""
HEALTHY = Seconds(60.0)
"""A master that lived so long was well; its end begins a new row."""
MASTER_GRACE = Seconds(10.0)
"""Between SIGTERM and SIGKILL of a master: it only closes its journal."""
LEAVING = Seconds(2.0)
"""How long a master that was told to go keeps its name before it is removed by force. A kubelet needs seconds to say
that a container ended, and one that is cut off never does; should the old master still run, the journal refuses it."""
MAKE_ROOM = Seconds(20.0)
"""How long what an earlier job of the same name left may take to be removed by Kubernetes."""
NODE_LOST = Seconds(20.0)
"""How long a master stays on a node that is not ready; Kubernetes' own default is 300 s."""

PLAN_WAITS = Seconds(5.0)
"""How long a ScalePlan may be there before its job: both may be in one folder that somebody applies."""

TTL_ANNOTATION = "ttl_seconds_after_finished"
"""On an ElasticJob: its pods are removed this long after its end; without it they stay as long as the job."""

HEALTH_PORT = 8081
HTTP_PATIENCE = Seconds(5.0)
"""For a whole exchange on the health port."""
MEASURE = Seconds(5.0)
"""Between two readings of the gauges."""
