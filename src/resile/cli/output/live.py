"""The live view of a job on a terminal: its state, its nodes and its newest job events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from resile.api.job_view import JobEvent, JobView, NodeView
from resile.cli.output.columns import count, speeds, steps
from resile.cli.output.follow import Screen, clock
from resile.cli.output.tables import age

COLOURS = {
    **dict.fromkeys(("Running", "Succeeded", "Completed"), "green"),
    **dict.fromkeys(("Pending", "ContainerCreating", "Scaling", "Restarting", "Suspended", "Terminating"), "yellow"),
    "Deleted": "bright_black",
}
OTHER = "red"
FRAME = 8
"""Lines of the view that show neither a node nor an event. A view higher than the terminal could not be erased."""
BORDER = 4
ECHO = 2
"""Columns that stay free for the ^C that the terminal prints: if it wrapped, a row of the view could not be erased."""
GAP, BAR = 3, 20
WIDE = 100
"""The width in columns from which on a terminal has room for the whole table of nodes."""


class LiveScreen(Screen):
    """Draws the job in place on a terminal. `close` leaves the job events there as plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._story: list[JobEvent] = []
        self._live.start()

    def show(self, job: JobView, news: Sequence[JobEvent]) -> None:
        self._story.extend(news)
        outer = self._console.width - ECHO
        width, room = outer - BORDER, max(6, self._console.height - FRAME)
        nodes = [node for node in job.nodes if node.ended_at is None or node.status != "Deleted"]
        shown = nodes[-max(3, room // 2) :]
        lines = deque(self._story, maxlen=max(3, room - len(shown)))
        table = _nodes(shown, job.at, len(nodes) - len(shown), narrow=self._console.width < WIDE)
        parts = [_head(job, width), table, _lines(lines, whole=False)]
        title = f"resile · {job.namespace}/{job.name}"
        self._live.update(Panel(Group(*parts), title=title, title_align="left", width=outer))
        self._live.refresh()

    def say(self, words: str) -> None:
        self._console.print(Text(words))

    def close(self) -> None:
        self._live.update(Text())
        self._live.refresh()
        self._live.stop()
        self._console.print(_lines(self._story, whole=True))


def _head(job: JobView, width: int) -> Table:
    """The first line of the view; facts that do not fit into `width` are left out, the least important first."""
    speed, goodput = speeds(job)
    phase = Text(job.phase, style=f"bold {COLOURS.get(job.phase, OTHER)}")
    by_importance = [
        f"step {steps(job)}",
        age((job.ended_at or job.at) - job.created_at),
        f"goodput {goodput}",
        f"round {job.round or '-'} with {count(job.members, 'node')}",
        speed,
    ]
    in_order = [by_importance[number] for number in (3, 0, 4, 2, 1)]
    left = width - len(phase)
    kept: set[str] = set()
    for words in by_importance:
        if len(words) + GAP > left:
            break
        kept.add(words)
        left -= len(words) + GAP
    facts: list[RenderableType] = [phase, *(words for words in in_order if words in kept)]
    if job.total and left >= BAR + GAP:
        facts.append(ProgressBar(total=job.total, completed=max(0, job.step), width=BAR))
    head = Table.grid(padding=(0, GAP))
    for _ in facts:
        head.add_column(no_wrap=True)
    head.add_row(*facts)
    return head


def _nodes(nodes: Sequence[NodeView], now: float, hidden: int, *, narrow: bool) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    titles = (
        ("NAME", "STATUS", "RESTARTS", "AGE") if narrow else ("NAME", "STATUS", "RANK", "RESTARTS", "CRASHES", "AGE")
    )
    for title in titles:
        drawn.add_column(title, no_wrap=True)
    drawn.add_column("", no_wrap=True, ratio=1)  # the message gets the remaining width
    for node in nodes:
        status = Text(node.status, style=COLOURS.get(node.status, OTHER))
        numbers = [str(node.restarts)] if narrow else [str(node.rank), str(node.restarts), str(node.crashes)]
        drawn.add_row(node.name, status, *numbers, age(now - node.launched_at), Text(node.message, style="dim"))
    if hidden:
        drawn.add_row(f"… and {hidden} more")
    return drawn


def _lines(story: Sequence[JobEvent] | deque[JobEvent], *, whole: bool) -> Table:
    drawn = Table.grid(padding=(0, 2))
    drawn.add_column(no_wrap=True)
    drawn.add_column(no_wrap=True)
    drawn.add_column(no_wrap=not whole, overflow="fold" if whole else "ellipsis")
    for told in story:
        style = "yellow" if told.warning else ""
        drawn.add_row(Text(clock(told.at), style="dim"), Text(told.reason, style=style), Text(told.message))
    return drawn
