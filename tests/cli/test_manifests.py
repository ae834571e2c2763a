"""`resile manifests` and `config/`: the same objects, valid on current releases, with no more rights than needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from resile.deploy import installation, kustomize
from tests.support.paths import ROOT

RESILE = str(Path(sys.executable).with_name("resile"))
CONFIG = ROOT / "config"
RELEASES = ("1.25", kubernetes_validate.latest_version())
"""The oldest and the newest whose schemas are there; a cluster of 1.20 is asked itself, in tests/kube."""

Object = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders kustomize trees")
OLDEST_WITH_CEL = 21
"""Whose kustomize knows `patches`; a cluster that knows CEL comes with a later one."""


def minor_of_kubectl() -> int:
    """The second number of kubectl's version, "20+" included."""
    told = subprocess.run(
        ["kubectl", "version", "--client", "-o", "json"], capture_output=True, text=True, check=True
    ).stdout
    return int(json.loads(told)["clientVersion"]["minor"].rstrip("+"))


def resile(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([RESILE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def printed(*words: str) -> list[Object]:
    return list(yaml.safe_load_all(resile("manifests", *words).stdout))


def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    named = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    assert len(named) == len(objects)
    return named


def rendered(folder: str) -> list[Object]:
    done = subprocess.run(["kubectl", "kustomize", str(CONFIG / folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


# one text -----------------------------------------------------------------------------------------------------------


def test_the_folder_holds_what_the_program_writes_and_nothing_else():
    on_disk = {str(path.relative_to(CONFIG)): path.read_text() for path in CONFIG.rglob("*") if path.is_file()}
    assert on_disk.keys() == kustomize.files().keys()
    for path, text in kustomize.files().items():
        assert on_disk[path] == text, f"config/{path} is old: resile manifests --kustomize config"


def test_the_folder_is_written_anew_and_other_files_stay(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    resile("manifests", "--kustomize", str(tmp_path))
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    for path, text in kustomize.files().items():
        assert (tmp_path / path).read_text() == text


@needs_kubectl
def test_kustomize_renders_what_the_command_prints():
    assert by_name(rendered("default")) == by_name(printed())


@needs_kubectl
def test_the_overlay_with_cel_is_what_the_flag_prints():
    if (minor := minor_of_kubectl()) < OLDEST_WITH_CEL:
        pytest.skip(f"kubectl 1.{minor} cannot read the overlay, as its first lines say")
    assert by_name(rendered("cel")) == by_name(printed("--cel"))
    assert "x-kubernetes-validations" not in resile("manifests").stdout


def test_what_is_installed_by_default_renders_with_the_kubectl_of_the_oldest_cluster_too():
    folders = [name for name in kustomize.files() if name.endswith("kustomization.yaml") and "cel/" not in name]
    assert len(folders) > 4
    for name in folders:
        written = yaml.safe_load(kustomize.files()[name])
        assert all(resource.endswith(".yaml") for resource in written["resources"]), f"{name}: a folder is a base"
        assert "patches" not in written


@needs_kubectl
def test_the_samples_render_to_the_job_alone():
    assert [one["kind"] for one in rendered("samples")] == ["ElasticJob"]


@needs_kubectl
def test_the_classes_of_priorities_are_installed_only_on_demand():
    assert [one["metadata"]["name"] for one in rendered("priority")] == ["high", "low"]
    assert "PriorityClass" not in resile("manifests").stdout


def test_no_manifest_uses_an_anchor():
    for text in kustomize.files().values():
        assert "&id" not in text


# what is printed ----------------------------------------------------------------------------------------------------


def test_objects_come_before_those_that_need_them():
    kinds = [one["kind"] for one in printed()]
    first = ["Namespace", "Namespace", "CustomResourceDefinition", "CustomResourceDefinition", "ServiceAccount"]
    assert kinds[: len(first)] == first
    assert kinds[-1] == "Deployment"


def test_the_image_and_the_namespace_are_the_users():
    objects = printed("--image", "registry.example:5000/team/resile@sha256:0a", "--namespace", "training")
    named = by_name(objects)
    deployment = named["Deployment", "resile-operator"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example:5000/team/resile@sha256:0a"
    assert {one["metadata"].get("namespace", "training") for one in objects} == {"training"}
    assert ("Namespace", "training") in named
    assert ("Namespace", "resile-system") not in named
    for kind, name in (
        ("ClusterRoleBinding", "resile-operator"),
        ("RoleBinding", "resile-operator-leader-election"),
    ):
        assert [one["namespace"] for one in named[kind, name]["subjects"]] == ["training"]


def test_the_namespace_of_the_tutorials_may_be_the_operators():
    named = by_name(printed("--namespace", "dlrover"))
    assert [name for kind, name in named if kind == "Namespace"] == ["dlrover"]


def test_the_definitions_can_be_had_alone():
    assert [one["kind"] for one in printed("--crd-only")] == ["CustomResourceDefinition"] * 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--image", "a b"], "--image: must be the name of an image such as resile:dev, not 'a b'"),
        (["--image", ""], "--image: must be the name of an image"),
        (["--image", "x\ny"], "--image: must be the name of an image"),
        (["--namespace", "No_Good"], "--namespace: must be at most 63 lower-case letters"),
        (["--kustomize", "anywhere", "--cel"], "--kustomize: give it alone"),
        (["--krd-only"], "--crd-only"),
    ],
)
def test_bad_words_are_told_in_one_sentence(words, sentence):
    done = resile("manifests", *words, code=2)
    assert sentence in done.stderr
    assert done.stdout == ""
    assert not Path("anywhere").exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "crd").write_text("a file where a folder must be")
    assert "cannot be written" in resile("manifests", "--kustomize", str(tmp_path), code=1).stderr


# valid and modest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "one",
    [*installation.everything(), *installation.default_role(), *installation.priority_classes()],
    ids=lambda one: one["kind"],
)
def test_every_object_is_valid_on_old_and_current_releases(one, release):
    kubernetes_validate.validate(one, release, strict=True)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("one", installation.definitions(cel=True), ids=lambda one: one["metadata"]["name"])
def test_rules_in_cel_are_valid_from_1_25_on(one, release):
    kubernetes_validate.validate(one, release, strict=True)


def test_what_a_release_does_not_know_is_noticed():
    deployment = installation.deployment()
    deployment["spec"]["template"]["spec"]["containers"][0]["privileges"] = "none"
    with pytest.raises(kubernetes_validate.ValidationError, match="privileges"):
        kubernetes_validate.validate(deployment, RELEASES[-1], strict=True)


def test_the_operator_runs_without_privileges():
    pod = installation.deployment()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert {"requests", "limits"} == container["resources"].keys()
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_the_probes_ask_the_port_that_the_command_line_names():
    (container,) = installation.deployment()["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert f"--health-port={port['containerPort']}" in container["args"]
    assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {port["name"]}
    paths = [container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")]
    assert paths == ["/healthz", "/readyz"]


def test_the_role_of_the_tutorials_grants_nothing():
    role, binding = yaml.safe_load_all((CONFIG / "rbac" / "default_role.yaml").read_text())
    assert (role["kind"], role["rules"]) == ("Role", [])
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert "namespace" not in role["metadata"]  # kubectl -n says where
    assert "default_role" not in (CONFIG / "rbac" / "kustomization.yaml").read_text()
