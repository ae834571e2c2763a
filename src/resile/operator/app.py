"""The operator's process: runs the election, the controller, and the ports for health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator

import msgspec

from resile.kube.client import Client
from resile.kube.errors import KubeError
from resile.kube.kinds import ALL_NAMESPACES, PODS
from resile.operator import intervals
from resile.operator.controller import Controller
from resile.operator.health import Answer, Routes, serve
from resile.operator.leader_election import LeaderElection, LeadershipLost
from resile.operator.metrics import Metrics

log = logging.getLogger("resile.operator")

STEPPED_DOWN = 1
"""Exit code of an operator that lost its Lease. The Deployment starts it again; it then waits to become leader."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    """The namespace to watch, or `ALL_NAMESPACES`."""
    image: str
    """The image of masters; if empty, they get the image of this operator's own pod."""
    fallback_image: str
    """The image of masters if `image` is empty and the operator does not run in a pod."""
    elect: bool
    lease_namespace: str
    host: str
    health_port: int | None = intervals.HEALTH_PORT
    metrics_port: int | None = None


async def run(client: Client, options: Options) -> int:
    """Run the operator. Returns the exit code: 0 after SIGTERM or SIGINT, 1 if the Lease was lost."""
    operator = Operator(client, options)
    async with operator.ports():
        work = asyncio.ensure_future(operator.work())
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, work.cancel)
        try:
            return await work
        except asyncio.CancelledError:
            return 0


class Operator:
    def __init__(self, client: Client, options: Options) -> None:
        self._client = client
        self._options = options
        self._metrics = Metrics()
        self._controller: Controller | None = None

    @contextlib.asynccontextmanager
    async def ports(self) -> AsyncIterator[None]:
        numbers: Routes = {"/metrics": self._numbers}
        health: Routes = {"/healthz": lambda: Answer(200, b"ok\n"), "/readyz": self._ready, **numbers}
        ports = {self._options.metrics_port: numbers, self._options.health_port: health}
        async with contextlib.AsyncExitStack() as stack:
            for port, routes in ports.items():
                if port is not None:
                    await stack.enter_async_context(await serve(self._options.host, port, routes))
            yield

    async def work(self) -> int:
        """Win the election if `elect` is set, and reconcile until the Lease is lost. Returns the exit code."""
        if not self._options.elect:
            await self._lead()
            return 0
        name = os.environ.get("POD_NAME") or socket.gethostname()
        election = LeaderElection(self._client, self._options.lease_namespace, f"{name}_{uuid.uuid4().hex[:8]}")
        await election.win()
        code = 0
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(election.keep())
                group.create_task(self._lead())
        except* LeadershipLost as lost:
            log.error("stepping down: %s", lost.exceptions[0])
            code = STEPPED_DOWN
        finally:
            self._metrics.leader.set(0)
            await election.resign()
        return code

    async def _lead(self) -> None:
        image = await self._image()
        everywhere = self._options.namespace == ALL_NAMESPACES
        where = "all namespaces" if everywhere else f"the namespace {self._options.namespace}"
        log.info("watching %s; masters run in the image %s", where, image)
        self._metrics.leader.set(1)
        self._controller = Controller(self._client, self._options.namespace, image, self._metrics)
        await self._controller.run()

    async def _image(self) -> str:
        name, namespace = os.environ.get("POD_NAME"), os.environ.get("POD_NAMESPACE")
        while not self._options.image and name and namespace:
            try:
                pod = await self._client.get(PODS, namespace, name)
            except KubeError as error:
                log.warning("the operator's own pod: %s", error)
                await asyncio.sleep(intervals.RETRY_PERIOD)
                continue
            containers = ((pod or {}).get("spec") or {}).get("containers") or [{}]
            return str(containers[0].get("image") or self._options.fallback_image)
        return self._options.image or self._options.fallback_image

    def _ready(self) -> Answer:
        """Answer /readyz. An operator that does not lead is ready; a leader is ready once it has listed all objects."""
        missing = self._controller.not_synced() if self._controller is not None else []
        if missing:
            return Answer(503, f"not seen yet: {', '.join(missing)}\n".encode())
        return Answer(200, b"ok\n")

    def _numbers(self) -> Answer:
        return Answer(200, self._metrics.text(), "text/plain; version=0.0.4; charset=utf-8")
