"""The few questions asked of the API server and of health endpoints, over the standard library alone."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import cache
from typing import Any

from identities import ADMIN, AUTHORITY, Identity
from settings import KUBELET_PORT, SERVER, Node

ANSWER_DEADLINE = 10.0
HEALTH_DEADLINE = 2.0

# What a request may fail with when the other side is down, restarting or gone.
UNREACHABLE = (OSError, http.client.HTTPException, TimeoutError)


class Refused(Exception):
    """The API server answered, and the answer is no; `code` is the HTTP status."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@cache
def _context(identity: Identity) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(AUTHORITY))
    context.load_cert_chain(identity.certificate, identity.key)
    return context


def request(method: str, path: str, body: object = None, identity: Identity = ADMIN) -> Any:
    """Ask the API server and return the decoded answer.

    Raises:
        Refused: the server said no.
        OSError: the server could not be reached.
    """
    data = None if body is None else json.dumps(body).encode()
    kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
    asked = urllib.request.Request(f"{SERVER}{path}", data, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=ANSWER_DEADLINE, context=_context(identity)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Refused(error.code, error.read().decode(errors="replace")) from None


def watch(path: str, version: str, identity: Identity, silence: float) -> Iterator[dict[str, Any]]:
    """Yield changes after a resource version until the server ends the stream (it does so after `silence` seconds)."""
    url = f"{SERVER}{path}?watch=1&resourceVersion={version}&timeoutSeconds={silence:.0f}"
    with urllib.request.urlopen(url, timeout=silence + ANSWER_DEADLINE, context=_context(identity)) as answer:
        for line in answer:
            yield json.loads(line)


def healthy(url: str) -> bool:
    """Say whether a health endpoint answers 200; its certificate is not the question here."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _answers(url, context)


def api_healthy() -> bool:
    """Say whether the API server is ready to serve, its bootstrap roles included."""
    return _answers(f"{SERVER}/readyz", _context(ADMIN))


def kubelet_healthy(node: Node) -> bool:
    """Say whether a node's kubelet answers to the administrator."""
    return _answers(f"https://{node.address}:{KUBELET_PORT}/healthz", _context(ADMIN))


def listens(address: str, port: int) -> bool:
    """Say whether somebody accepts connections there."""
    try:
        with socket.create_connection((address, port), HEALTH_DEADLINE):
            return True
    except OSError:
        return False


def _answers(url: str, context: ssl.SSLContext) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=HEALTH_DEADLINE, context=context) as answer:
            return bool(answer.status == 200)
    except UNREACHABLE:
        return False
