"""Every interval, limit and name of the operator, with its reason."""

from __future__ import annotations

from resile.api.ids import Seconds
from resile.common.backoff import Backoff

FIELD_MANAGER = "resile-operator"
LEASE = "resile-operator"

RECONCILE = Seconds(60.0)
"""One reconciliation of one object: a dozen requests at most."""
RELIST = Seconds(120.0)
"""How often everything is listed anew: the level-triggered net below the events."""
RETRY = Backoff(0.1, 60.0)
"""Pauses after a failed reconciliation of one object."""
RECHECK = Seconds(600.0)
"""How often it is checked that what a running master needs is still there. Secrets cannot be watched, since the right
to do so is the right to read all of them."""
WORKERS = 8
"""Objects reconciled concurrently: enough to hide the latency of requests, few enough to spare the API server."""

DELETIONS = 16
"""Pods deleted at a time: a job may have hundreds, and the renewal of the Lease must not wait behind them."""

LEASE_DURATION = Seconds(15.0)
"""How long a silent leader is believed to live."""
RENEW_DEADLINE = Seconds(10.0)
"""How long a leader tries to renew before it steps down; less than the above, so that two never lead."""
RETRY_PERIOD = Seconds(2.0)

FREE_STARTS = 5
"""Masters in a row that are started at once: a master that was killed or moved must be back without a pause."""
START_BACKOFF = Backoff(0.5, 30.0)
"""Pauses before the starts after those."""
HEALTHY = Seconds(60.0)
"""A master that lived this long was well; its end begins a new row."""
MASTER_GRACE = Seconds(10.0)
"""Between SIGTERM and SIGKILL of a master: it only closes its journal."""
LEAVING = Seconds(2.0)
"""How long a master that was told to end keeps its name before it is removed by force. A kubelet needs seconds to
report that a container ended, and one that is cut off never does; should the old master still run, the journal refuses
it."""
MAKE_ROOM = Seconds(20.0)
"""How long Kubernetes may take to remove what an earlier job of the same name left."""
NODE_LOST = Seconds(20.0)
"""How long a master stays on a node that is not ready; Kubernetes' own default is 300 s."""

PLAN_WAITS = Seconds(5.0)
"""How long a plan may be there before its job: both may be in one folder that is applied as a whole."""

TTL_ANNOTATION = "ttl_seconds_after_finished"
"""On a job: its pods are removed this long after its end; without it they stay as long as the job."""

HEALTH_PORT = 8081
HTTP_DEADLINE = Seconds(5.0)
"""For a whole exchange on the health port."""
MEASURE = Seconds(5.0)
"""Between two readings of the gauges."""
