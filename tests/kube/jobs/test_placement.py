"""Where a replacement goes on a real cluster when the machine of the lost node may be gone."""

from __future__ import annotations

from tests.kube.namespace import KubeNamespace, job, training


def machine(namespace: KubeNamespace, pod: str) -> str:
    return str(namespace.get("pod", pod).get("spec", {}).get("nodeName", ""))


def test_the_replacement_of_a_node_that_fell_silent_goes_to_another_machine(cluster: KubeNamespace) -> None:
    cluster.apply(job("quiet", f"{training(100_000)}; exit $?"))
    cluster.until_members("quiet", 2)
    lost = machine(cluster, "quiet-edljob-worker-1")
    cluster.kubectl("exec", "quiet-edljob-worker-1", "--", "bash", "-c", "kill -STOP -1")
    cluster.until("the replacement's machine", lambda: machine(cluster, "quiet-edljob-worker-2"))
    assert machine(cluster, "quiet-edljob-worker-2") != lost
    assert cluster.get("pod", "quiet-edljob-worker-2")["metadata"]["annotations"]["resile.avoids"] == lost
    cluster.until_members("quiet", 2)
