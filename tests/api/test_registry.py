"""Another kind of job is one more entry in a list: everything that reads, names, checks and lists jobs takes it."""

from __future__ import annotations

import pytest
import yaml

from resile.api.crd.generate import crd
from resile.api.ids import NodeId, NodeKey, Rank
from resile.api.job import JobSpec
from resile.api.job_phase import JobPhase
from resile.api.job_report import FailureReport, JobReport, NodeCounts
from resile.api.kinds import rbac, registry
from resile.api.kinds.base import BaseJobKind
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import load_manifests, read_manifest
from resile.cli.output.listing import kind_of
from resile.client.base import Listable
from resile.client.cluster.job_view import job_view
from resile.client.errors import NotUsableError
from resile.core import events as ev
from resile.deploy import kustomize
from resile.kube.manifests import read_job
from resile.master.kubernetes.job_status import status_of
from resile.operator.jobs.decisions import ObservedJob, Provision, SetStatus, StartMaster, decide
from resile.operator.jobs.master_pod import master_pod
from resile.platform.base import Launch
from resile.platform.kubernetes.pods import pod_manifest, service_manifest
from resile.protocol.reports import RendezvousConfig
from tests.api.manifests import job
from tests.api.structural import problems, refusals, root
from tests.core.given import Job
from tests.support.toy_kind import TOY, Toy, toy, toys

__all__ = ["toys"]

KINDS: tuple[BaseJobKind, ...] = (*registry.JOB_KINDS, *registry.WITHOUT_RESOURCE)


# every kind of job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_of_job_is_found_by_its_name_and_has_its_roles(kind: BaseJobKind) -> None:
    assert registry.kind_of_job(JobSpec(name="j", kind=kind.name)) is kind
    assert {role.name: role.trains for role in kind.roles}[kind.scaled_role]


@pytest.mark.parametrize("kind", registry.JOB_KINDS, ids=lambda kind: kind.name)
def test_a_pod_is_found_by_its_name_its_labels_and_every_selector(kind) -> None:
    for role in kind.roles:
        name = kind.node_name("some-job", role.name, 12)
        node = kind.node_of(name, "some-job")
        assert node is not None
        assert (node.role, node.id) == (role.name, 12)
        assert kind.node_of(name, "some") is None
        labels = kind.node_labels("some-job", role=role.name, node_id=12, rank=3, relaunch_count=2)
        assert (kind.job_of(labels), kind.rank_of(labels), kind.relaunch_count_of(labels)) == ("some-job", 3, 2)
        for selector in (
            kind.job_selector("some-job"),
            kind.rank_selector("some-job", role.name, 3),
        ):
            assert selector.items() <= labels.items()
        assert not kind.masters.items() <= labels.items()
    assert kind.node_of(kind.master_name("some-job"), "some-job") is None
    assert kind.masters.items() <= kind.master_labels("some-job").items()
    assert kind.master_selector("some-job").items() <= kind.master_labels("some-job").items()


@pytest.mark.parametrize("kind", registry.kinds(), ids=lambda kind: kind.definition.kind)
def test_the_sample_of_a_kind_can_be_used(kind) -> None:
    manifest = kind.sample("image", "space").manifest
    assert registry.kind_of(manifest) is kind
    assert registry.kind_of_resource(read_manifest(manifest)) is kind
    assert refusals(crd(kind.definition), manifest) == []


@pytest.mark.parametrize("kind", registry.JOB_KINDS, ids=lambda kind: kind.name)
def test_a_status_is_read_back_as_it_was_written(kind) -> None:
    report = JobReport(
        phase=JobPhase.RUNNING,
        reason="JobRunning",
        message="two nodes train",
        nodes={kind.scaled_role: NodeCounts(running=2, pending=1, launching=1, succeeded=1, failed=1)},
        started_at=60.0,
        plan="more",
        step=0,
        total=9,
        speed=1.5,
        round=3,
        members=2,
        goodput=0.5,
        restarts=1,
        last_failure=FailureReport(node="a", reason="OOMKilled", message="out of memory", at=30.0, exit_code=137),
        generation=4,
    )
    assert kind.report_of({"status": kind.write_status(report, "j", {}, 90.0)}) == report


# a kind that nothing in src has heard of ----------------------------------------------------------------------------


def test_a_new_kind_is_read_beside_the_others(toys) -> None:
    read, other = load_manifests(f"{_yaml(toy())}---\n{_yaml(job())}")
    assert isinstance(read, Toy)
    kind = registry.kind_of_resource(read)
    assert kind is toys
    spec = toys.to_job_spec(read)
    assert [registry.node_name(spec, "trainer", number) for number in (0, 1)] == ["teddy.trainer.0", "teddy.trainer.1"]
    assert spec.trainers == ("trainer",)
    assert registry.kind_of_resource(other) is not toys


def test_the_errors_of_a_new_kind_are_told_like_any(toys) -> None:
    with pytest.raises(BadManifest, match=r"spec\.trainer: unknown field; did you mean trainers\?"):
        read_manifest(toy(trainer=1))
    with pytest.raises(BadManifest, match="kind: must be ElasticJob, ToyJob or ScalePlan, not 'Toy'"):
        read_manifest({**toy(), "kind": "Toy"})
    with pytest.raises(BadManifest, match=r"apiVersion: must be toys\.example\.com/v1, not 'v1'"):
        read_manifest({**toy(), "apiVersion": "v1"})


def test_a_new_kind_has_a_definition_rights_and_a_sample(toys) -> None:
    made = crd(toys.definition)
    assert list(problems(root(made))) == []
    assert refusals(made, toy()) == []
    assert refusals(made, toy(trainers="two")) != []
    files = kustomize.files()
    assert "crd/bases/toys.example.com_toyjobs.yaml" in files
    assert "ToyJob" in files["samples/toyjob.yaml"]
    group = {"toys.example.com"}
    for rules in (rbac.operator_rules(), rbac.viewer_rules(), rbac.editor_rules(), rbac.master_rules(TOY, "teddy")):
        assert any(group == set(rule["apiGroups"]) and "toyjobs" in rule["resources"] for rule in rules)
    assert not [rule for rule in rbac.master_rules(TOY, "teddy") if "scaleplans" in rule["resources"]]


def _yaml(manifest: object) -> str:
    return yaml.safe_dump(manifest)


def test_a_new_kind_gets_masters_by_the_same_decisions(toys) -> None:
    item = {**toy(), "metadata": {**toy()["metadata"], "resourceVersion": "1"}}
    spec = read_job(toys, item)
    assert isinstance(spec, JobSpec)
    accepted, provision, start = decide(ObservedJob(kind=toys, job=item), spec, 0.0).actions
    assert (accepted, provision, start) == (
        SetStatus(JobPhase.CREATED, "JobCreated", "the job was accepted and gets its master"),
        Provision(),
        StartMaster(0),
    )
    assert toys.phase_patch(item, accepted.phase, accepted.reason, accepted.message, 0.0)["state"] == "Created"
    pod = master_pod(spec, "image", 0)
    assert pod["metadata"]["name"] == "teddy.master"
    assert pod["metadata"]["labels"] == toys.master_labels("teddy")
    assert pod["spec"]["containers"][0]["command"][5:11] == [
        "--namespace",
        "nursery",
        "--job",
        "teddy",
        "--kind",
        "toy",
    ]
    bad = read_job(toys, toy(trainers="two"))
    (failed, _) = decide(ObservedJob(kind=toys, job=toy(trainers="two")), bad, 0.0).actions
    assert isinstance(failed, SetStatus)
    assert failed.phase is JobPhase.FAILED


def test_pods_and_services_of_a_new_kind_have_its_names_labels_and_environment(toys) -> None:
    spec = toys.to_job_spec(read_manifest(toy(caches=1)))
    launch = Launch(node=NodeKey("trainer", NodeId(4)), rank=Rank(1), replicas=2)
    pod = pod_manifest(spec, launch, "m:1")
    assert pod["metadata"]["name"] == "teddy.trainer.4"
    assert pod["metadata"]["labels"] == toys.node_labels("teddy", role="trainer", node_id=NodeId(4), rank=Rank(1))
    env = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert (env["TOY_RANK"], env["TOY_MASTER"]) == ("1", "m:1")
    assert "NODE_RANK" not in env
    service = service_manifest(spec, "cache", Rank(0))
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == ("teddy.cache.0", 7001)
    assert pod["metadata"]["ownerReferences"][0]["kind"] == "ToyJob"


def test_the_engine_trains_with_roles_it_has_never_heard_of(toys) -> None:
    job = Job(toys.to_job_spec(read_manifest(toy(caches=1))), RendezvousConfig(min_nodes=1, max_nodes=2))
    job.does(ev.Started())
    assert {str(key) for key in job.engine.state.nodes} == {"trainer-0", "trainer-1", "cache-0"}
    status = status_of(job.engine.state, 1.0, {}, 1)
    assert status == {"state": "Pending", "why": ""}


def test_jobs_of_a_new_kind_are_listed_like_any(toys) -> None:
    item = {**toy(), "status": {"state": "Running", "why": "it plays"}}
    item["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    shown = job_view(item, [], 0.0)
    assert (shown.phase, shown.message) == ("Running", "it plays")
    assert kind_of("toyjobs") is kind_of("tj") is Listable.JOBS
    with pytest.raises(NotUsableError):
        kind_of("dolls")
