"""Every interval, limit and name of the operator, with its reason."""

from __future__ import annotations

from resile.api.ids import Seconds
from resile.common.backoff import Backoff

FIELD_MANAGER = "resile-operator"
LEASE = "resile-operator"

RECONCILE = Seconds(60.0)
"""How long one reconciliation may take: a dozen requests at most."""
RELIST = Seconds(120.0)
"""How often all objects are listed again, in case a change was missed."""
RETRY = Backoff(0.1, 60.0)
"""Pauses after a failed reconciliation of one object."""
RECHECK = Seconds(600.0)
"""How often the operator checks that the objects of a running master still exist. It cannot watch Secrets, since the
right to do so is the right to read all of them."""
WORKERS = 8
"""Objects reconciled concurrently: enough to hide the latency of requests, few enough to spare the API server."""

DELETIONS = 16
"""Pods deleted at a time: a job may have hundreds, and the renewal of the Lease must not wait behind them."""

LEASE_DURATION = Seconds(15.0)
"""How long a leader that does not renew its Lease still counts as the leader."""
RENEW_DEADLINE = Seconds(10.0)
"""How long a leader tries to renew its Lease before it gives up; shorter than `LEASE_DURATION`: two never lead."""
RETRY_PERIOD = Seconds(2.0)

FREE_STARTS = 5
"""How many masters of a job in a row are started without a pause, so that a killed or moved one is back at once."""
START_BACKOFF = Backoff(0.5, 30.0)
"""Pauses before further starts of a job's master, after `FREE_STARTS` in a row."""
HEALTHY = Seconds(60.0)
"""If a master lived this long, the count of starts in a row begins anew."""
MASTER_GRACE = Seconds(10.0)
"""Time between SIGTERM and SIGKILL of a master. It is short, since the master only closes its journal."""
LEAVING = Seconds(2.0)
"""How long the pod of a master that was told to end is kept before it is removed by force. A kubelet needs seconds to
report that a container ended, and a kubelet without a connection never does. If the old master still runs, the journal
refuses its writes."""
MAKE_ROOM = Seconds(20.0)
"""How long a new job waits until Kubernetes has removed the objects of an earlier job of the same name."""
NODE_LOST = Seconds(20.0)
"""How long a master's pod stays on a machine that is not ready; Kubernetes' own default is 300 s."""

PLAN_WAITS = Seconds(5.0)
"""How long a plan may wait for its job to be created: one `kubectl apply` may create both, in any order."""

TTL_ANNOTATION = "ttl_seconds_after_finished"
"""Annotation of a job: its pods are removed this long after its end. Without it they stay as long as the job."""

HEALTH_PORT = 8081
HTTP_DEADLINE = Seconds(5.0)
"""How long a request on the health port, including the answer, may take."""
MEASURE = Seconds(5.0)
"""Seconds between two updates of the operator's gauges."""
