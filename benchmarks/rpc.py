"""Which RPC carries 10,000 agents: our frames over asyncio, or grpc.aio? Same load, same machine, one table.

The server under test is a process of its own. This process plays all agents over loopback with raw sockets (for gRPC it
speaks just enough HTTP/2), so that simulating agents costs the same little for both and the server is what is measured:
connections that are idle but for a heartbeat each, a request now and then, and one message to all agents.

    python -m benchmarks.rpc --agents 10000 --seconds 10
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import select
import socket
import subprocess
import sys
import time
from typing import Any, Protocol

import msgspec

from resile.protocol.agent_to_master import Heartbeat
from resile.protocol.commands import Answer, Ask, Failed, ToMaster
from resile.protocol.job_changes import Stop
from resile.protocol.master_to_agent import RoundOver
from resile.protocol.message import Message
from resile.wire.connection import serve
from resile.wire.frames import HEARTBEAT_FRAME, PREFIX, MessageDecoder, encode
from resile.wire.handshake import ClientHandshake
from resile.wire.transport import Connection

HEARTBEAT_EVERY = 0.625
"""Seconds between the heartbeats of one agent: the default recovery budget's share."""

TICK = 0.001
"""How finely the agents' heartbeats are spread. Coarser ticks would flatter the server: more messages per wake-up."""

AT_ONCE = 256
"""Agents that may be in the middle of connecting."""

PATIENCE = 120.0
"""Seconds for all agents to connect, and for a broadcast, before a transport is given up at this size."""

TOKEN = b"benchmark"
BROADCAST = RoundOver(round=1, because="worker-3 was lost")  # type: ignore[arg-type]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one transport cost with `agents` connections."""

    transport: str
    agents: int
    connect_seconds: float
    cores: float
    """User and system CPU seconds of the server per second of wall time."""
    memory_mb: float
    broadcast_ms: float
    """From the request until the last agent has the message."""
    latency_p50_ms: float
    latency_p99_ms: float


# the servers under test -----------------------------------------------------------------------------------------------


def _say_port(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


async def _serve_ours() -> None:
    heard: dict[Connection, float] = {}
    loop = asyncio.get_running_loop()
    beats = 0

    def on_message(connection: Connection, message: Message) -> None:
        nonlocal beats
        heard[connection] = loop.time()
        if type(message) is Heartbeat:
            beats += 1
            return
        if isinstance(message, Ask):
            if message.command == Stop(because="broadcast"):
                frame = encode(BROADCAST)
                for each in server.connections:
                    each.send_frame(frame)
            connection.send(Answer(request=message.request, result=Failed(error=str(beats))))

    def on_close(connection: Connection, because: str) -> None:
        heard.pop(connection, None)

    server = await serve("127.0.0.1", 0, token=TOKEN, decode=ToMaster, on_message=on_message, on_close=on_close)
    _say_port(server.port)
    await asyncio.Event().wait()


async def _serve_grpc() -> None:
    import grpc

    heard: dict[Any, float] = {}
    loop = asyncio.get_running_loop()
    decoder = MessageDecoder(ToMaster)
    heartbeat = HEARTBEAT_FRAME[PREFIX:]
    beats = 0

    async def agent(requests: Any, context: Any) -> None:
        nonlocal beats
        heard[context] = loop.time()
        try:
            async for body in requests:
                heard[context] = loop.time()
                if body == heartbeat:
                    beats += 1
                    continue
                message = decoder.decode(body)
                if isinstance(message, Ask):
                    if message.command == Stop(because="broadcast"):
                        note = encode(BROADCAST)[PREFIX:]
                        await asyncio.gather(*(each.write(note) for each in list(heard)))
                    await context.write(
                        encode(Answer(request=message.request, result=Failed(error=str(beats))))[PREFIX:]
                    )
        finally:
            heard.pop(context, None)

    handler = grpc.stream_stream_rpc_method_handler(agent)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("resile.Master", {"Agent": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _say_port(port)
    await server.wait_for_termination()


SERVERS = {"ours": _serve_ours, "grpc.aio": _serve_grpc}


# the agents -----------------------------------------------------------------------------------------------------------


class Agent(Protocol):
    """One simulated agent's side of a protocol, without I/O."""

    ready: bool
    heartbeat: bytes

    def hello(self) -> bytes:
        """The first bytes."""

    def feed(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """Bytes to send back, and the messages that `data` completed."""

    def message(self, message: Message) -> bytes:
        """One message as bytes to send."""


class OurAgent:
    """Our frames behind our handshake."""

    heartbeat = HEARTBEAT_FRAME

    def __init__(self) -> None:
        self._handshake: ClientHandshake | None = ClientHandshake(TOKEN, "the server")
        self._got = b""
        self.ready = False

    def hello(self) -> bytes:
        """The handshake's first part."""
        return self._handshake.hello if self._handshake else b""

    def feed(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """Cut frames by their lengths."""
        answer = b""
        if self._handshake is not None:
            answer = self._handshake.feed(data)
            if not self._handshake.finished:
                return answer, []
            data, self._handshake, self.ready = self._handshake.rest, None, True
        self._got += data
        bodies = []
        while len(self._got) >= PREFIX:
            end = PREFIX + int.from_bytes(self._got[:PREFIX], "big")
            if len(self._got) < end:
                break
            bodies.append(self._got[PREFIX:end])
            self._got = self._got[end:]
        return answer, bodies

    def message(self, message: Message) -> bytes:
        """One frame."""
        return encode(message)


def _http2(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _header(name: bytes, value: bytes) -> bytes:
    """HPACK's plainest form: a literal, not indexed, not compressed."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
_HTTP2_HELLO = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _http2(SETTINGS, 0, 0)
    + _http2(
        HEADERS,
        0x4,
        1,
        _header(b":method", b"POST")
        + _header(b":scheme", b"http")
        + _header(b":path", b"/resile.Master/Agent")
        + _header(b":authority", b"localhost")
        + _header(b"te", b"trailers")
        + _header(b"content-type", b"application/grpc"),
    )
)


class GrpcAgent:
    """A gRPC bidirectional stream of bytes, as far as a server needs to see it."""

    heartbeat = _http2(
        DATA, 0, 1, b"\0" + (len(HEARTBEAT_FRAME) - PREFIX).to_bytes(4, "big") + HEARTBEAT_FRAME[PREFIX:]
    )

    def __init__(self) -> None:
        self._got = b""
        self.ready = False

    def hello(self) -> bytes:
        """Preface, settings, the call's headers and a request, whose answer says that the server's handler runs."""
        return _HTTP2_HELLO + self.message(Ask(request=0, command=Stop(because="ready")))

    def feed(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """Take DATA frames; acknowledge settings and pings."""
        self._got += data
        answer, bodies = b"", []
        while len(self._got) >= 9:
            end = 9 + int.from_bytes(self._got[:3], "big")
            if len(self._got) < end:
                break
            kind, flags, payload = self._got[3], self._got[4], self._got[9:end]
            if kind == SETTINGS and not flags & 1:
                answer += _http2(SETTINGS, 1, 0)
            elif kind == PING and not flags & 1:
                answer += _http2(PING, 1, 0, payload)
            elif kind == DATA:
                if self.ready:
                    bodies.append(payload[5:])  # a flag and a length come first
                self.ready = True
            self._got = self._got[end:]
        return answer, bodies

    def message(self, message: Message) -> bytes:
        """One gRPC message in one DATA frame."""
        body = encode(message)[PREFIX:]
        return _http2(DATA, 0, 1, b"\0" + len(body).to_bytes(4, "big") + body)


AGENTS: dict[str, type[OurAgent] | type[GrpcAgent]] = {"ours": OurAgent, "grpc.aio": GrpcAgent}


class Crowd:
    """All agents of one run, and one more that asks."""

    def __init__(self, transport: str, port: int, tick: float) -> None:
        self._tick = tick
        self._kind = AGENTS[transport]
        self._port = port
        self._poll = select.epoll()
        self._agents: dict[int, tuple[socket.socket, Agent]] = {}
        self._order: list[socket.socket] = []
        self.received = 0
        self.sent = 0

    def connect(self, count: int) -> None:
        """Open `count` connections and see each through its handshake."""
        give_up = time.monotonic() + PATIENCE
        opening: set[int] = set()
        while len(self._agents) < count or opening:
            while len(self._agents) < count and len(opening) < AT_ONCE:
                sock = socket.create_connection(("127.0.0.1", self._port))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setblocking(False)
                agent = self._kind()
                self._agents[sock.fileno()] = sock, agent
                self._order.append(sock)
                self._poll.register(sock, select.EPOLLIN)
                opening.add(sock.fileno())
                sock.send(agent.hello())
            self.listen(0.1)
            opening = {number for number in opening if not self._agents[number][1].ready}
            if time.monotonic() > give_up:
                raise TimeoutError(f"{len(self._agents) - len(opening)} of {count} connected in {PATIENCE:g} s")

    def listen(self, patience: float) -> dict[int, list[bytes]]:
        """Read whatever has come; the messages that agents got."""
        heard: dict[int, list[bytes]] = {}
        for number, _ in self._poll.poll(patience):
            sock, agent = self._agents[number]
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("the server closed an agent's connection")
            answer, bodies = agent.feed(data)
            if answer:
                sock.send(answer)
            if bodies:
                self.received += len(bodies)
                heard[number] = bodies
        return heard

    def beat(self, seconds: float) -> list[float]:
        """Send the heartbeats of all agents, evenly spread, for so long; the latencies of requests made meanwhile."""
        asker = self._order[-1]
        agent = self._agents[asker.fileno()][1]
        crowd = self._order[:-1]
        rate = len(crowd) / HEARTBEAT_EVERY
        latencies: list[float] = []
        asked: float | None = None
        start = time.monotonic()
        sent, next_ask = 0, start
        heartbeat = self._kind.heartbeat
        while (now := time.monotonic()) < start + seconds:
            due = int((now - start) * rate)
            while sent < due:
                crowd[sent % len(crowd)].send(heartbeat)
                sent += 1
            if asked is None and now >= next_ask:
                asked, next_ask = time.monotonic(), now + 0.02
                asker.send(agent.message(Ask(request=1, command=Stop(because="state"))))
            if asker.fileno() in self.listen(self._tick) and asked is not None:
                latencies.append(time.monotonic() - asked)
                asked = None
        self.sent += sent
        return sorted(latencies)

    def check(self) -> None:
        """See that the server has heard every heartbeat sent: a load that did not arrive would prove nothing."""
        asker = self._order[-1]
        asker.send(self._agents[asker.fileno()][1].message(Ask(request=3, command=Stop(because="count"))))
        give_up = time.monotonic() + PATIENCE
        counted = -1
        while time.monotonic() < give_up:
            for body in self.listen(1.0).get(asker.fileno(), ()):
                answer = msgspec.msgpack.decode(body, type=Answer | RoundOver)
                if isinstance(answer, Answer) and isinstance(answer.result, Failed) and answer.request == 3:
                    counted = int(answer.result.error)
            if counted >= self.sent:
                return
            if counted >= 0:
                asker.send(self._agents[asker.fileno()][1].message(Ask(request=3, command=Stop(because="count"))))
        raise TimeoutError(f"the server heard {counted} of {self.sent} heartbeats")

    def broadcast(self) -> float:
        """Seconds from asking for a message to all agents until all have it."""
        asker = self._order[-1]
        self.received = 0
        start = time.monotonic()
        asker.send(self._agents[asker.fileno()][1].message(Ask(request=2, command=Stop(because="broadcast"))))
        while self.received < len(self._order) + 1:  # the asker's own copy and its answer
            self.listen(1.0)
            if time.monotonic() > start + PATIENCE:
                raise TimeoutError(f"{self.received} of {len(self._order)} got the broadcast in {PATIENCE:g} s")
        return time.monotonic() - start

    def close(self) -> None:
        """Hang up."""
        for sock in self._order:
            sock.close()
        self._poll.close()


# measuring ------------------------------------------------------------------------------------------------------------


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(transport: str, agents: int, seconds: float, tick: float = TICK) -> Row:
    """Start a server, load it, and say what that cost.

    Raises:
        TimeoutError: the transport did not manage this many agents within PATIENCE.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.rpc", "--serve", transport], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        crowd = Crowd(transport, int(server.stdout.readline()), tick)
        start = time.monotonic()
        crowd.connect(agents)
        connected = time.monotonic() - start
        crowd.beat(1.0)  # settle
        cpu, start = _cpu(server.pid), time.monotonic()
        latencies = crowd.beat(seconds)
        cores = (_cpu(server.pid) - cpu) / (time.monotonic() - start)
        crowd.check()
        spread = sorted(crowd.broadcast() for _ in range(3))[1]
        memory = _memory(server.pid)
        crowd.close()
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    return Row(
        transport=transport,
        agents=agents,
        connect_seconds=connected,
        cores=cores,
        memory_mb=memory,
        broadcast_ms=spread * 1000,
        latency_p50_ms=latencies[len(latencies) // 2] * 1000,
        latency_p99_ms=latencies[len(latencies) * 99 // 100] * 1000,
    )


def run(agents: int = 10_000, seconds: float = 10.0, tick: float = TICK) -> list[Row]:
    """Both transports, one after the other; one that cannot manage `agents` is tried with ever fewer."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    for transport in SERVERS:
        size = agents
        while size:
            try:
                rows.append(measure(transport, size, seconds, tick))
                break
            except (TimeoutError, ConnectionError) as trouble:
                sys.stderr.write(f"{transport} with {size} agents: {trouble}\n")
                size //= 4
    return rows


def table(rows: list[Row]) -> str:
    """The rows and, below each of the others, how many times our cost it is."""
    names = ("connect s", "server cores", "server MB", "broadcast ms", "latency p50 ms", "latency p99 ms")

    def costs(row: Row) -> tuple[float, ...]:
        return (
            row.connect_seconds,
            row.cores,
            row.memory_mb,
            row.broadcast_ms,
            row.latency_p50_ms,
            row.latency_p99_ms,
        )

    lines = [f"{'transport':<12}{'agents':>8}" + "".join(f"{name:>16}" for name in names)]
    for row in rows:
        lines.append(f"{row.transport:<12}{row.agents:>8}" + "".join(f"{cost:>16.2f}" for cost in costs(row)))
        if row is not rows[0]:
            ratios = [theirs / ours for theirs, ours in zip(costs(row), costs(rows[0]), strict=True)]
            lines.append(f"{'  ratio':<12}{'':>8}" + "".join(f"{ratio:>15.1f}x" for ratio in ratios))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rpc", description="Compare RPC transports under load.")
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument(
        "--tick", type=float, default=TICK, help="seconds of heartbeats sent in one go; 0 sends each alone"
    )
    parser.add_argument("--serve", choices=SERVERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(SERVERS[options.serve]())
    else:
        sys.stdout.write(table(run(options.agents, options.seconds, options.tick)) + "\n")


if __name__ == "__main__":
    main()
