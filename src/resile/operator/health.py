"""Serves /healthz, /readyz and /metrics over HTTP/1.1, with one answer for each connection.

Small on purpose: a web framework would take most of the operator's memory. Of a request only the path is used, and a
caller that is slow or sends too much is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import Callable

import msgspec

from resile.operator import intervals

MAX_REQUEST = 8192


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Routes = dict[str, Callable[[], Answer]]


async def serve(host: str, port: int, routes: Routes) -> asyncio.Server:
    """Serve these routes on a port until the server is closed. Raises `OSError` if the port is taken."""

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(intervals.HTTP_DEADLINE):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_written(_answer(request, routes)))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # the caller went away, or never was one
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(exchange, host, port, limit=MAX_REQUEST)


def _answer(request: bytes, routes: Routes) -> Answer:
    words = request.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3:
        return Answer(400, b"not HTTP\n")
    if words[0] not in (b"GET", b"HEAD"):
        return Answer(405, b"only GET\n")
    route = routes.get(words[1].split(b"?", 1)[0].decode("latin-1"))
    found = Answer(404, f"known are {', '.join(routes)}\n".encode()) if route is None else route()
    return msgspec.structs.replace(found, body=b"") if words[0] == b"HEAD" else found


def _written(answer: Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + answer.body
