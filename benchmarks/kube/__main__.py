"""`python -m benchmarks.kube` (`make bench-kube`): every bar of jobs on a cluster with its figure.

Needs the cluster of KUBECONFIG (`make cluster`) without a deployed operator. Everything happens in namespaces of its
own, which are removed at the end, also after Ctrl-C; so are the Node objects and resources that some rows add. The
bars are those of the longest of several runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import command
from benchmarks.kube import dlrover_figures

SUITE = command.Suite(
    name="cluster",
    package="benchmarks.kube",
    names=("time_to_first_step", "pod_loss", "elastic_recovery", "many_pods", "idle_operator"),
    about="Every bar of jobs on a cluster with its figure: the longest of several runs, and the median beside it.",
    peer=dlrover_figures.NAME,
    facts={"peer": dlrover_figures.ABOUT},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all benchmarks, or those that were asked for."""
    return command.main(SUITE, argv)


if __name__ == "__main__":
    command.run(SUITE)
