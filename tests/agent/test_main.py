"""How `resile run` ends its agent: by a defect in a callback, and by a signal between two tries."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from resile.agent import main
from resile.agent.agent import SIGNALLED, Agent, JobWasOver
from resile.agent.options import Endpoint, RunOptions
from resile.agent.workers.attempt import LogDirectory
from resile.agent.workers.output import Output
from resile.agent.workers.ports import free_port
from resile.agent.workers.worker_states import Event, Ready, Starting, transition
from resile.api.ids import NO_ROUND
from resile.protocol.master_to_agent import JobOver
from resile.protocol.reports import RendezvousConfig


def options(tmp_path: Path, *signals: int) -> RunOptions:
    return RunOptions(
        command=("true",),
        nproc=1,
        rendezvous=RendezvousConfig(),
        run_id="id",
        job_name="j",
        endpoint=Endpoint("127.0.0.1", free_port({})),
        hosts=False,
        state_dir=str(tmp_path),
        signals=signals,
    )


class Defect(main._Signals):
    """Makes a callback of the loop meet an impossible event as soon as there is an agent."""

    def tell(self, agent: Agent | None) -> None:
        super().tell(agent)
        if agent is not None:
            ready = Ready(line=None, was_member=False, has_state=False, holds=NO_ROUND)  # type: ignore[arg-type]
            asyncio.get_running_loop().call_later(0, transition, Starting(), Event.OVERDUE, ready)


async def test_an_impossible_event_in_a_callback_ends_the_agent_with_a_sentence(tmp_path: Path) -> None:
    asked, output = options(tmp_path), Output()
    try:
        with pytest.raises(
            main.CannotRun, match=r"^this agent has a defect and ends: a worker that is Starting cannot become Ready by"
        ):
            async with asyncio.timeout(20):
                await main._serve(
                    asked, None, Defect([]), directory=tmp_path, logs=LogDirectory(asked, tmp_path), output=output
                )
    finally:
        output.close()


async def test_a_signal_between_two_tries_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class EndedAgent:
        def on_signal(self, number: int) -> None:
            """Swallow the signal, as an agent does that has ended."""

    async def was_over(_: object, __: object, signals: Any, **___: object) -> int:
        signals.tell(EndedAgent())
        asyncio.get_running_loop().call_later(main.LATE_PAUSE / 2, signal.raise_signal, signal.SIGUSR1)
        raise JobWasOver(JobOver(succeeded=True, reason="", message="done"))

    monkeypatch.setattr(main, "_serve", was_over)
    asked, output = options(tmp_path, signal.SIGUSR1), Output()
    try:
        async with asyncio.timeout(5):
            assert await main._run(asked, tmp_path, output) == SIGNALLED + signal.SIGUSR1
    finally:
        output.close()
