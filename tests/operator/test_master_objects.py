from __future__ import annotations

import base64
from typing import Any

import pytest

from resile.api.timestamps import moment, stamp
from resile.kube.owner_references import is_owned_by
from resile.operator.jobs import master_objects
from resile.operator.jobs.master_pod import master_pod
from resile.operator.jobs.master_status import LONGEST_SENTENCE, short
from tests.operator.objects import NOW, UID, job, read
from tests.support.kinds import ELASTIC_JOB

NAME = "elasticjob-mnist-dlrover-master"


def made(master: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    item = read(job(master=master, **metadata))
    return master_pod(item, "resile:1", 2)


def with_container(**container: Any) -> dict[str, Any]:
    return made({"template": {"spec": {"containers": [{"name": "main", **container}]}}})


def main_of(pod: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    return container


def test_the_master_runs_its_job_as_agreed() -> None:
    pod = made()
    tls = "--tls-cert /var/run/secrets/resile-tls/tls.crt --tls-key /var/run/secrets/resile-tls/tls.key"
    which = "--namespace red --job mnist --kind elasticjob"
    words = f"python -m resile.master --platform kubernetes {which} --directory /var/run/resile"
    assert " ".join(main_of(pod)["command"]) == f"{words} --host 0.0.0.0 --port 50001 {tls}"
    env = {entry["name"]: entry.get("value") for entry in main_of(pod)["env"]}
    assert env == {
        "POD_IP": None,
        "RESILE_TOKEN_FILE": "/var/run/secrets/resile/token",
        "TMPDIR": "/var/run/resile",
    }
    assert (main_of(pod)["image"], main_of(pod)["imagePullPolicy"]) == ("resile:1", "IfNotPresent")
    assert pod["spec"]["restartPolicy"] == "Never"


def test_the_master_has_no_more_rights_on_its_node_than_it_needs() -> None:
    pod = made()
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    own = main_of(pod)["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_labels_of_both_generations_win_over_the_users_own() -> None:
    labels = made(labels={"team": "vision", "app": "mine"})["metadata"]["labels"]
    assert labels["team"] == "vision"
    assert labels["app"] == "dlrover"
    assert labels["elasticjob-name"] == labels["elasticjob.dlrover/name"] == "mnist"
    assert labels["replica-index"] == labels["elasticjob.dlrover/replica-index"] == "2"


def test_annotations_are_copied_without_kubectls_own() -> None:
    applied = "kubectl.kubernetes.io/last-applied-configuration"
    annotations = made(annotations={"note": "hello", applied: "{}"})["metadata"]["annotations"]
    assert annotations["note"] == "hello"
    assert applied not in annotations


def test_a_partial_template_changes_only_what_it_names() -> None:
    plain, partial = made(), with_container(imagePullPolicy="Always")
    assert main_of(partial)["imagePullPolicy"] == "Always"
    main_of(partial)["imagePullPolicy"] = "IfNotPresent"
    assert partial == plain


def test_a_template_without_anything_is_the_default() -> None:
    assert made({"template": {}}) == made({}) == made()


def test_a_template_is_merged_field_by_field() -> None:
    pod = with_container(
        image="mine:2",
        env=[{"name": "POD_IP", "value": "1.2.3.4"}, {"name": "MORE", "value": "x"}],
        resources={"requests": {"memory": "2Gi"}},
        volumeMounts=[{"name": "nas", "mountPath": "/nas"}],
    )
    env = {entry["name"]: entry.get("value") for entry in main_of(pod)["env"]}
    assert env.items() >= {"POD_IP": "1.2.3.4", "MORE": "x"}.items()
    assert env.keys() == {"RESILE_TOKEN_FILE", "TMPDIR", "POD_IP", "MORE"}
    assert main_of(pod)["resources"]["requests"] == {"cpu": "100m", "memory": "2Gi"}
    assert "/nas" in [mount["mountPath"] for mount in main_of(pod)["volumeMounts"]]
    assert main_of(pod)["image"] == "mine:2"


def test_a_templates_command_takes_the_place_of_ours_as_a_whole() -> None:
    assert main_of(with_container(command=["sleep", "9"]))["command"] == ["sleep", "9"]
    only_args = main_of(with_container(args=["serve"]))
    assert "command" not in only_args
    assert only_args["args"] == ["serve"]


def test_the_rest_of_a_templates_pod_is_kept() -> None:
    spec = {
        "containers": [{"name": "log", "image": "log:1"}, {"name": "main"}],
        "nodeSelector": {"pool": "cpu"},
        "volumes": [{"name": "nas", "emptyDir": {}}],
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "restartPolicy": "Always",
    }
    pod = made({"template": {"spec": spec}, "BatchScheduler": "volcano", "priority": "high"})
    assert [container["name"] for container in pod["spec"]["containers"]] == ["main", "log"]
    assert pod["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert {"nas", "run", "token"} <= {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {"spot", "node.kubernetes.io/not-ready"} <= {entry["key"] for entry in pod["spec"]["tolerations"]}
    assert pod["spec"]["restartPolicy"] == "Never"
    assert (pod["spec"]["schedulerName"], pod["spec"]["priorityClassName"]) == ("volcano", "high")
    assert pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] == "main"


def test_everything_is_owned_by_the_job_and_in_its_namespace() -> None:
    item = read(job())
    pair = master_objects.key_pair(item)
    secrets = [pair, master_objects.credentials(item, pair)]
    everything = [thing for _, thing in master_objects.applied(item)]
    for thing in [*everything, *secrets, master_objects.journal(item), master_objects.binding(item), made()]:
        assert is_owned_by(thing, UID)
        assert thing["metadata"]["namespace"] == "red"
        assert thing["metadata"]["name"] in (NAME, "elasticjob-mnist-token", "elasticjob-mnist-tls")


def test_the_role_names_its_own_job_and_no_other() -> None:
    role = next(thing for kind, thing in master_objects.applied(read(job())) if kind.name == "Role")
    named = {name for rule in role["rules"] for name in rule.get("resourceNames", ())}
    assert named == {"mnist", NAME}
    assert not any("*" in rule["verbs"] or "*" in rule["resources"] for rule in role["rules"])
    assert not any("secrets" in rule["resources"] for rule in role["rules"])


def test_every_job_has_a_token_of_its_own() -> None:
    item = read(job())
    tokens = {master_objects.credentials(item, master_objects.key_pair(item))["data"]["token"] for _ in range(3)}
    assert len(tokens) == 3
    assert all(len(base64.b64decode(token)) >= 32 for token in tokens)


def test_nodes_get_the_certificate_and_only_the_master_gets_its_key() -> None:
    item = read(job())
    pair = master_objects.key_pair(item)
    assert set(pair["data"]) == {"tls.crt", "tls.key"}
    assert master_objects.credentials(item, pair)["data"].keys() == {"token", "ca.crt"}
    assert master_objects.credentials(item, pair)["data"]["ca.crt"] == pair["data"]["tls.crt"]
    assert b"PRIVATE KEY" in base64.b64decode(pair["data"]["tls.key"])
    assert b"PRIVATE KEY" not in base64.b64decode(pair["data"]["tls.crt"])


def test_an_ended_job_gets_its_time_of_completion_once() -> None:
    from resile.api.job_phase import JobPhase

    ended = ELASTIC_JOB.phase_patch(job("Running"), JobPhase.FAILED, "JobFailed", "over", NOW)
    assert ended["status"]["completionTime"] == stamp(NOW)
    known = job("Failed", inner={"completionTime": "2027-01-01T00:00:00Z"})
    assert (
        ELASTIC_JOB.phase_patch(known, JobPhase.FAILED, "JobFailed", "over", NOW)["status"]["completionTime"]
        == "2027-01-01T00:00:00Z"
    )


def test_times_are_read_as_they_are_written() -> None:
    assert moment(stamp(NOW)) == NOW
    assert moment("soon") is None


@pytest.mark.parametrize("text", ["one\n two", "x" * 5000])
def test_sentences_are_short_and_on_one_line(text: str) -> None:
    assert "\n" not in short(text)
    assert len(short(text)) <= LONGEST_SENTENCE
