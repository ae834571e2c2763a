"""How long a member stays in a round that is over, whatever it waits for: real sockets, and peers that never answer."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resile.agent.workers.ports import free_port
from resile.torch._loop.collectives import Collectives
from resile.torch._loop.group import Group, GroupLost
from tests.local.resile_run import wait_until
from tests.torch.checkpoint.checkpoint_servers import spawning
from tests.torch.ranks import placed

SOON = 1.0
"""Seconds; it takes a twentieth of it. What it must not be is a time-out: 20 s here."""
FUTEX = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]
"""The number of the system call in which a thread waits for another."""
pytestmark = pytest.mark.timeout(120)


def total(each: Callable[[int], int], sockets: Iterable[tuple[int, Any]], store: int) -> int:
    """Of all connections between members; not of those to the store, which has a port of its own."""
    found = 0
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError):  # one that listens
            with socket.socket(fileno=os.dup(descriptor)) as line:
                ports = (line.getsockname()[1], line.getpeername()[1])
            if store not in ports:
                found += each(descriptor)
    return found


def unsent(descriptor: int) -> int:
    return struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]


def said(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as line:
        info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent; acknowledgements may come late


SETTING = """
from __future__ import annotations
import contextlib, fcntl, os, signal, socket, struct, sys, termios, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from resile.torch._loop.group import Group, GroupLost
from resile.protocol.worker_to_agent import WorkerAssignment
from resile.agent.workers.ports import free_port


def placed(round_, rank, world, port):
    return WorkerAssignment(round=round_, rank=rank, world_size=world, local_rank=rank, local_world_size=world,
                            group_rank=0, group_world_size=1, master_addr="127.0.0.1", master_port=port)


def wait_until(it_is, what):
    deadline = time.monotonic() + 20
    while not it_is():
        if time.monotonic() > deadline:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.005)


""" + "\n\n".join(map(inspect.getsource, (total, unsent, said)))

MEMBER = (
    SETTING
    + """
from torch._C._distributed_c10d import _register_work

rank, port = map(int, sys.argv[1:])
group = Group(placed(1, rank, 2, port), "gloo", 60.0)
group.form()
import torch.distributed._functional_collectives as functional  # as a script that shards its model in the round

default = set(group._own)
mesh = dist.new_group([0, 1], timeout=timedelta(seconds=60))
meshed = group._own - default
if rank == 1:
    before = total(said, default, port)
    receiving = dist.broadcast(torch.zeros(16 << 20), 0, async_op=True)
    wait_until(lambda: total(said, default, port) > before, "the message to be asked for")
    os.kill(os.getpid(), signal.SIGSTOP)
print("frozen" if rank else "formed", flush=True)
sys.stdin.readline()
sent = torch.zeros(16 << 20)
sending = dist.broadcast(sent, 0, async_op=True)  # more than any socket takes
_register_work(sent, sending)  # as DTensor's collectives do
wait_until(lambda: total(unsent, default, port) > 64 << 10, "a part of the message to be sent")
before = total(said, meshed, port)


def break_off():
    wait_until(lambda: total(said, meshed, port) > before, "the mesh to be in a collective")
    group.abort()


try:
    sending.wait(timedelta(seconds=0.2))
except GroupLost:
    print("the round was not over")
except RuntimeError:
    print("left in time", flush=True)
threading.Thread(target=break_off, daemon=True).start()
try:
    dist.all_reduce(torch.zeros(1), group=mesh)
except RuntimeError:
    print("left mesh", flush=True)
try:
    group.wait(sending)
except GroupLost:
    print("left send", flush=True)
waits = (sending.wait, lambda: sending.wait(timedelta(seconds=60)), lambda: sending.wait(timeout=timedelta(seconds=60)))
for wait in (*waits, lambda: functional.wait_tensor(sent)):  # the script's own, and DTensor's
    try:
        wait()
    except GroupLost:
        print("left by itself", flush=True)
group.destroy()
if torch.ops._c10d_functional.wait_tensor in torch.fx.node._side_effectful_functions:
    print("known", flush=True)  # to tracers, though their tables were made in the round
alone = Group(placed(2, 0, 1, free_port()), "gloo", 60.0)
alone.form()
print("alone", flush=True)
"""
)

SWAPPING = (
    SETTING
    + """
from torch.distributed.fsdp import fully_shard
from resile.torch._checkpoint.rank_layout import extent_of

child = os.fork()
for round_, port in enumerate(map(int, sys.argv[1:]), 1):
    rank = (round_ + bool(child)) % 2
    group = Group(placed(round_, rank, 2, port), "gloo", 60.0)
    group.form()
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 6)
    whole = model.weight.detach().clone()
    fully_shard(model)
    for shard in (model.weight, model.state_dict()["weight"], model.weight.clone()):
        piece = extent_of(shard)
        assert piece.origin[0] == 3 * rank, f"round {round_}: rank {rank} takes its shard for that at {piece.origin}"
        assert torch.equal(shard.to_local(), whole[piece.origin[0] :][: piece.shape[0]])
        assert torch.equal(shard.full_tensor(), whole)
    group.destroy(in_peace=True)
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""
)


def is_stuck(thread: threading.Thread) -> bool:
    """Whether a thread of this process waits for another one: in the same wait for a futex at two looks."""
    looks = []
    for _ in range(2):
        looks.append(Path(f"/proc/self/task/{thread.native_id}/syscall").read_text())
        time.sleep(0.01)
    return looks[0] == looks[1] and looks[0].split()[0] == FUTEX


@contextlib.contextmanager
def forming(group: Group, name: str = "forming") -> Iterator[Callable[[], float]]:
    """A thread of that name that is in `form`; what is given breaks it off and says how long that took."""
    errors: list[BaseException] = []

    def form() -> None:
        try:
            group.form()
        except GroupLost as error:
            errors.append(error)

    thread = threading.Thread(target=form, name=name, daemon=True)
    thread.start()

    def break_off() -> float:
        begun = time.monotonic()
        group.abort()
        assert time.monotonic() - begun < SOON  # whoever hears of the end has to go on hearing
        thread.join(20)
        assert errors
        return time.monotonic() - begun

    yield break_off
    group.destroy()


def test_a_member_leaves_whatever_it_sends_to_a_frozen_peer_and_whatever_other_group_it_is_in():
    port = str(free_port())
    words = [sys.executable, "-c", MEMBER]
    with contextlib.ExitStack() as stack:
        members = []
        for rank in ("0", "1"):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            member = stack.enter_context(subprocess.Popen([*words, rank, port], **pipes))
            stack.callback(member.kill)
            members.append(member)
        sender, frozen = members
        assert sender.stdout.readline() == "formed\n"
        assert os.waitid(os.P_PID, frozen.pid, os.WSTOPPED).si_status == signal.SIGSTOP
        begun = time.monotonic()
        out, _ = sender.communicate("go\n", timeout=20)
        left = ["left in time", "left mesh", "left send", *["left by itself"] * 4]
        assert out.split("\n")[:9] == [*left, "known", "alone"]
        assert time.monotonic() - begun < 15.0  # each wait alone would take 60 s
        assert sender.returncode == 0


def pass_on(rank: int, world: int, port: int, frozen: Any, took: Any) -> None:
    """Rank 0 gives all others what they have asked for, and do not take: they are frozen."""
    group = Group(placed(rank, world, port), "gloo", 60.0)
    group.form()
    data = torch.zeros(64 << 20, dtype=torch.uint8)  # more than any socket takes
    if rank:
        before = total(said, group._own, port)
        taking = dist.irecv(data, 0) if world == 2 else dist.broadcast(data, 0, async_op=True)
        wait_until(lambda: total(said, group._own, port) > before, "the message to be asked for")
        os.kill(os.getpid(), signal.SIGSTOP)
        taking.wait()
    frozen.wait()
    threading.Timer(0.5, group.abort).start()
    begun = time.monotonic()
    with contextlib.suppress(RuntimeError):
        Collectives(group).hand_over(data, len(data), 0, list(range(1, world)))
    took.put(time.monotonic() - begun)


@pytest.mark.parametrize("world", [2, 3])
def test_a_member_leaves_what_it_passes_on_to_one_frozen_peer_or_to_several(world: int):
    frozen, took, port = spawning.Event(), spawning.Queue(), free_port()
    words = [(rank, world, port, frozen, took) for rank in range(world)]
    members = [spawning.Process(target=pass_on, args=each, daemon=True) for each in words]
    for member in members:
        member.start()
    try:
        for member in members[1:]:
            wait_until(lambda stat=Path(f"/proc/{member.pid}/stat"): ") T " in stat.read_text(), "it is frozen")
        frozen.set()
        assert 0.4 < took.get(timeout=20) < 0.5 + SOON
    finally:
        for member in members:
            member.kill()
            member.join()


def test_a_member_does_not_wait_for_another_one_to_connect():
    port = free_port()
    with forming(Group(placed(0, 2, port), "gloo", 20.0), "connects") as break_off:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        store.set("here1", "1")
        address = "round1/0//cpu//0/"
        mine = bytearray(store.get(f"{address}0"))
        (name,) = struct.unpack_from("=q", mine)
        mine[8 + name + 8 + 2 : 8 + name + 8 + 4] = b"\xff\xff"  # of two, the one with the larger port connects
        store.set(f"{address}1", bytes(mine))
        (member,) = (thread for thread in threading.enumerate() if thread.name == "connects")
        wait_until(lambda: is_stuck(member), "the member to wait for the connection")
        assert break_off() < SOON


@pytest.mark.parametrize("mute", [True, False])
def test_a_member_does_not_wait_for_a_store_that_is_gone(mute: bool):
    server = socket.create_server(("127.0.0.1", 0))
    group = Group(placed(1, 2, server.getsockname()[1]), "gloo", 20.0)
    with server, contextlib.ExitStack() as stack, forming(group) as break_off:
        server.accept()[0].close()  # a look whether somebody is there
        if mute:
            stack.enter_context(server.accept()[0])
        else:
            server.close()
        assert break_off() < SOON


def test_a_group_of_a_round_that_is_over_is_not_formed():
    group = Group(placed(1, 2, free_port()), "gloo", 20.0)
    begun = time.monotonic()
    group.abort()
    with pytest.raises(GroupLost):
        group.form()
    assert time.monotonic() - begun < SOON


def test_a_pause_ends_with_the_round() -> None:
    group = Group(placed(1, 2, free_port()), "gloo", 20.0)
    group.pause(0.001)
    threading.Timer(0.1, group.abort).start()
    begun = time.monotonic()
    with pytest.raises(GroupLost):
        group.pause(20.0)
    assert time.monotonic() - begun < SOON


def test_a_group_that_was_left_in_peace_is_not_broken_off_later() -> None:
    group = Group(placed(0, 1, free_port()), "gloo", 20.0)
    group.form()
    group.abort_in(1.0)
    group.destroy(in_peace=True)
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join()
    assert not group.over


def test_a_process_with_another_rank_knows_which_shards_it_has() -> None:
    words = [sys.executable, "-c", SWAPPING, str(free_port()), str(free_port())]
    done = subprocess.run(words, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()


LEAVES = (
    SETTING
    + """
def before(*_): ...
def after(*_): ...

sys.excepthook = before
for expected in (before, after):
    group = Group(placed(1, 0, 1, free_port()), "gloo", 20.0)
    group.form()
    assert sys.excepthook is not before, "torch's"
    if expected is after:
        sys.excepthook = after
    group.destroy()
    assert sys.excepthook is expected, sys.excepthook
os._exit(0)
"""
)


def test_leaving_a_group_takes_back_torchs_excepthook_and_no_later_one() -> None:
    subprocess.run([sys.executable, "-c", LEAVES], check=True, timeout=100)
