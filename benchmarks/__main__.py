"""`python -m benchmarks` (`make bench`): every bar of the engine with its figure, and those of its peers beside it.

Nothing is written outside a temporary directory but DLRover's environment, which is kept in the user's cache (see
`benchmarks/peers.py`), and with `--write` the pages that show the figures. All traffic stays on the loopback interface,
once that environment is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import command

SUITE = command.Suite(
    name="engine",
    package="benchmarks",
    # Those that take longest last.
    names=(
        "help_time",
        "failure_detection",
        "ddp_recovery",
        "elastic",
        "checkpoint",
        "master_loss",
        "rendezvous",
        "idle_agents",
        "fault_schedules",
        "heartbeat_timeout",
    ),
    about="Every bar of the engine with its figure, and those of torchrun and DLRover beside it.",
    peer="torchrun",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks, or those that were asked for."""
    return command.main(SUITE, argv)


if __name__ == "__main__":
    command.run(SUITE)
