"""The options of an agent: the flags of `resile run`, resolved and checked.

The command line fills them in. Counts are numbers here, addresses are split and programs are found. So the agent never
parses a string that a user wrote, and never fails late for a mistake that could be seen at the start.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from resile.api.ids import Rank
from resile.api.timeouts import Timeouts, derive
from resile.protocol.reports import RendezvousConfig

LOCAL_RANK_MACRO = "${local_rank}"
"""Replaced by the local rank in every word of the command, as torchrun does."""

TORCHRUN_ROLE = "default"
DLROVER_ROLE = "dlrover-trainer"


class Std(enum.IntFlag):
    """A set of standard streams of a training process, with the numbers of `--redirects` and `--tee`."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class Endpoint(msgspec.Struct, frozen=True):
    """Where a master listens. IPv6 addresses have no brackets here."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """Secrets and certificates of this agent. If all are empty, the job is safe on one machine only."""

    token: str = ""
    """The job's secret. `repr` hides it, and training processes do not get it."""
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""
    """The name that the master's certificate must hold; empty accepts any, because `tls_ca` signs for masters only."""

    def __rich_repr__(self) -> Any:
        yield from (msgspec.structs.asdict(self) | {"token": "***" if self.token else ""}).items()

    def __repr__(self) -> str:
        return f"Security({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    command: tuple[str, ...]
    """Program and arguments of every training process, before `command_of` fills in the local rank."""
    nproc: int
    rendezvous: RendezvousConfig
    run_id: str
    """Becomes TORCHELASTIC_RUN_ID of training processes."""
    job_name: str
    role: str = TORCHRUN_ROLE
    """Becomes ROLE_NAME of training processes."""

    endpoint: Endpoint | None = None
    """Where the master is. None: this node is a job of its own, whose master listens on a free loopback port."""
    managed: bool = False
    """True if a platform started this node and its master (DLROVER_MASTER_ADDR is set)."""
    hosts: bool | None = None
    """True if this node runs the master. None: it does if the host of `endpoint` is this machine."""
    node_rank: Rank | None = None
    """The rank that this node asks for (`--node-rank` of a static rendezvous); None for any."""
    local_addr: str | None = None
    """The address by which other nodes reach this one; None to find it out."""

    timeouts: Timeouts = msgspec.field(default_factory=derive)
    signals: tuple[int, ...] = ()
    """Signals that the agent passes on to the training processes before it ends the run."""

    standbys: int = 0
    """How many warm interpreters wait to replace processes; 0: every process starts from scratch."""
    preload: tuple[str, ...] = ()
    """Modules that standbys import in addition to the modules of torch that the script imports."""

    log_dir: str | None = None
    """The directory of log files. None: a new temporary directory, if any stream goes to a file."""
    redirects: dict[int, Std] = {}
    """For every local rank, the streams that only go to files."""
    tee: dict[int, Std] = {}
    """For every local rank, the streams that go to files and to the console."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks that may write to the console; None: all."""
    log_prefix: str | None = None
    """Template of the prefix of teed lines: ${role_name}, ${rank}, ${local_rank}."""

    environment: dict[str, str] = {}
    """Variables for every training process on top of the agent's own."""
    virtual_local_rank: bool = False
    """True if each process sees only its own GPU, as device 0, and gets LOCAL_RANK=0."""
    security: Security = Security()
    state_dir: str | None = None
    """Where a master on this node keeps its files; None for the user's state directory."""
    notices: tuple[str, ...] = ()
    """A sentence for each flag that has no effect; printed once at the start."""

    def command_of(self, local_rank: int) -> tuple[str, ...]:
        return tuple(word.replace(LOCAL_RANK_MACRO, str(local_rank)) for word in self.command)

    def to_file(self, local_rank: int) -> Std:
        return self.redirects.get(local_rank, Std.NONE) | self.tee.get(local_rank, Std.NONE)

    def to_console(self, local_rank: int) -> Std:
        if self.local_ranks_filter is not None and local_rank not in self.local_ranks_filter:
            return Std.NONE
        only_file = self.redirects.get(local_rank, Std.NONE) & ~self.tee.get(local_rank, Std.NONE)
        return Std.ALL & ~only_file
