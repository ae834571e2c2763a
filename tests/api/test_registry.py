"""Another kind of job is one more entry in a list: everything that reads, names, checks and lists jobs takes it."""

from __future__ import annotations

import pytest
import yaml

from resile.api import rbac
from resile.api.crd.generate import crd
from resile.api.job_phase import JobPhase
from resile.api.job_report import FailureReport, JobReport, NodeCounts
from resile.api.kinds import registry
from resile.api.kinds.base import FrontDoor
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import load_manifests, read_manifest
from resile.deploy import kustomize
from tests.api.manifests import job
from tests.api.structural import problems, refusals, root
from tests.support.toy_kind import TOY, Toy, toy, toys

__all__ = ["toys"]

DOORS: tuple[FrontDoor, ...] = (*registry.job_kinds(), *registry.WITHOUT_RESOURCE)


# every front door ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_a_front_door_is_found_by_its_name_and_has_its_roles(door: FrontDoor) -> None:
    assert registry.front_door(door.name) is door
    assert door.role(door.scaled_role).trains


@pytest.mark.parametrize("kind", registry.job_kinds(), ids=lambda kind: kind.name)
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
            kind.role_selector("some-job", role.name),
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


@pytest.mark.parametrize("kind", registry.job_kinds(), ids=lambda kind: kind.name)
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
