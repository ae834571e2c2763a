"""An API server that misbehaves as it is told: every request takes the next of its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from lightkube.config.kubeconfig import Cluster, Context, SingleConfig, User

RESET = b"reset"
"""The answer of a connection that breaks."""
DRIP = b"drip"
"""Before an answer that comes one byte at a time, for seconds."""
JSON = "application/json"


def answer(body: object, code: int = 200, kind: str = JSON) -> bytes:
    """A whole answer; without a `kind` it does not say what it is."""
    text = body if isinstance(body, str) else json.dumps(body)
    head = f"HTTP/1.1 {code} Said\r\nConnection: close\r\nContent-Length: {len(text.encode())}\r\n"
    return (head + (f"Content-Type: {kind}\r\n" if kind else "") + "\r\n" + text).encode()


def refusal(code: int, message: str = "no", **details: Any) -> bytes:
    """An answer as an API server gives it when it says no."""
    return answer({"kind": "Status", "code": code, "message": message, "details": details}, code)


def listed(version: str, *items: dict[str, Any]) -> bytes:
    return answer({"metadata": {"resourceVersion": version}, "items": list(items)})


def watched(*events: tuple[str, dict[str, Any]] | str, then: bytes = b"") -> bytes:
    """The beginning of a watch; then silence, or the connection breaks."""
    lines = [
        event if isinstance(event, str) else json.dumps({"type": event[0], "object": event[1]}) for event in events
    ]
    body = "".join(f"{len(line.encode()) + 1:x}\r\n{line}\n\r\n" for line in lines)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nTransfer-Encoding: chunked\r\n\r\n"
    return (head + body).encode() + b"\0" + then


def thing(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "red", "uid": name, "resourceVersion": version}}


class Scripted:
    """The server, and what it was asked."""

    def __init__(self, answers: Iterable[bytes]) -> None:
        self._answers = list(answers)
        self._callers: set[asyncio.Future[None]] = set()
        self.asked: list[str] = []
        self.port = 0

    @property
    def config(self) -> SingleConfig:
        where = Cluster(server=f"http://127.0.0.1:{self.port}")
        return SingleConfig(context_name="test", context=Context(cluster="test"), cluster=where, user=User())

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._callers.add(task)
        task.add_done_callback(self._callers.discard)

    async def end(self) -> None:
        """Let go of callers that are still there."""
        for task in self._callers:
            task.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(request.split(b" ")[1].decode())
            said, watching, then = self._next().partition(b"\0")
            if said.startswith(DRIP):
                for byte in said.removeprefix(DRIP):
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.02)
            elif said != RESET:
                writer.write(said)
                await writer.drain()
            if watching and not then:
                await reader.read()  # until the caller has had enough
            if RESET in (said, then):
                writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _next(self) -> bytes:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@asynccontextmanager
async def scripted(*answers: bytes) -> AsyncIterator[Scripted]:
    """A server that gives these answers in turn, and the last of them for ever."""
    made = Scripted(answers)
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.end()
