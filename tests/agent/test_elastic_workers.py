"""What an agent says and does for elastic processes, without processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from resile.agent.workers.base import Standing
from resile.agent.workers.elastic_workers import ElasticWorkers
from resile.agent.workers.launcher import RestartCount
from resile.agent.workers.restarting_workers import RestartingWorkers
from resile.api.ids import Rank, Round, Seconds
from resile.protocol.agent_to_master import (
    CanRegroup,
    Join,
    LastStepTaken,
    NodeFinished,
    WorkerFailed,
    WorkersChanged,
    WorkerStuck,
)
from resile.protocol.master_to_agent import RoundComplete, RoundOver
from resile.protocol.message import Message
from resile.protocol.reports import RoundAssignment, WorkerFailure
from resile.protocol.worker_to_agent import WorkerAssignment, WorkerReady


class Line:
    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.heard.append(message)

    def close(self, because: str = "") -> None:
        self.closed = True


class Processes:
    """An attempt whose processes exist in name only."""

    is_stopped = False

    def __init__(self, nproc: int, round_: int) -> None:
        self.round = Round(round_)
        self.assignment = assignment(nproc)
        self.names = {n: f"w{n}" for n in range(nproc)}
        self.failures: list[WorkerFailure] = []
        self.alive = set(self.names)
        self.killed: list[int] = []
        self.dismissed: set[int] = set()
        self.kill = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return bool(self.alive)

    is_sound = is_running

    @property
    def has_finished(self) -> bool:
        return not self.alive and not self.failures

    def runs(self, local_rank: int) -> bool:
        return local_rank in self.alive

    def enter(self, round_: Round, assignment: RoundAssignment, local_ranks: list[int]) -> None:
        self.round, self.assignment = round_, assignment

    def kill_one(self, local_rank: int) -> None:
        self.killed.append(local_rank)
        self.kill.set()

    def dismiss(self, local_rank: int) -> None:
        self.dismissed.add(local_rank)
        self.kill_one(local_rank)


class Launcher:
    """A launcher that starts nothing."""

    has_next = False

    def __init__(self, attempt: Processes, max_restarts: int) -> None:
        self.attempt = attempt
        self.restarts = RestartCount(max_restarts, Seconds(1000.0))
        self.replaced: list[int] = []
        self.started = asyncio.Event()
        self.moves: list[tuple[Round, RoundAssignment]] = []
        self.ahead = 0
        self.restarted = 0

    def replace(self, local_rank: int) -> None:
        self.replaced.append(local_rank)
        self.started.set()
        self.attempt.alive.add(local_rank)
        self.attempt.failures = [failure for failure in self.attempt.failures if failure.local_rank != local_rank]

    def entered_round(self) -> None:
        pass

    def move_to(self, round_: Round, assignment: RoundAssignment) -> None:
        self.moves.append((round_, assignment))

    def restart(self) -> None:
        self.restarted += 1

    def idle(self) -> None:
        pass

    def start_ahead(self) -> Processes:
        self.ahead += 1
        self.attempt = Processes(len(self.attempt.names), 0)
        return self.attempt


@pytest_asyncio.fixture(autouse=True)
async def no_error_in_callbacks() -> AsyncIterator[None]:
    """Fail the test if a deadline or another callback raised an error, which asyncio alone only logs."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    yield
    assert errors == []


class Node:
    """One node's workers with `nproc` processes that exist in name only."""

    def __init__(
        self,
        nproc: int,
        *,
        ahead: bool = False,
        round_: int = 1,
        leave_within: float = 1000.0,
        max_restarts: int = 100,
    ) -> None:
        self.said: list[Message] = []
        self._asked = asyncio.Event()
        self.lines: dict[int, Line] = {}
        self.attempt = Processes(nproc, 0 if ahead else round_)
        self.launcher = Launcher(self.attempt, max_restarts)
        before = RestartingWorkers(self._say, self.launcher)  # type: ignore[arg-type]
        before.newest = self.attempt.round
        self.rescued = 0
        self.workers = ElasticWorkers(
            before,
            send=self._say,
            launcher=self.launcher,  # type: ignore[arg-type]
            rescue=lambda: setattr(self, "rescued", self.rescued + 1),
            leave_within=leave_within,
            ready_within=1000.0,
        )

    @property
    def replaced(self) -> list[int]:
        return self.launcher.replaced

    @property
    def killed(self) -> list[int]:
        return self.attempt.killed

    @property
    def is_in_round(self) -> bool:
        return self.workers.is_training

    def ready(self, *numbers: int, step: int = 0, holds: int = 0) -> None:
        for number in numbers:
            line = self.lines.setdefault(number, Line())
            self.workers.on_ready(line, WorkerReady(worker=f"w{number}", step=step, holds=Round(holds)))

    async def asks(self) -> WorkerStuck:
        """Wait until it asks whether another node has the state."""
        await asyncio.wait_for(self._asked.wait(), 10)
        stuck = self.last(WorkerStuck)
        assert isinstance(stuck, WorkerStuck)
        return stuck

    async def kills(self) -> list[int]:
        """Wait for a process to be killed."""
        await asyncio.wait_for(self.attempt.kill.wait(), 10)
        return self.killed

    def _say(self, message: Message) -> None:
        self.said.append(message)
        if isinstance(message, WorkerStuck):
            self._asked.set()

    def dies(self, number: int, *, permanent: bool = False) -> None:
        self.lines.pop(number, None)
        failure = WorkerFailure(global_rank=0, local_rank=number, pid=5, at=1.0, signal=9, permanent=permanent)
        self.attempt.alive.discard(number)
        self.attempt.failures.append(failure)
        self.workers.on_end(number, [failure])

    def ends(self, number: int) -> None:
        self.attempt.alive.discard(number)
        self.workers.on_end(number, [])

    def forms(self, number: int, nproc: int) -> None:
        self.workers.on_round_formed(Round(number), assignment(nproc))

    def over(self, number: int, *, lost: bool = False) -> None:
        self.workers.on_round_over(RoundOver(round=Round(number), because="a node was lost", lost=lost))

    def last(self, kind: type[Message]) -> Any:
        return next((message for message in reversed(self.said) if isinstance(message, kind)), None)

    def placed(self, number: int) -> WorkerAssignment | None:
        found = [message for message in self.lines[number].heard if isinstance(message, WorkerAssignment)]
        return found[-1] if found else None


def assignment(nproc: int) -> RoundAssignment:
    return RoundAssignment(
        group_rank=Rank(1),
        group_world_size=2,
        first_rank=4,
        world_size=4 + nproc,
        master_addr="h",
        master_port=9,
        nproc=nproc,
    )


@pytest.fixture(autouse=True)
async def _loop():
    """Timers need one that runs."""


async def test_a_process_started_for_a_round_gets_its_place_the_moment_it_is_ready():
    node = Node(2)
    node.ready(1)
    assert node.placed(1).rank == 5
    assert node.last(Join) is None


async def test_how_long_the_master_may_take_to_end_a_round_follows_the_recovery_budget():
    node = Node(1, leave_within=60.0)
    node.ready(0)
    assert node.placed(0).verdict_within == 18.0


async def test_all_processes_that_left_the_round_join_again_together():
    node = Node(2)
    node.ready(0, 1)
    node.over(1)
    assert [type(line.heard[-1]) for line in node.lines.values()] == [RoundOver, RoundOver]
    node.ready(0)
    assert node.last(Join) is None
    node.ready(1)
    assert (node.last(Join).after, node.last(Join).nproc, node.last(Join).elastic) == (1, 2, True)
    node.forms(2, 2)
    assert node.placed(1).round == 2
    assert node.is_in_round


async def test_a_process_that_dies_is_replaced_and_its_siblings_do_not_wait_for_that():
    node = Node(3)
    node.ready(0, 1, 2)
    node.dies(1)
    failed = node.last(WorkerFailed)
    assert (failed.member, failed.left, failed.placed) == (True, 2, 1)
    assert node.replaced == [1]
    node.ready(0, 2)
    assert node.last(Join).nproc == 2
    node.forms(2, 2)
    assert [node.placed(n).rank for n in (0, 2)] == [4, 5]
    node.ready(1)
    assert node.last(WorkersChanged) == WorkersChanged(round=Round(2), nproc=3)


async def test_a_replacement_that_fails_while_it_waits_for_a_round_is_told_of_again():
    node = Node(2)
    node.ready(0, 1)
    node.dies(1)
    node.ready(0)
    node.forms(2, 1)
    node.ready(1)
    assert node.last(WorkersChanged) == WorkersChanged(round=Round(2), nproc=2)
    node.said.clear()
    node.dies(1)
    assert (node.last(WorkerFailed).member, node.last(WorkerFailed).left) == (False, 1)
    assert node.last(WorkersChanged) is None
    node.ready(1)
    assert node.last(WorkersChanged) == WorkersChanged(round=Round(2), nproc=2)


async def test_a_process_that_loses_touch_takes_its_siblings_out_of_the_round():
    node = Node(2)
    node.ready(0, 1)
    node.ready(0)
    assert isinstance(node.lines[1].heard[-1], RoundOver)
    node.ready(1)
    assert node.last(Join).nproc == 2


async def test_a_node_started_ahead_joins_when_all_its_processes_are_ready():
    node = Node(2, ahead=True)
    node.ready(0)
    assert node.last(Join) is None
    node.ready(1)
    assert node.last(Join) == node.last(Join)
    assert node.last(Join).nproc == 2


async def test_a_round_formed_for_more_processes_than_there_are_is_given_back():
    node = Node(2)
    node.ready(0, 1)
    node.over(1)
    node.ready(0, 1)
    node.dies(1)
    assert node.last(WorkerFailed).member  # it was promised to the next round
    assert not node.last(WorkerFailed).placed
    assert node.last(Join).nproc == 1
    node.forms(2, 2)
    assert not node.is_in_round
    assert (node.last(Join).after, node.last(Join).nproc) == (2, 1)


async def test_peers_are_not_kept_waiting_for_a_node_without_a_process():
    node = Node(1)
    node.ready(0)
    node.over(1)
    node.ready(0)
    node.dies(0)
    node.forms(2, 1)
    assert node.last(WorkersChanged) == WorkersChanged(round=Round(2), nproc=0)


async def test_a_replacement_that_is_not_needed_any_more_is_let_go_when_the_others_have_finished():
    node = Node(2)
    node.ready(0, 1)
    node.dies(1)
    node.ready(0)
    node.forms(2, 1)
    node.ends(0)
    assert node.killed == [1]
    node.ends(1)
    assert node.last(NodeFinished).round == 2


async def all_but_one_take_the_last_step(leave_within: float = 1000.0) -> Node:
    """Of two processes the second is lost, and the first takes the last step in a round without it."""
    node = Node(2, leave_within=leave_within)
    node.ready(0, 1)
    node.dies(1)
    node.ready(0, step=15)
    node.forms(2, 1)
    return node


async def test_a_replacement_that_is_ready_after_the_last_step_does_not_train_all_over_again():
    node = await all_but_one_take_the_last_step()
    node.workers.on_close(node.lines[0])
    node.ready(1)
    assert node.last(WorkersChanged) is None, "a round of its own would begin at step 0"
    node.ends(0)
    assert node.killed == [1]
    node.ends(1)
    assert node.last(NodeFinished).round == 2


async def test_that_the_last_step_is_taken_is_passed_on_once_and_told_to_a_new_master():
    node = await all_but_one_take_the_last_step()
    stranger = Line()
    node.workers.on_last_step(stranger, LastStepTaken(round=Round(2)))
    node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(1)))
    assert node.last(LastStepTaken) is None
    for _ in range(2):
        node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(2)))
    assert node.said.count(LastStepTaken(round=Round(2))) == 1
    node.workers.on_welcome()
    node.said.pop()
    node.workers.on_close(node.lines[0])
    assert node.said.count(LastStepTaken(round=Round(2))) == 1
    node.workers.on_welcome()
    assert node.said.count(LastStepTaken(round=Round(2))) == 2
    node.lines.clear()
    node.ready(0, step=16)  # another loop of the script
    node.workers.on_welcome()
    assert node.said.count(LastStepTaken(round=Round(2))) == 2


async def test_nor_does_one_for_which_the_round_was_ended_in_that_moment():
    node = await all_but_one_take_the_last_step()
    node.ready(1)
    assert node.last(WorkersChanged) == WorkersChanged(round=Round(2), nproc=2)
    node.workers.on_close(node.lines[0])
    node.over(2)
    joined = node.last(Join)
    node.ends(0)
    assert node.killed == [1]
    node.ends(1)
    assert (node.last(Join), node.last(NodeFinished).round) == (joined, 2)


async def test_nor_does_one_however_long_the_others_evaluate_after_their_round_was_ended():
    node = await all_but_one_take_the_last_step(leave_within=0.01)
    node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(2)))
    node.workers.on_close(node.lines[0])
    node.over(2)  # another node was lost
    said = node.last(Join)
    node.ready(1)
    await asyncio.sleep(0.1)
    assert node.last(Join) is said
    node.ends(0)
    assert node.killed == [1]


async def test_a_process_is_told_that_its_round_is_complete_when_the_master_says_so_and_those_after_it_at_once():
    node = Node(2)
    node.ready(0, 1)
    node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(1)))
    node.workers.on_round_complete(Round(0))
    assert RoundComplete(round=Round(1)) not in node.lines[0].heard
    node.workers.on_round_complete(Round(1))
    assert node.lines[0].heard[-1] == RoundComplete(round=Round(1))
    assert node.lines[1].heard.count(RoundComplete(round=Round(1))) == 1, "it may be kept from asking by a lost peer"
    said = len(node.said)
    node.workers.on_last_step(node.lines[1], LastStepTaken(round=Round(1)))
    assert node.lines[1].heard.count(RoundComplete(round=Round(1))) == 2
    assert node.lines[0].heard.count(RoundComplete(round=Round(1))) == 1
    assert len(node.said) == said, "the master is asked once"


async def test_a_process_that_asked_and_ends_well_has_finished_although_its_round_was_ended():
    node = Node(1)
    node.ready(0)
    node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(1)))
    node.over(1)
    node.ends(0)
    assert node.last(NodeFinished).round == 1


async def test_a_process_that_asks_is_told_that_its_round_is_over_if_the_master_ended_it_before():
    node = Node(2)
    node.ready(0, 1)
    node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(1)))
    node.over(1)
    node.workers.on_last_step(node.lines[1], LastStepTaken(round=Round(1)))
    assert [type(line.heard[-1]) for line in node.lines.values()] == [RoundOver, RoundOver]
    node.ready(0, 1, step=9)
    assert node.last(Join).nproc == 2, "both meet once more"


async def test_a_process_that_stores_its_last_step_is_not_killed_when_its_round_is_ended():
    node = Node(2, leave_within=0.01)
    node.ready(0, 1)
    node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(1)))
    node.workers.on_round_complete(Round(1))
    node.over(1)
    assert await node.kills() == [1], "which has not said so"
    await asyncio.sleep(0.1)
    assert node.killed == [1]
    node.workers.on_close(node.lines.pop(0))
    node.ends(0)
    node.ends(1)
    assert node.last(NodeFinished).round == 1


async def test_a_master_that_comes_back_hears_of_the_last_step_from_whoever_has_told_it():
    node = Node(2)
    node.ready(0, 1)
    node.workers.on_last_step(node.lines[0], LastStepTaken(round=Round(1)))
    node.said.clear()
    node.workers.on_welcome()
    assert node.last(LastStepTaken) == LastStepTaken(round=Round(1))


async def test_a_process_that_ends_well_before_any_round_takes_nobody_with_it():
    node = Node(2, ahead=True)
    node.ready(0)
    node.ends(1)
    assert (node.killed, node.last(NodeFinished), node.last(Join).nproc) == ([], None, 1)


async def test_a_replacement_meets_those_that_took_the_last_step_in_another_loop_of_the_script():
    node = await all_but_one_take_the_last_step()
    node.workers.on_close(node.lines.pop(0))
    node.ready(1)
    node.ready(0, step=16)
    assert (node.last(Join).after, node.last(Join).nproc) == (2, 2)


async def test_a_script_that_failed_after_its_last_step_is_tried_again_though_a_sibling_ended_well():
    node = Node(2)
    node.ready(0, 1)
    for number in (0, 1):
        node.workers.on_close(node.lines[number])
    node.dies(1)
    node.ready(1)
    node.ends(0)
    assert (node.killed, node.last(Join).nproc) == ([], 1)


async def test_what_a_master_may_not_have_heard_is_said_again():
    node = Node(2)
    node.ready(0, 1)
    node.dies(1)
    node.ready(0)
    said = list(node.said)
    node.said.clear()
    node.workers.on_welcome()
    assert [type(message) for message in node.said] == [CanRegroup, WorkerFailed, Join]
    assert node.said[1:] == [message for message in said if isinstance(message, WorkerFailed | Join)][-2:]


async def test_a_stranger_is_turned_away():
    node = Node(1)
    line = Line()
    node.workers.on_ready(line, WorkerReady(worker="nobody", step=0))
    assert line.closed


async def test_a_process_that_hangs_up_while_it_waits_is_replaced():
    node = Node(1, ahead=True)
    node.ready(0)
    node.workers.on_close(node.lines[0])
    assert node.killed == [0]


async def test_a_process_that_hangs_up_in_its_round_has_finished_and_is_left_alone():
    node = Node(1)
    node.ready(0)
    node.workers.on_close(node.lines[0])
    node.over(1)
    assert node.killed == []


async def test_replacements_that_keep_failing_are_not_started_in_a_tight_loop():
    node = Node(1)
    node.ready(0)
    node.dies(0)
    node.dies(0)
    assert node.replaced == [0, 0]
    node.dies(0)
    assert node.replaced == [0, 0]


async def test_a_process_that_is_ready_joins_when_the_last_of_its_round_has_ended_well():
    node = Node(2)
    node.ready(0, 1)
    node.ready(1)  # a peer was lost in the last moment; the other one has taken its last step and is on its way out
    assert node.last(Join) is None
    node.ends(0)
    assert (node.last(Join).after, node.last(Join).nproc) == (1, 1)


async def test_a_process_that_is_ready_does_not_wait_long_for_one_that_does_something_else_after_its_last_step():
    node = Node(2, leave_within=0.02)
    node.ready(0, 1)
    node.workers.on_close(node.lines[0])
    node.ready(1)
    assert node.last(Join) is None, "it may end, or call again, in a moment"
    await asyncio.sleep(0.1)
    assert (node.last(Join).after, node.last(Join).nproc) == (1, 1)
    node.forms(2, 1)
    assert node.placed(1).round == 2
    node.workers.on_close(node.lines[1])
    node.ends(1)
    assert (node.killed, node.last(NodeFinished)) == ([], None)
    node.ends(0)
    assert node.last(NodeFinished).round == 2


async def test_a_process_in_a_long_step_is_not_killed_before_another_one_has_the_state():
    node = Node(3, leave_within=0.2)
    node.ready(0, 1, 2)
    node.over(1)
    node.ready(2)  # it was started for this round, and never had the state
    await asyncio.sleep(0.5)
    assert node.killed == []
    node.ready(0, step=7)
    assert await node.kills() == [1]


async def test_a_process_that_never_leaves_its_round_is_killed_even_if_it_is_the_last_one(caplog):
    node = Node(1, leave_within=0.01)
    node.ready(0)
    node.over(1)
    await node.kills()
    assert "waiting 0.12 s more for the end of its step" in caplog.text


async def test_a_process_that_hangs_is_killed_after_the_usual_time_if_another_node_has_the_state(caplog):
    node = Node(1, leave_within=0.05)
    node.ready(0)
    node.over(1)
    node.workers.on_state_held(Round(1))  # nobody asked: it is in the middle of a step, and has the usual time
    assert node.killed == []
    assert (await node.asks()).round == 1
    assert node.killed == []
    node.workers.on_state_held(Round(0))
    assert node.killed == []
    node.workers.on_state_held(Round(1))
    assert node.killed == [0]
    assert "another node has the state of the training: killing it" in caplog.text


async def test_a_process_that_leaves_its_round_late_is_not_killed_by_an_answer_that_comes_later():
    node = Node(1, leave_within=0.01)
    node.ready(0)
    node.over(1)
    await node.asks()
    node.ready(0, step=7, holds=1)
    node.workers.on_state_held(Round(1))
    assert node.killed == []
    assert node.last(Join).nproc == 1


async def test_a_new_master_is_asked_again_as_long_as_the_process_hangs():
    node = Node(1, leave_within=0.01)
    node.ready(0)
    node.over(1)
    await node.asks()
    node.said.clear()
    node.workers.on_welcome()
    assert node.last(WorkerStuck) == WorkerStuck(round=Round(1))
    node.ready(0, step=7)
    node.said.clear()
    node.workers.on_welcome()
    assert node.last(WorkerStuck) is None


async def test_a_node_joins_with_the_newest_state_that_one_of_its_processes_has():
    node = Node(2)
    node.ready(0, 1)
    node.over(1)
    node.ready(0, step=7, holds=1)
    node.ready(1)
    assert node.last(Join).holds == 1


async def test_processes_that_took_the_last_step_have_finished_although_the_round_was_ended_in_that_moment():
    node = Node(2)
    node.ready(0, 1)
    for number in (0, 1):
        node.workers.on_close(node.lines[number])
    node.over(1)
    node.ends(0)
    node.ends(1)
    assert node.last(NodeFinished).round == 1


async def test_processes_that_were_told_before_they_hung_up_have_finished_too():
    node = Node(1)
    node.ready(0)
    node.over(1)
    node.workers.on_close(node.lines[0])
    node.ends(0)
    assert node.last(NodeFinished).round == 1


async def test_processes_that_end_well_between_two_rounds_have_finished_with_the_last_one():
    node = Node(1)
    node.ready(0)
    node.workers.on_close(node.lines[0])  # a loop of the script is over
    node.over(1)
    node.lines.clear()
    node.ready(0)  # and there is another one, which the script gives up
    node.ends(0)
    assert node.last(NodeFinished).round == 1


async def test_processes_that_had_ended_before_the_node_learned_that_they_stay_are_not_waited_for():
    attempt = Processes(2, 1)
    attempt.alive.discard(0)
    said: list[Message] = []
    launcher: Any = Launcher(attempt, 100)
    before = RestartingWorkers(said.append, launcher)
    before.newest = Round(1)
    workers = ElasticWorkers(
        before, send=said.append, launcher=launcher, rescue=lambda: None, leave_within=1000.0, ready_within=1000.0
    )
    workers.on_round_over(RoundOver(round=Round(1), because="a node was lost"))
    workers.on_ready(Line(), WorkerReady(worker="w1", step=0))
    (joined,) = [message for message in said if isinstance(message, Join)]
    assert joined.nproc == 1


async def test_what_is_saved_in_memory_is_stored_when_another_node_is_lost():
    node = Node(1)
    node.ready(0)
    node.over(1)
    assert node.rescued == 0
    node.ready(0)
    node.forms(2, 1)
    node.over(2, lost=True)
    assert node.rescued == 1


async def test_a_node_whose_processes_ended_well_starts_others_ahead_if_their_round_is_ended_after_all():
    node = Node(1)
    node.ready(0)
    node.ends(0)
    assert node.last(NodeFinished).round == 1
    assert node.workers.is_news(Round(1)), "a script of another node failed after the last step"
    node.workers.on_stopped(None)
    assert node.launcher.ahead == 1
    assert node.workers.standing() == Standing(running=False, finished=False, elastic=True)


async def test_after_a_failed_start_the_node_asks_for_a_round_before_it_tries_again():
    node = Node(1, ahead=True)
    node.attempt.is_stopped = True
    failure = WorkerFailure(global_rank=0, local_rank=0, pid=0, at=1.0, exit_code=127)
    node.attempt.failures.append(failure)
    node.workers.on_end(None, [failure])
    assert (node.launcher.restarted, node.last(WorkerFailed).failure) == (1, failure)
    node.workers.on_stopped(None)
    assert (node.launcher.ahead, node.last(Join).elastic) == (0, False)
    assert not node.workers.is_news(Round(0)), "it has left that round already"


async def test_no_new_process_is_announced_when_no_restart_is_left(caplog: pytest.LogCaptureFixture):
    node = Node(2, max_restarts=1, leave_within=0.1)
    node.ready(0, 1)
    node.dies(1)
    node.dies(1)
    assert node.replaced == [1], "the second failure was one too many"
    assert "no restart is left" in caplog.text
    node.launcher.started.clear()
    await asyncio.wait_for(node.launcher.started.wait(), 10)  # the master thinks otherwise: it forgave one


async def test_no_process_is_started_in_place_of_one_whose_failure_no_restart_would_mend():
    node = Node(2, leave_within=0.1)
    node.ready(0, 1)
    node.dies(1, permanent=True)
    assert node.replaced == [], "the master is about to end the job"
    node.launcher.started.clear()
    await asyncio.wait_for(node.launcher.started.wait(), 10)  # it did not


async def test_failures_of_one_round_use_up_one_restart():
    node = Node(2, max_restarts=1)
    node.ready(0, 1)
    node.dies(0)
    node.dies(1)
    assert node.replaced == [0, 1]


@pytest.mark.parametrize("seed", range(200))
async def test_no_order_of_events_leads_to_a_transition_that_the_table_does_not_list(seed: int):
    draw = random.Random(seed)
    nproc = draw.choice((1, 2, 3))
    node = Node(nproc, ahead=draw.random() < 0.5, leave_within=draw.choice((0.0005, 1000.0)))
    newest = node.workers.newest
    for _ in range(60):
        if draw.random() < 0.2:
            await asyncio.sleep(0.001)  # deadlines pass
        if not node.attempt.alive:
            break
        number = draw.choice(sorted(node.attempt.alive))
        line = node.lines.get(number)
        words = ("ready", "dies", "ends", "forms", "over", "last step", "complete", "close", "held", "welcome")
        match draw.choice(words):
            case "ready":
                node.ready(number, step=draw.choice((0, 7)))
            case "dies" if draw.random() < 0.5:
                node.dies(number)
            case "ends" if draw.random() < 0.1:
                node.ends(number)
            case "forms":
                newest = Round(newest + 1)
                node.forms(newest, draw.randint(1, nproc))
            case "over" if node.workers.is_news(newest):
                node.over(newest)
            case "last step" if line is not None:
                node.workers.on_last_step(line, LastStepTaken(round=newest))
            case "complete":
                node.workers.on_round_complete(draw.choice((newest, Round(max(newest - 1, 0)))))
            case "close" if line is not None:
                node.workers.on_close(node.lines.pop(number))
            case "held":
                node.workers.on_state_held(newest)
            case "welcome":
                node.workers.on_welcome()
        for killed in node.killed[:]:  # what the agent kills ends
            node.killed.remove(killed)
            if killed in node.attempt.alive:
                dismissed = killed in node.attempt.dismissed
                node.ends(killed) if dismissed else node.dies(killed)
    node.workers.stop()
