"""Who gets to a job's master on a real cluster: its own nodes, over TLS, and no other process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kube.namespace import KubeNamespace, job, master, training, until

STEPS = 100_000
"""More than are taken while a test looks on."""

CALLS = """
import asyncio, json, ssl, sys
from pathlib import Path
from resile.wire.connection import connect
from resile.protocol.master_to_agent import MasterMessage
from resile.wire.tls import client_context

here = Path("/var/run/secrets/resile")
own, ca, name = (here / "token").read_bytes().strip(), here / "ca.crt", sys.argv[1]
unchecked = client_context(ca, check_name=False)
unchecked.verify_mode = ssl.CERT_NONE
calls = {
    "properly": dict(token=own, tls=client_context(ca), server_name=name),
    "with a guess": dict(token=b"guess", tls=unchecked, server_name=name),
    "unchecked": dict(token=own, tls=unchecked, server_name=name),
    "by another name": dict(token=own, tls=client_context(ca), server_name="other.example"),
    "plainly": dict(token=own),
}


async def call(**how):
    try:
        connection = await connect(name, 50001, decode=MasterMessage, on_message=lambda *_: None, timeout=20, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    connection.abort()
    return "welcome"


async def babble():
    reader, writer = await asyncio.open_connection(name, 50001)
    writer.write(b"GET / HTTP/1.0\\r\\n\\r\\n")
    async with asyncio.timeout(20):
        heard = await reader.read()
    writer.close()
    return heard.decode(errors="replace")


async def main():
    return {how: await call(**words) for how, words in calls.items()} | {"babble": await babble()}

print(json.dumps(asyncio.run(main())))
"""


@pytest.fixture(scope="module")
def jobs(cluster: KubeNamespace) -> KubeNamespace:
    """Two jobs that train, side by side in one namespace."""
    cluster.apply(*(job(name, training(STEPS), replicas=1) for name in ("one", "two")))
    for name in ("one", "two"):
        cluster.until_members(name, 1)
    return cluster


def outcomes(namespace: KubeNamespace, caller: str, called: str) -> dict[str, str]:
    """What the master of one job says to a node of another (or the same) that calls it in several ways."""
    node = f"{caller}-edljob-worker-0"
    host = f"{master(called)}.{namespace.name}.svc"
    said = namespace.kubectl("exec", node, "--", "python", "-c", CALLS, host)
    return dict(json.loads(said))


def test_a_node_reaches_its_own_master_over_tls_and_in_no_other_way(jobs: KubeNamespace) -> None:
    heard = outcomes(jobs, "one", "one")
    assert heard["properly"] == "welcome"
    assert heard["with a guess"].startswith("HandshakeRefused: "), heard
    assert "job token" in heard["with a guess"]
    assert "Hostname mismatch" in heard["by another name"]
    assert heard["plainly"].endswith("as one that expects TLS does"), heard
    assert heard["babble"] == ""


def test_a_node_of_another_job_gets_nothing(jobs: KubeNamespace) -> None:
    heard = outcomes(jobs, "two", "one")
    assert "showed a certificate that fails" in heard["properly"], "another job's certificate is none of ours"
    assert "job token" in heard["unchecked"], "and its token is of no use either"
    assert heard["plainly"].endswith("as one that expects TLS does"), heard


def test_a_training_pod_sees_the_certificate_but_not_the_key(jobs: KubeNamespace) -> None:
    node = "one-edljob-worker-0"
    files = jobs.kubectl("exec", node, "--", "ls", "/var/run/secrets", "/var/run/secrets/resile").split()
    assert {"token", "ca.crt"} <= set(files)
    assert "tls.key" not in files
    assert not [name for name in files if "serviceaccount" in name]
    found = jobs.kubectl("exec", node, "--", "grep", "-rl", "PRIVATE KEY", "/var/run/secrets", check=False)
    assert "/var/run/secrets" not in found
    assert "elasticjob-one-tls" not in json.dumps(jobs.get("pod", node)["spec"])
    mounted = [volume.get("secret", {}).get("secretName") for volume in volumes(jobs, master("one"))]
    assert "elasticjob-one-tls" in mounted


def volumes(namespace: KubeNamespace, pod: str) -> list[dict[str, Any]]:
    return list(namespace.get("pod", pod)["spec"]["volumes"])


@pytest.mark.parametrize("secret", ["elasticjob-two-token", "elasticjob-two-tls"])
def test_a_secret_deleted_under_way_comes_back_as_it_was_and_training_goes_on(jobs: KubeNamespace, secret: str) -> None:
    before, old = jobs.get("secret", secret)["data"], jobs.running("two")
    node = jobs.uid("pod", "two-edljob-worker-0")
    jobs.kubectl("delete", "secret", secret)
    jobs.kubectl("delete", "pod", master("two"), "--force", "--grace-period=0", "--wait=false")
    jobs.replaced("two", old)
    assert jobs.get("secret", secret)["data"] == before
    assert "SecretRestored" in jobs.events("two")
    jobs.running("two")
    step = int(jobs.progress("two").get("step") or 0)
    until("the next steps", lambda: int(jobs.progress("two").get("step") or 0) > step + 10)
    assert jobs.uid("pod", "two-edljob-worker-0") == node
