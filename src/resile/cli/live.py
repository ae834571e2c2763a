"""The live view of a job on a terminal: state, nodes and the newest lines of the story. The one place that draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from resile.cli.attach import clock
from resile.cli.rows import speeds, steps
from resile.cli.tables import age
from resile.master.journal import Told
from resile.master.view import JobView, NodeView

COLOURS = {
    "Running": "green",
    "Succeeded": "green",
    "Completed": "green",
    "Pending": "yellow",
    "ContainerCreating": "yellow",
    "Suspended": "yellow",
    "Terminating": "yellow",
    "Deleted": "bright_black",
}
OTHER = "red"
FRAME = 8
"""Lines that are neither a node nor an event."""


class LiveScreen:
    """Draws the job in place; the lines of the story stay behind when it is closed."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._story: list[Told] = []
        self._live.start()

    def show(self, job: JobView, news: Sequence[Told]) -> None:
        """Draw the job."""
        self._story.extend(news)
        room = max(6, self._console.height - FRAME)
        nodes = [node for node in job.nodes if node.ended_at is None or node.status != "Deleted"]
        shown = nodes[-max(3, room // 2) :]
        lines = deque(self._story, maxlen=max(3, room - len(shown)))
        parts = [_head(job), _nodes(shown, job.at, len(nodes) - len(shown)), _lines(lines)]
        self._live.update(Panel(Group(*parts), title=f"resile · {job.namespace}/{job.name}", title_align="left"))
        self._live.refresh()

    def close(self) -> None:
        """Take the picture away and leave the whole story as plain lines."""
        self._live.stop()
        self._console.print(_lines(self._story))


def _head(job: JobView) -> Table:
    speed, goodput = speeds(job)
    head = Table.grid(padding=(0, 3))
    facts: list[RenderableType] = [
        Text(job.phase, style=f"bold {COLOURS.get(job.phase, OTHER)}"),
        f"round {job.round or '-'} with {job.members} nodes",
        f"step {steps(job)}",
        speed,
        f"goodput {goodput}",
        age((job.ended_at or job.at) - job.created_at),
    ]
    if job.total:
        facts.append(ProgressBar(total=job.total, completed=max(0, job.step + 1), width=20))
    head.add_row(*facts)
    return head


def _nodes(nodes: Sequence[NodeView], now: float, hidden: int) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("NAME", "STATUS", "RANK", "RESTARTS", "CRASHES", "AGE", ""):
        drawn.add_column(title, no_wrap=True)
    for node in nodes:
        status = Text(node.status, style=COLOURS.get(node.status, OTHER))
        numbers = (str(node.rank), str(node.restarts), str(node.crashes))
        drawn.add_row(node.name, status, *numbers, age(now - node.launched_at), Text(node.message, style="dim"))
    if hidden:
        drawn.add_row(f"… and {hidden} more")
    return drawn


def _lines(story: Sequence[Told] | deque[Told]) -> Table:
    drawn = Table.grid(padding=(0, 2))
    for told in story:
        style = "yellow" if told.warning else ""
        drawn.add_row(Text(clock(told.at), style="dim"), Text(told.reason, style=style), Text(told.message))
    return drawn
