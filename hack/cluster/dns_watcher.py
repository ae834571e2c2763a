"""Keep dnsmasq's hosts file equal to the cluster's Services and Endpoints, by list and watch.

A Service has its cluster address under `NAME.NAMESPACE.svc.DOMAIN`. One without (headless) has the addresses of its
ready endpoints there (of all of them with `publishNotReadyAddresses`), and each endpoint that has a hostname under
`HOSTNAME.NAME...` too. A change is in the file within a few milliseconds; a lost API server costs nothing but news.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any

from client import UNREACHABLE, Refused, request, watch
from dns import DNSMASQ, HOSTS
from identities import DNS
from processes import running
from settings import CLUSTER_DOMAIN

Objects = dict[tuple[str, str], dict[str, Any]]

# Changes that come together are written together; a watch is renewed every few minutes; a lost server is asked again.
SETTLE = 0.01
WATCH_SECONDS = 290.0
RETRY = 1.0


class Mirror:
    """A copy of all objects of one kind, kept up to date by a thread; `changed` is set after every change."""

    def __init__(self, path: str, changed: threading.Event) -> None:
        self._path = path
        self._changed = changed
        self._objects: Objects = {}
        self._lock = threading.Lock()
        self.complete = threading.Event()

    def objects(self) -> Objects:
        """Return the copy as it is now."""
        with self._lock:
            return dict(self._objects)

    def follow(self) -> None:
        """Follow the server for ever. Whatever goes wrong with it, the answer is to list again a second later."""
        while True:
            try:
                self._list_and_watch()
            except (*UNREACHABLE, Refused, ValueError) as error:
                print(f"{self._path}: {error}; listing again", file=sys.stderr, flush=True)
                time.sleep(RETRY)

    def _list_and_watch(self) -> None:
        listed = request("GET", self._path, identity=DNS)
        with self._lock:
            self._objects = {_key(item): item for item in listed["items"]}
        self.complete.set()
        self._changed.set()
        for change in watch(self._path, listed["metadata"]["resourceVersion"], DNS, WATCH_SECONDS):
            if change["type"] == "ERROR":
                return
            with self._lock:
                if change["type"] == "DELETED":
                    self._objects.pop(_key(change["object"]), None)
                else:
                    self._objects[_key(change["object"])] = change["object"]
            self._changed.set()


def _key(item: dict[str, Any]) -> tuple[str, str]:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def hosts(services: Objects, endpoints: Objects) -> str:
    """Return the hosts file for these Services and Endpoints: one line per address and name, sorted."""
    lines: set[str] = set()
    for (namespace, name), service in services.items():
        spec = service["spec"]
        domain = f"{name}.{namespace}.svc.{CLUSTER_DOMAIN}"
        address = spec.get("clusterIP", "")
        if address not in ("", "None"):
            lines.add(f"{address} {domain}")
            continue
        for subset in endpoints.get((namespace, name), {}).get("subsets") or []:
            listed = list(subset.get("addresses") or [])
            if spec.get("publishNotReadyAddresses"):
                listed += subset.get("notReadyAddresses") or []
            for endpoint in listed:
                lines.add(f"{endpoint['ip']} {domain}")
                if endpoint.get("hostname"):
                    lines.add(f"{endpoint['ip']} {endpoint['hostname']}.{domain}")
    return "".join(f"{line}\n" for line in sorted(lines))


def main() -> None:
    """Follow both kinds and write the file after every change, until told to end."""
    changed = threading.Event()
    services = Mirror("/api/v1/services", changed)
    endpoints = Mirror("/api/v1/endpoints", changed)
    for mirror in (services, endpoints):
        threading.Thread(target=mirror.follow, daemon=True).start()
    services.complete.wait()
    endpoints.complete.wait()
    written = ""
    while True:
        changed.wait()
        time.sleep(SETTLE)
        changed.clear()
        text = hosts(services.objects(), endpoints.objects())
        if text == written:
            continue
        scratch = HOSTS.with_suffix(".part")
        scratch.write_text(text)
        scratch.rename(HOSTS)
        written = text
        server = running(DNSMASQ)
        if server is not None and server.handles(signal.SIGHUP):  # else it would end; it reads the file at its start
            server.send(signal.SIGHUP)


if __name__ == "__main__":
    main()
