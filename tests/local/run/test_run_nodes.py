"""Several agents on one machine that know nothing but `--nnodes` and `--rdzv-endpoint`."""

from __future__ import annotations

import re
import signal
import time

from tests.local.resile_run import UNTIL_RELEASED, Runs, alive, kill, wait_until

RESULT = re.compile(
    r"Rendezvous complete for workers\. Result:\n"
    r"  restart_count=(?P<restart_count>\d+)\n"
    r"  master_addr=(?P<master_addr>\S+)\n"
    r"  master_port=(?P<master_port>\d+)\n"
    r"  group_rank=(?P<group_rank>\d+)\n"
    r"  group_world_size=(?P<group_world_size>\d+)\n"
    r"  local_ranks=(?P<local_ranks>\[.*\])\n"
    r"  role_ranks=(?P<role_ranks>\[.*\])\n"
    r"  global_ranks=(?P<global_ranks>\[.*\])\n"
    r"  role_world_sizes=(?P<role_world_sizes>\[.*\])\n"
    r"  global_world_sizes=(?P<global_world_sizes>\[.*\])\n"
)


def test_nodes_meet_restart_shrink_grow_and_take_back_a_frozen_one(runs: Runs) -> None:
    script = runs.script(UNTIL_RELEASED)
    nodes = [runs.node("--max-restarts=3", script) for _ in range(3)]

    met = runs.await_world(3)
    assert sorted(start["group"] for start in met.values()) == [0, 1, 2]
    results = [RESULT.search(node.err) for node in nodes]
    found = [result.groupdict() for result in results if result is not None]
    assert sorted(result["global_ranks"] for result in found) == ["[0]", "[1]", "[2]"]
    assert {result["master_port"] for result in found} == {found[0]["master_port"]}
    assert {(result["group_world_size"], result["global_world_sizes"]) for result in found} == {("3", "[3]")}
    assert {result["restart_count"] for result in found} == {"0"}
    agent_of = {rank: start["agent"] for rank, start in met.items()}

    # one training process is killed: everybody restarts in place, with the same ranks
    kill(met[1]["pid"])
    again = runs.await_world(3, after=met[0]["round"])
    assert {rank: start["agent"] for rank, start in again.items()} == agent_of
    assert all(node.running for node in nodes)

    # one agent is killed: its training process dies with it, the others go on without
    victim = next(node for node in nodes if node.pid == agent_of[1])
    kill(victim.pid)
    killed_at = time.monotonic()
    two = runs.await_world(2, after=again[0]["round"])
    shrunk_after = time.monotonic() - killed_at
    assert not alive(again[1]["pid"])
    assert {start["agent"] for start in two.values()} == {agent_of[0], agent_of[2]}
    assert [two[0]["agent"], two[1]["agent"]] == [agent_of[0], agent_of[2]], "the survivors keep their order"
    assert shrunk_after < 2.0, "a closed connection is noticed at once, not by silence"

    # another one comes
    newcomer = runs.node("--max-restarts=3", script)
    three = runs.await_world(3, after=two[0]["round"])
    assert three[1]["agent"] == newcomer.pid, "it fills the place that was free"

    # one freezes, with its training process: it is missed within the silence, and taken in again when it thaws
    frozen = three[2]
    for pid in (frozen["agent"], frozen["pid"]):
        kill(pid, signal.SIGSTOP)
    frozen_at = time.time()
    without = runs.await_world(2, after=three[0]["round"])
    assert frozen["agent"] not in {start["agent"] for start in without.values()}
    (lost,) = [line for line in runs.story("NodeFailed") if "silent" in line.message]
    assert 1.0 < lost.at - frozen_at < 2.6, "declared lost after about 2 s of silence"
    for pid in (frozen["agent"], frozen["pid"]):
        kill(pid, signal.SIGCONT)
    back = runs.await_world(3, after=without[0]["round"])
    assert frozen["agent"] in {start["agent"] for start in back.values()}
    wait_until(lambda: not alive(frozen["pid"]), "the end of the process of the old round")
    came = [line.node for line in runs.story("NodeCame")]
    assert came == [f"worker-{number}" for number in range(5)], "ids only grow"

    runs.release()
    living = [node for node in (*nodes, newcomer) if node is not victim]
    assert [node.wait() for node in living] == [0, 0, 0]
    runs.nothing_is_left()


def test_a_node_that_leaves_by_a_signal_frees_its_peers_at_once(runs: Runs) -> None:
    script = runs.script(UNTIL_RELEASED)
    nodes = [runs.node("--nproc-per-node=2", script) for _ in range(3)]
    met = runs.await_world(6)
    assert [met[rank]["agent"] for rank in range(0, 6, 2)] == [met[rank]["agent"] for rank in range(1, 6, 2)]
    leaver = next(node for node in nodes if node.pid == met[0]["agent"])
    asked_at = time.time()
    leaver.signal(signal.SIGTERM)
    four = runs.await_world(4, after=met[0]["round"])
    assert max(start["at"] for start in four.values()) - asked_at < 10.0, "not after the 30 s of its exit grace"
    assert leaver.wait() == 128 + signal.SIGTERM
    runs.release()
    assert [node.wait() for node in nodes if node is not leaver] == [0, 0]


def test_the_failure_of_one_node_is_reported_by_all(runs: Runs) -> None:
    script = runs.script(
        'from probe import *\nnote("start", round=1)\n'
        'if RANK == 1:\n    wait_for("fail")\n    raise KeyError("lost key")\ntime.sleep(60)\n'
    )
    nodes = [runs.node(script, nnodes="2") for _ in range(2)]
    runs.await_world(2)
    runs.release("fail")
    for node in nodes:
        assert node.wait() == 1
        assert "━━ rank 1 failed first" in node.err
        assert "KeyError: 'lost key'" in node.err


def test_fixed_places_are_kept_whoever_comes_first(runs: Runs) -> None:
    """Node 1 is there before node 0, which brings the master and the token."""
    script = runs.script(UNTIL_RELEASED)
    words = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={runs.port}", script)
    second = runs.start("--node-rank=1", *words)
    wait_until(lambda: list(runs.temp.glob("resile-*/agent.sock")), "node 1 to wait for its master")
    first = runs.start("--node-rank=0", *words)
    met = runs.await_world(2)
    assert [met[0]["agent"], met[1]["agent"]] == [first.pid, second.pid]
    runs.release()
    assert [first.wait(), second.wait()] == [0, 0]


def test_a_newcomer_never_clears_the_job_of_others_whose_master_is_just_down(runs: Runs) -> None:
    script = runs.script(UNTIL_RELEASED)
    nodes = [runs.node("--rdzv-conf=last_call_timeout=0.1", script) for _ in range(2)]
    met = runs.await_world(2)
    supervisor, master = runs.supervisor(), runs.master()
    kill(supervisor, signal.SIGSTOP)
    kill(master)
    nodes.append(runs.node(script))
    wait_until(lambda: len(list(runs.temp.glob("resile-*/agent.sock"))) == 3, "the newcomer to wait for the master")
    kill(supervisor, signal.SIGCONT)
    three = runs.await_world(3, after=met[0]["round"])
    assert [three[rank]["agent"] for rank in (0, 1)] == [met[rank]["agent"] for rank in (0, 1)]
    assert [line.reason for line in runs.story()].count("JobStarted") == 1
    runs.release()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    runs.nothing_is_left()
