"""Elects the one operator that acts: the leader renews a Lease, the others wait.

Clocks of different machines are never compared: an operator that waits measures by its own clock how long the Lease
has not changed. A leader that cannot renew steps down before another operator counts it as dead, so two never act at
once, as long as both clocks run at about the same speed. A leader that ends in good order gives the Lease back: the
next one acts within `intervals.RETRY_PERIOD`, after a crash within `intervals.LEASE_DURATION` more.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging

from resile.api.ids import Seconds
from resile.kube.client import Client
from resile.kube.errors import CONFLICT, KubeError
from resile.kube.kinds import LEASES, Object
from resile.operator import intervals

log = logging.getLogger("resile.operator")


class LeadershipLost(Exception):
    """Raised if the Lease was taken or was not renewed in time. Another operator may be the leader now."""


class LeaderElection:
    def __init__(self, client: Client, namespace: str, identity: str) -> None:
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._lease: Object | None = None
        self._seen: tuple[str, float] = ("", 0.0)

    async def win(self) -> None:
        said = ""
        while True:
            try:
                if await self._attempt():
                    log.info("%s leads", self._identity)
                    return
                holder = _spec(self._lease).get("holderIdentity") or "no operator"
                if holder != said:
                    log.info("%s leads; %s waits", holder, self._identity)
                    said = holder
            except KubeError as error:
                log.warning("the lease %s/%s: %s", self._namespace, intervals.LEASE, error)
            await asyncio.sleep(intervals.RETRY_PERIOD)

    async def keep(self) -> None:
        """Renew the Lease until cancelled; raises `LeadershipLost` if it cannot be renewed in time or was taken."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        while True:
            await asyncio.sleep(intervals.RETRY_PERIOD)
            left = renewed + intervals.RENEW_DEADLINE - loop.time()
            try:
                async with asyncio.timeout(max(0.0, left)):
                    begun = loop.time()
                    if not await self._renew():
                        raise LeadershipLost("another operator took the lease")
                    renewed = begun
            except (KubeError, TimeoutError) as error:
                log.warning("the lease was not renewed: %s", str(error) or "no answer in time")
            if loop.time() - renewed >= intervals.RENEW_DEADLINE:
                raise LeadershipLost(f"the lease was not renewed for {intervals.RENEW_DEADLINE:.0f} s")

    async def resign(self) -> None:
        """Give the Lease back, so that the next leader need not wait until it expires."""
        with contextlib.suppress(KubeError, TimeoutError):
            async with asyncio.timeout(intervals.RETRY_PERIOD):
                while _spec(self._lease).get("holderIdentity") == self._identity:
                    if await self._write(self._lease, holder="", duration=Seconds(1.0)):
                        return
                    # A conflict: a renewal that was cut short by the end of this operator was written nevertheless.
                    self._lease = await self._client.get(LEASES, self._namespace, intervals.LEASE)

    async def _attempt(self) -> bool:
        """Take the Lease if no operator has it, or if its holder has been silent for too long. False if not taken."""
        lease = await self._client.get(LEASES, self._namespace, intervals.LEASE)
        now = asyncio.get_running_loop().time()
        if lease is None:
            return await self._write(None)
        spec = _spec(lease)
        self._lease = lease
        version = str(lease["metadata"]["resourceVersion"])
        if version != self._seen[0]:
            self._seen = (version, now)
        holder = spec.get("holderIdentity") or ""
        silent = now - self._seen[1] >= float(spec.get("leaseDurationSeconds") or 0)
        if holder in ("", self._identity) or silent:
            return await self._write(lease)
        return False

    async def _renew(self) -> bool:
        if await self._write(self._lease):
            return True
        # A conflict: another request wrote it, perhaps one of this operator that seemed lost.
        self._lease = await self._client.get(LEASES, self._namespace, intervals.LEASE)
        return _spec(self._lease).get("holderIdentity") == self._identity

    async def _write(
        self, lease: Object | None, holder: str | None = None, duration: Seconds = intervals.LEASE_DURATION
    ) -> bool:
        """Replace `lease` by a claim of this operator, or create the Lease if `lease` is None.

        The Lease then names `holder` as its holder, by default this operator. An empty `holder` gives the Lease back.
        Returns False if another request has changed or created the Lease in the meantime.
        """
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = _spec(lease)
        taken = before.get("holderIdentity") != self._identity
        spec = {
            "holderIdentity": self._identity if holder is None else holder,
            "leaseDurationSeconds": int(duration),
            "acquireTime": now if taken else before.get("acquireTime") or now,
            "renewTime": now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (1 if taken and lease is not None else 0),
        }
        metadata = {"name": intervals.LEASE, "namespace": self._namespace}
        if lease is None:
            self._lease = await self._client.create(LEASES, {"metadata": metadata, "spec": spec})
            return self._lease is not None
        metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        try:
            self._lease = await self._client.replace(LEASES, {"metadata": metadata, "spec": spec})
        except KubeError as error:
            if error.code == CONFLICT:
                return False
            raise
        return True


def _spec(lease: Object | None) -> Object:
    return (lease or {}).get("spec") or {}
