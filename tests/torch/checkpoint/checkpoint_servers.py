"""An agent's vault in a thread of the test, and training processes that save into it and are killed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resile.agent.checkpoints.checkpoint_server import CheckpointServer
from resile.agent.workers.ports import free_port
from resile.checkpoint.memory_client import SOCKET
from resile.torch.checkpointer import Checkpointer
from resile.wire.env import AGENT_SOCKET, WORKER

PATIENCE = 60.0

spawning = multiprocessing.get_context("forkserver")
spawning.set_forkserver_preload(["tests.torch.checkpoint.checkpoint_servers", "torch.distributed.checkpoint"])


class VaultThread:
    """A vault that training processes reach as they reach an agent's."""

    def __init__(self, directory: Path, **words: Any) -> None:
        self.directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.vault = CheckpointServer(directory / SOCKET, **words)
        self.do(self.vault.start)

    @property
    def environment(self) -> dict[str, str]:
        return {AGENT_SOCKET: str(self.directory / "agent.sock"), WORKER: "test.0.0"}

    def do(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE)

    def flush(self) -> None:
        """What the agent does when processes have ended; returns when storage has it."""
        self.do(self.vault.flush)
        asyncio.run_coroutine_threadsafe(self.vault.flushed(PATIENCE), self._loop).result(PATIENCE)

    def close(self) -> None:
        self.do(self.vault.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


@contextlib.contextmanager
def vault_thread(**words: Any) -> Iterator[VaultThread]:
    with tempfile.TemporaryDirectory(prefix="vault-") as directory:
        thread = VaultThread(Path(directory), **words)
        before = {name: os.environ.get(name) for name in thread.environment}
        os.environ.update(thread.environment)
        try:
            yield thread
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            thread.close()


def uniform(step: int, size: int) -> dict[str, Any]:
    """A state that shows by itself whether it is whole: every number in it is the step."""
    tensors = {f"t{number}": torch.full((size,), float(step)) for number in range(8)}
    return {"tensors": tensors, "step": step}


def is_uniform(state: dict[str, Any], step: int) -> bool:
    return state["step"] == step and all(bool((tensor == step).all()) for tensor in state["tensors"].values())


def save_for_ever(directory: str | None, environment: dict[str, str], size: int, first: int, said: Any) -> None:
    """Saves one step after the other, as fast as it can, and says which it has saved."""
    for name in (AGENT_SOCKET, WORKER):
        os.environ.pop(name, None)
    os.environ.update(environment)
    checkpointer = Checkpointer(directory, store_every=0 if environment else 1, keep_last=3)
    for step in range(first, first + 1_000_000):
        if checkpointer.save(step, uniform(step, size)):
            if not environment:
                checkpointer.wait(PATIENCE)
            said.send(step)


def in_ranks(work: Callable[..., Any], world: int, *words: Any, vault: Any = None) -> list[Any]:
    """What `work(rank, *words)` returns on each rank of a real group; of one that raises, the exception in words.

    With one vault they are on one node, with a list of vaults on a node each.
    """
    said, port = spawning.Queue(), free_port()
    processes = []
    for rank in range(world):
        environment: dict[str, str] = {}
        if vault is not None:
            environment = vault[rank].environment if isinstance(vault, list) else vault.environment
            environment[WORKER] = f"test.{rank}.0" if isinstance(vault, list) else f"test.0.{rank}"
        given = (work, rank, world, port, environment, words, said)
        processes.append(spawning.Process(target=_rank, args=given, daemon=True))
    for process in processes:
        process.start()
    try:
        heard = dict(said.get(timeout=PATIENCE) for _ in processes)
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
    return [heard[rank] for rank in range(world)]


def _rank(
    work: Callable[..., Any], rank: int, world: int, port: int, environment: dict[str, str], words: Any, said: Any
) -> None:
    for name in (AGENT_SOCKET, WORKER):
        os.environ.pop(name, None)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    try:
        answer = work(rank, *words)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    said.put((rank, answer))
    said.close()
    said.join_thread()
    with contextlib.suppress(RuntimeError):
        dist.barrier()  # nobody hangs up while another one still talks
    dist.destroy_process_group()
