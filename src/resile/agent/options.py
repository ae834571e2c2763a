"""What an agent is started with: the flags of `resile run`, resolved and checked.

Pure data, filled in by the command line. Nothing here is "maybe": counts are numbers, addresses are split, programs are
found, so the agent never parses a string that a user wrote and never fails late for what could be seen at the start.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from resile.api.timeouts import Timeouts, derive
from resile.protocol.reports import RendezvousConfig

LOCAL_RANK_MACRO = "${local_rank}"
"""Replaced by the local rank in every word of the command, as torchrun does."""

TORCHRUN_ROLE = "default"
DLROVER_ROLE = "dlrover-trainer"


class Std(enum.IntFlag):
    """Which standard streams of a training process; the numbers are those of `--redirects` and `--tee`."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class Endpoint(msgspec.Struct, frozen=True):
    """Where a master listens. IPv6 addresses are kept without their brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """How this agent proves itself to its master. All empty: no proof asked, fit for one machine only."""

    token: str = ""
    """The job's secret itself; it never shows in `repr` and is never handed to a training process."""
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""
    """The name that the master's certificate must hold; empty: any, since `tls_ca` vouches for masters alone."""

    def __rich_repr__(self) -> Any:
        """The fields by name, with a mark in place of the secret."""
        yield "token", "***" if self.token else ""
        for name in ("token_file", "tls_cert", "tls_key", "tls_ca", "tls_name"):
            yield name, getattr(self, name)

    def __repr__(self) -> str:
        return f"Security({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One `resile run`, ready to be launched."""

    command: tuple[str, ...]
    """Program and arguments of every training process; start them with `command_of`."""
    nproc: int
    """Training processes on this node."""
    rendezvous: RendezvousConfig
    run_id: str
    """What training processes see as TORCHELASTIC_RUN_ID."""
    job_name: str
    role: str = TORCHRUN_ROLE
    """What training processes see as ROLE_NAME."""

    endpoint: Endpoint | None = None
    """Where the master is. None: this node is a job of its own, its master takes a free port on the loopback."""
    managed: bool = False
    """A platform started this node and its master (DLROVER_MASTER_ADDR is set); `endpoint` is that master."""
    hosts: bool | None = None
    """Whether this node runs the master at `endpoint`. None: it does if the endpoint's host is this machine."""
    node_rank: int | None = None
    """The place this node asks for (`--node-rank` of a static rendezvous); None: any."""
    local_addr: str | None = None
    """How other nodes reach this one; None: find out."""

    timeouts: Timeouts = msgspec.field(default_factory=derive)
    signals: tuple[int, ...] = ()
    """Signals to this agent that end the run after passing them on to the training processes."""

    standbys: int = 0
    """How many warm interpreters wait to replace processes; 0: every process starts from scratch."""
    preload: tuple[str, ...] = ()
    """Modules that they import beside those of torch that the script's source names."""

    log_dir: str | None = None
    """None: a new temporary directory, and only if some stream or error needs a file."""
    redirects: dict[int, Std] = {}
    """For every local rank, the streams that go to files alone."""
    tee: dict[int, Std] = {}
    """For every local rank, the streams that go to files and to the console."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks that may write to the console; None: all."""
    log_prefix: str | None = None
    """Template of the prefix of teed lines: ${role_name}, ${rank}, ${local_rank}."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()

    environment: dict[str, str] = {}
    """Variables for every training process on top of the agent's own."""
    virtual_local_rank: bool = False
    """Each process sees only its own GPU, as device 0, and LOCAL_RANK 0."""
    security: Security = Security()
    state_dir: str | None = None
    """Where a master on this node keeps its journal; None: beside the logs."""
    notices: tuple[str, ...] = ()
    """One line for each flag that was accepted without effect; the launcher prints them once."""

    def command_of(self, local_rank: int) -> tuple[str, ...]:
        """The command line of one training process."""
        return tuple(word.replace(LOCAL_RANK_MACRO, str(local_rank)) for word in self.command)

    def to_file(self, local_rank: int) -> Std:
        """Streams of one process that need a file: what is teed goes through a file too."""
        return self.redirects.get(local_rank, Std.NONE) | self.tee.get(local_rank, Std.NONE)

    def to_console(self, local_rank: int) -> Std:
        """Streams of one process that reach the console, teed or direct."""
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return Std.NONE
        only_file = self.redirects.get(local_rank, Std.NONE) & ~self.tee.get(local_rank, Std.NONE)
        return Std.ALL & ~only_file
