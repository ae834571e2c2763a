"""`LocalPlatform`: nodes as process groups on this machine, with the environment that a pod would give them.

Each node has a shim above it (`shim.py`), a directory (`files.py`), a log, a loopback address of its own and, if asked
for, a memory limit. A launch costs the master's loop 1 to 2 ms; the command runs some 20 ms later. Files, CPU and the
network, apart from the address, are not isolated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from resile.api.defaults import LOCAL_NODE_VARIABLE
from resile.api.ids import NodeKey, Rank, Seconds
from resile.api.job import JobSpec
from resile.api.kinds import registry
from resile.api.kinds.base import NodeSetting
from resile.platform.base import Launch, Observation
from resile.platform.local import files
from resile.platform.local.addresses import AddressBook, Addresses, AddressesUsedUpError
from resile.platform.local.cgroup import MemoryLimits, NoMemoryLimitsError
from resile.platform.local.node import LocalNode
from resile.platform.local.shim import NOT_EXECUTABLE, NOT_FOUND, STATUS_FD, remove_cgroup
from resile.protocol.reports import NodeStatus

HOST_ADDRESS = "127.0.0.1"

_BOOT = "import sys; sys.path.append(sys.argv.pop(1)); import shim; shim.main()"
"""Imports the shim, so that its compiled form is used. This folder is last in `sys.path`, to hide no library."""

_RESTORED = (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE)
"""Signals that get their default action in a node, even if the master was started with them ignored."""


class LocalPlatform:
    def __init__(
        self,
        spec: JobSpec,
        directory: Path,
        master_address: str,
        *,
        secrets: Mapping[str, str] | None = None,
        enforce_memory: bool = False,
        workdir: Path | None = None,
    ) -> None:
        """Prepare to launch nodes. The job directory is not read before `start`.

        Every node inherits the variables of this process. The variables `secrets` are added and replace others of the
        same name. Commands run in `workdir`, by default the current directory. If `enforce_memory` is set and memory
        limits cannot be enforced, `warnings` says why.
        """
        self._spec = spec
        self._directory = directory.absolute()
        self._master_address = master_address
        self._secrets = dict(secrets or {})
        self._workdir = (workdir or Path.cwd()).absolute()
        self._addresses = Addresses()
        self._kind = registry.kind_of_job(spec)
        self._by_address = [role for role in spec.roles if self._kind.is_found_by_address(spec, role)]
        ranks = [(role, Rank(rank)) for role in self._by_address for rank in range(spec.roles[role].replicas)]
        self._address_book = AddressBook(self._addresses, ranks)
        self._nodes: dict[NodeKey, LocalNode] = {}
        self._observe: Callable[[Observation], None] | None = None
        self._limits: MemoryLimits | None = None
        self.warnings: list[str] = []
        if enforce_memory:
            unique = f"{zlib.crc32(os.fsencode(self._directory)):08x}"
            try:
                self._limits = MemoryLimits(spec.uid or f"{spec.namespace}-{spec.name}-{unique}")
            except NoMemoryLimitsError as error:
                self.warnings.append(str(error))

    async def start(self, observe: Callable[[Observation], None]) -> None:
        """Find the nodes that an earlier master launched, and watch those that live. `adopt` returns the found nodes.

        Later changes of any node are passed to `observe`.
        """
        self._observe = observe
        for directory in files.node_directories(self._directory):
            record = files.read(directory / "node.json", files.NodeFile)
            if record is not None and record.key not in self._nodes:
                self._addresses.go_on_after(record.address)
                node = LocalNode(record, directory, self._tell)
                self._nodes[record.key] = node
                node.adopt()
                if record.role in self._by_address and not node.status.ended:
                    self._address_book.keep(record.role, Rank(record.rank), record.address)

    async def adopt(self) -> list[Observation]:
        return [node.observation for node in self._nodes.values()]

    def launch(self, launch: Launch) -> None:
        key = launch.node
        if key in self._nodes:
            return
        role = self._spec.roles.get(key.role)
        name = registry.node_name(self._spec, key.role, key.id)
        record = files.NodeFile(
            name=name,
            role=key.role,
            id=key.id,
            rank=launch.rank,
            address="",
            command=list(role.command) if role else [],
            workdir=str(self._workdir),
            log=str(self._directory / "logs" / f"{name}.log"),
            relaunch_count=launch.relaunch_count,
            launched_at=time.time(),
        )
        node = LocalNode(record, files.node_directory(self._directory, key), self._tell)
        self._nodes[key] = node
        if role is None:
            node.could_not_start(NOT_FOUND, f"the job has no role {key.role}")
            return
        if not record.command:
            node.could_not_start(NOT_FOUND, f"role {key.role} has no command: a local node needs one in its template")
            return
        try:
            node.record = self._with_resources(record, launch)
            node.launched(*self._spawn(node.record, launch))
        except AddressesUsedUpError as error:
            node.could_not_start(NOT_EXECUTABLE, str(error))
        except (OSError, ValueError) as error:  # ValueError: a NUL character in an argument or a variable
            node.could_not_start(NOT_EXECUTABLE, f"cannot start {name}: {_sentence(error)}")

    def delete(self, node: NodeKey, grace: Seconds) -> None:
        """End a node. Its shim sends SIGTERM, and SIGKILL after `grace`, even if this master dies in between."""
        known = self._nodes.get(node)
        if known is not None:
            known.stop(grace)
        else:
            unknown = Observation(node=node, status=NodeStatus.DELETED)
            asyncio.get_running_loop().call_soon(self._tell, unknown)

    async def close(self) -> None:
        self._observe = None
        for node in self._nodes.values():
            node.release()

    def _tell(self, observation: Observation) -> None:
        if self._observe is not None:
            self._observe(observation)

    def _with_resources(self, record: files.NodeFile, launch: Launch) -> files.NodeFile:
        in_use = {node.record.address for node in self._nodes.values() if not node.status.ended}
        if record.role in self._by_address:
            address = self._address_book.take(record.role, launch.rank, in_use)
        else:
            address = self._addresses.take(in_use)
        record = msgspec.structs.replace(record, address=address)
        limit = launch.resources.memory or self._spec.roles[record.role].limits.memory
        if self._limits is None or limit is None:
            return record
        try:
            cgroup = self._limits.create(str(record.key), limit)
        except OSError as error:
            self.warnings.append(f"the memory limit of {record.name} is not enforced: {_sentence(error)}")
            return record
        return msgspec.structs.replace(record, memory=limit, cgroup=str(cgroup))

    def _spawn(self, record: files.NodeFile, launch: Launch) -> tuple[int, int]:
        directory = files.node_directory(self._directory, record.key)
        with contextlib.ExitStack() as undo:
            if record.cgroup:
                undo.callback(remove_cgroup, record.cgroup)
            directory.mkdir(parents=True, exist_ok=True)
            files.write(directory / "node.json", record)
            Path(record.log).parent.mkdir(parents=True, exist_ok=True)
            log = os.open(record.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            with contextlib.ExitStack() as close:
                close.callback(os.close, log)
                reader, writer = os.pipe()
                close.callback(os.close, writer)
                undo.callback(os.close, reader)
                arguments = [str(Path(__file__).parent), str(directory), record.workdir, record.cgroup, *record.command]
                pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-I", "-S", "-c", _BOOT, *arguments],
                    self._environment_of(record, launch),
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, log, 1),
                        (os.POSIX_SPAWN_DUP2, log, 2),
                        (os.POSIX_SPAWN_DUP2, writer, STATUS_FD),
                    ],
                    setsid=True,
                    setsigmask=signal.valid_signals(),
                    setsigdef=_RESTORED,
                )
            undo.pop_all()
        return pid, reader

    def _environment_of(self, record: files.NodeFile, launch: Launch) -> dict[str, str]:
        ports = {role: declared.port for role, declared in self._spec.roles.items()}
        setting = NodeSetting(
            node=record.key,
            rank=launch.rank,
            replicas=launch.replicas,
            relaunch_count=launch.relaunch_count,
            address=record.address,
            host_address=HOST_ADDRESS,
            master_address=self._master_address,
            peers=self._address_book.by_role(ports),
        )
        environment = {
            **os.environ,
            **self._spec.roles[record.role].env,
            **self._kind.environment(self._spec, setting),
            **self._secrets,
            LOCAL_NODE_VARIABLE: str(files.node_directory(self._directory, record.key)),
        }
        # First in the path, so that `dlrover-run` and `resile` in a manifest's command are those of this installation.
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        return environment


def _sentence(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
