"""A training process's questions to its agent about rounds, over a real socket to an agent that answers by a script."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resile.api.ids import Round
from resile.protocol.agent_to_master import LastStepTaken
from resile.protocol.master_to_agent import RoundComplete, RoundOver
from resile.protocol.message import Message
from resile.protocol.worker_to_agent import WorkerMessage
from resile.wire.frames import MAX_FRAME, FrameDecoder, MessageDecoder, encode
from resile.wire.rendezvous_client import RendezvousClient

LONG = 60.0
ROUND = Round(3)


@contextlib.contextmanager
def client(
    path: Path,
    answer: Callable[[Message], list[Message] | None],
    on_over: Callable[[Round], None] = lambda round_: None,
) -> Iterator[RendezvousClient]:
    """A client whose agent sends what `answer` returns for a message, or hangs up for None."""

    def serve() -> None:
        connection, _ = listener.accept()
        frames, decoder = FrameDecoder(MAX_FRAME), MessageDecoder(WorkerMessage)
        with connection:
            while data := connection.recv(4096):
                for body in frames.feed(data):
                    answers = answer(decoder.decode(body))
                    if answers is None:
                        return
                    for each in answers:
                        connection.sendall(encode(each))

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        rounds = RendezvousClient(str(path), "w0", on_over)
        try:
            yield rounds
        finally:
            rounds.close()
            thread.join(LONG)


COMPLETE, OVER = RoundComplete(round=ROUND), RoundOver(round=ROUND, because="a node is ready to join")


@pytest.mark.parametrize(
    ("answers", "goes_on"),
    [
        ([COMPLETE], True),
        ([OVER], False),
        ([COMPLETE, OVER], True),
        ([RoundOver(round=Round(2), because="a node was lost"), COMPLETE], True),
        (None, True),
    ],
    ids=["complete", "over", "over after it was complete", "an older round over", "hangs up"],
)
def test_a_process_that_took_the_last_step_goes_on_unless_its_round_was_over_before(
    tmp_path: Path, answers: list[Message] | None, goes_on: bool
) -> None:
    asked: list[Message] = []

    def answer(message: Message) -> list[Message] | None:
        asked.append(message)
        return answers

    with client(tmp_path / "agent", answer) as rounds:
        assert rounds.complete(ROUND, LONG) is goes_on
    assert asked == [LastStepTaken(round=ROUND)]


def test_a_process_goes_on_if_its_agent_does_not_answer_in_time_and_is_not_stopped_by_a_late_answer(
    tmp_path: Path,
) -> None:
    over: list[Round] = []
    late = threading.Event()

    def answer(message: Message) -> list[Message]:
        if message == LastStepTaken(round=ROUND):
            return []
        return [OVER, RoundOver(round=Round(ROUND + 1), because="a node was lost")]

    def on_over(round_: Round) -> None:
        over.append(round_)
        late.set()

    with client(tmp_path / "agent", answer, on_over) as rounds:
        assert rounds.complete(ROUND, 0.05)
        assert rounds.complete(Round(ROUND + 1), LONG) is False
        assert late.wait(LONG)
    assert over == [ROUND + 1]


def test_a_process_knows_that_its_round_is_complete_although_it_has_not_asked(tmp_path: Path) -> None:
    with client(tmp_path / "agent", lambda _: [COMPLETE, OVER]) as rounds:
        assert not rounds.is_complete(ROUND)
        rounds.complete(Round(1), LONG)
        assert rounds.await_over(ROUND, LONG)
        assert rounds.is_complete(ROUND)
