"""The live view in terminals of all sizes: one row per fact, and never higher than the terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from resile.api.job_view import JobEvent, JobView, NodeView
from resile.cli.output.follow import closing_words
from resile.cli.output.live import LiveScreen


def job(nodes: int) -> JobView:
    rows = [
        NodeView(
            name=f"a-rather-long-name-edljob-worker-{number}",
            role="worker",
            id=number,
            rank=number,
            status="Running",
            ready=True,
            restarts=0,
            crashes=0,
            relaunch_count=0,
            launched_at=0.0,
            ended_at=None,
            host="",
            address="",
            message="a long message " * 20,
        )
        for number in range(nodes)
    ]
    return JobView(
        name="a-rather-long-name",
        namespace="default",
        phase="Running",
        reason="",
        message="",
        created_at=0.0,
        started_at=0.0,
        ended_at=None,
        at=100.0,
        round=12,
        members=nodes,
        min_nodes=1,
        max_nodes=nodes,
        step=100,
        total=600,
        speed=10.0,
        goodput=0.5,
        nodes=rows,
        outages=[],
        datasets=[],
    )


@pytest.mark.parametrize(("width", "height"), [(40, 15), (80, 24), (200, 50)])
@pytest.mark.parametrize("nodes", [1, 40])
def test_the_frame_fits_the_terminal(width: int, height: int, nodes: int) -> None:
    out = io.StringIO()
    screen = LiveScreen(Console(file=out, width=width, height=height, force_terminal=True, color_system=None))
    story = [JobEvent(number=n, at=0.0, reason="RoundOver", message="word " * 60, warning=False) for n in range(1, 60)]
    screen.show(job(nodes), story)
    frame = out.getvalue().partition("╭")[2].partition("╯")[0].splitlines()
    assert len(frame) < height
    assert all(len(line) <= width for line in frame)
    assert "Running" in frame[1]
    assert "step 100/600" in frame[1]
    assert "NAME" in frame[2], "the head takes one row"
    assert ("goodput" in frame[1], "CRASHES" in frame[2]) == (width > 40, width > 100)
    screen.close()


def test_a_job_ends_with_the_number_of_steps_that_its_script_reported() -> None:
    ended = msgspec.structs.replace(job(1), phase="Succeeded", step=468, total=468, ended_at=100.0)
    assert "468 steps in 100.0 s, goodput 50.0%" in closing_words(ended, [])
