"""What kubectl explains and shows of resile's kinds, and the samples, on a real cluster."""

from __future__ import annotations

from tests.kube.namespace import IMAGE, ROOT, KubeNamespace, kubectl


def test_kubectl_explains_the_fields_of_a_job(cluster: KubeNamespace) -> None:
    def explained(field: str) -> str:
        return " ".join(cluster.kubectl("explain", field).split())  # kubectl's versions break lines in their own ways

    told = explained("elasticjob.spec")
    for field in ("distributionStrategy", "replicaSpecs", "resourceLimits", "suspend"):
        assert field in told
    assert "no crash and costs nothing" in explained("elasticjob.spec.replicaSpecs.worker.restartCount")
    assert "stays as it is" in explained("scaleplan.spec.replicaResourceSpecs")


def test_the_samples_run_as_they_are_written(cluster: KubeNamespace) -> None:
    def sample(name: str) -> str:
        text = (ROOT / "config/samples" / name).read_text()
        return text.replace("image: resile:dev", f"image: {IMAGE}").replace(
            "namespace: dlrover", f"namespace: {cluster.name}"
        )

    kubectl("apply", "-f", "-", stdin=sample("elasticjob.yaml"))
    cluster.until_members("sample", 2)
    kubectl("apply", "-f", "-", stdin=sample("scaleplan.yaml"))
    cluster.until_members("sample", 3)
    cluster.until("the plan's end", lambda: cluster.status("sample-plan", "scaleplan").get("phase") == "Succeeded")
    header, row = cluster.kubectl("get", "elasticjob", "sample", "-o", "wide").splitlines()
    assert header.split() == ["NAME", "PHASE", "AGE", "WORKERS", "STEP", "GOODPUT", "RESTARTS", "REASON"]
    assert row.split()[0] == "sample"
