"""Who may do what, as deployed: asked of the real API server, with the tokens that pods really have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kube.namespace import KubeNamespace, job, kubectl, master, new_namespace, token_of, training

pytestmark = pytest.mark.timeout(300)

SLOW = 180.0
"""For the pods of a deleted job to go: the garbage collector takes its time where much else was deleted before."""
JOBS = "/apis/elastic.iml.github.io/v1alpha1/namespaces/{}/elasticjobs"
CORE = "/api/v1/namespaces/{}"
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
REFUSAL = "is forbidden: User"
"""How the API server refuses for lack of a right; in a namespace that is going away it forbids things to everybody."""
OPERATOR = "system:serviceaccount:resile-system:resile-operator"

ASK = """
import json, pathlib, ssl, sys, urllib.error, urllib.request
who, requests = sys.argv[1:]
token = pathlib.Path(who).read_text() if who.startswith("/") else who
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
for method, path in json.loads(requests):
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    headers = {"Content-Type": kind, **({"Authorization": f"Bearer {token}"} if token else {})}
    body = b"{}" if method in ("PATCH", "POST") else None
    asked = urllib.request.Request("https://kubernetes.default.svc" + path, body, headers, method=method)
    try:
        print(urllib.request.urlopen(asked, timeout=20, context=context).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""

Asked = list[tuple[str, str]]


def answers(namespace: KubeNamespace, pod: str, who: str, asked: Asked) -> dict[str, int]:
    """What the API server answers to requests from inside a pod, with a token or the file that holds one."""
    words = ("exec", pod, "-c", "main", "--", "python", "-c", ASK, who, json.dumps(asked))
    codes = [int(word) for word in namespace.kubectl(*words).split()]
    return {f"{method} {path}": code for (method, path), code in zip(asked, codes, strict=True)}


@pytest.fixture(scope="module")
def namespaces(
    deployed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[KubeNamespace, KubeNamespace]]:
    """Two namespaces with a job of the same name, which train."""
    with ExitStack() as stack:
        made = [
            stack.enter_context(new_namespace("rights", tmp_path_factory.mktemp(name), KubeNamespace)) for name in "ab"
        ]
        for namespace in made:
            asks = {"requests": {"cpu": "50m", "memory": "64Mi"}}
            namespace.apply(job("same", training(1_000_000), resources=asks))
        for namespace in made:
            namespace.until_members("same", 2)
        yield made[0], made[1]


def everything(namespace: KubeNamespace, other: KubeNamespace) -> Asked:
    """What a master alone, or not even a master, should get."""
    core, jobs = CORE.format(namespace.name), JOBS.format(namespace.name)
    return [
        ("GET", f"{core}/secrets"),
        ("GET", f"{core}/secrets/elasticjob-same-token"),
        ("GET", f"{core}/configmaps"),
        ("GET", f"{core}/serviceaccounts"),
        ("POST", f"{core}/configmaps"),
        ("PATCH", f"{core}/pods/{master('same')}"),
        ("POST", f"{core}/pods/{master('same')}/exec"),
        ("DELETE", f"{core}/services/{master('same')}"),
        ("PATCH", f"{jobs}/same"),
        ("DELETE", f"{jobs}/same"),
        ("GET", jobs),
        ("PATCH", f"{jobs}/another/status"),
        ("POST", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace.name}/roles"),
        ("GET", f"{CORE.format(other.name)}/pods"),
        ("POST", f"{CORE.format(other.name)}/pods"),
        ("GET", f"{CORE.format(other.name)}/configmaps/{master('same')}"),
        ("PATCH", f"{JOBS.format(other.name)}/same/status"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/nodes"),
    ]


def masters_own(namespace: KubeNamespace) -> Asked:
    """What a master needs."""
    core, jobs = CORE.format(namespace.name), JOBS.format(namespace.name)
    return [
        ("GET", f"{core}/pods"),
        ("GET", f"{core}/configmaps/{master('same')}"),
        ("GET", f"{jobs}/same"),
        ("PATCH", f"{jobs}/same/status"),
    ]


def test_a_training_pod_can_do_nothing_at_the_api(namespaces: tuple[KubeNamespace, KubeNamespace]) -> None:
    here, other = namespaces
    pod = min(here.pods("same"))
    assert "No such file" in here.kubectl("exec", pod, "--", "sh", "-c", f"ls {ACCOUNT} 2>&1 || true")
    asked = [*everything(here, other), *masters_own(here)]
    for token in ("", token_of("default", here.name)):
        allowed = {what for what, code in answers(here, pod, token, asked).items() if code not in (401, 403)}
        assert not allowed, "with a token of its account" if token else "without a token"


def test_a_master_can_do_its_work_and_touch_nothing_else(namespaces: tuple[KubeNamespace, KubeNamespace]) -> None:
    here, other = namespaces
    codes = answers(here, master("same"), f"{ACCOUNT}/token", [*masters_own(here), *everything(here, other)])
    needed = {f"{method} {path}" for method, path in masters_own(here)}
    assert {what for what, code in codes.items() if code == 200} == needed
    assert {code for what, code in codes.items() if what not in needed} == {403}


def test_the_operator_is_refused_nothing_and_may_not_do_what_it_never_does(
    namespaces: tuple[KubeNamespace, KubeNamespace],
) -> None:
    said = kubectl("-n", "resile-system", "logs", "deployment/resile-operator", "--tail=-1")
    assert REFUSAL not in said, said
    for namespace in namespaces:
        assert REFUSAL not in namespace.logs(master("same"))

    def may(*words: str) -> bool:
        return kubectl("auth", "can-i", *words, "-A", f"--as={OPERATOR}", check=False).strip().endswith("yes")

    assert may("create", "pods")
    for words in (
        ("list", "secrets"),
        ("delete", "secrets"),
        ("delete", "elasticjobs.elastic.iml.github.io"),
        ("patch", "elasticjobs.elastic.iml.github.io"),
        ("patch", "pods"),
        ("create", "pods", "--subresource=exec"),
        ("list", "configmaps"),
        ("delete", "configmaps"),
        ("escalate", "roles.rbac.authorization.k8s.io"),
        ("bind", "roles.rbac.authorization.k8s.io"),
        ("create", "clusterroles.rbac.authorization.k8s.io"),
        ("list", "nodes"),
        ("impersonate", "users"),
    ):
        assert not may(*words), words


def test_jobs_of_one_name_in_two_namespaces_do_not_meet(namespaces: tuple[KubeNamespace, KubeNamespace]) -> None:
    first, second = namespaces
    tokens = {namespace.get("secret", "elasticjob-same-token")["data"]["token"] for namespace in namespaces}
    assert len(tokens) == 2
    before, running = second.pods("same").keys(), second.running("same")
    step = second.progress("same").get("step") or 0
    first.kubectl("delete", "elasticjob", "same")
    first.until("nothing to be left", lambda: not first.kubectl("get", "pods", "-o", "name").strip(), SLOW)
    second.until("more steps", lambda: (second.progress("same").get("step") or 0) > step)
    assert (second.pods("same").keys(), second.running("same")) == (before, running)
