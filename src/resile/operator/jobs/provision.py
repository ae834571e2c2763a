"""Makes what a master needs around it, or sees that it is there.

A token, a key or a journal of an earlier job of the same name never becomes that of this one. A Secret that somebody
deletes under way comes back as it was, as long as this operator has seen it; else with new content, which the master
must then be started with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec

from resile.api.kinds.elasticjob import ElasticJob
from resile.operator.cluster import CONFIG_MAP, ROLE_BINDING, SECRET, Cluster, Kind, Object
from resile.operator.jobs import master_objects
from resile.operator.jobs.master_pod import SECRETS_ANNOTATION
from resile.operator.workqueue import TryAgain

Secrets = Mapping[str, Object]
"""A job's Secrets by name."""


class Provisioned(msgspec.Struct, frozen=True):
    """What was found and done."""

    secrets: Secrets
    restored: tuple[str, ...] = ()
    """Secrets that were gone and are there again as they were."""
    replaced: tuple[str, ...] = ()
    """Secrets with new content, where a master or nodes may hold an older one. Said once: see `outdated`."""


async def prepare(cluster: Cluster, job: ElasticJob, known: Secrets) -> Provisioned:
    """Make everything at once; only a binding needs its Role to be there.

    Args:
        cluster: where.
        job: for whom.
        known: its Secrets as they were seen last.

    Raises:
        TryAgain: something of an earlier job of this name is still there.
        ClusterError: the API server does not answer, or not as hoped.
    """
    prepared, *_ = await together(
        _secrets(cluster, job, known),
        *(cluster.apply(kind, item) for kind, item in master_objects.applied(job)),
        _make_once(cluster, CONFIG_MAP, master_objects.journal(job), job),
    )
    await cluster.apply(ROLE_BINDING, master_objects.binding(job))
    assert isinstance(prepared, Provisioned)
    return prepared


def outdated(pod: Object, prepared: Provisioned) -> tuple[str, ...]:
    """The Secrets whose content is another than when a master's pod was made, whenever and by whom they were changed.

    A pod that an older operator made does not say what it was made with: only what is new now counts.
    """
    noted = (pod["metadata"].get("annotations") or {}).get(SECRETS_ANNOTATION)
    if not noted:
        return prepared.replaced
    held = noted.split(",")
    return tuple(name for name, secret in prepared.secrets.items() if master_objects.identity(secret) not in held)


async def together(*requests: Awaitable[Any]) -> list[Any]:
    """All of them, each to its end; then the first error, if there was one."""
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


async def _secrets(cluster: Cluster, job: ElasticJob, known: Secrets) -> Provisioned:
    """The master's key pair, and the credentials of the nodes, which hold its certificate."""
    pair, pair_made = await _secret(cluster, master_objects.key_pair(job), job, known)
    given, given_made = await _secret(cluster, master_objects.credentials(job, pair), job, known)
    trusted = master_objects.trusted(given)
    if trusted != master_objects.certificate(pair):
        given = await cluster.apply(SECRET, master_objects.trusting(given, pair))
    secrets = {item["metadata"]["name"]: item for item in (pair, given)}
    # A job that began before there were certificates loses nothing by getting one: its next master uses it.
    fresh = ((pair, pair_made and bool(trusted)), (given, given_made))
    made = [item["metadata"]["name"] for item, new in fresh if new]
    return Provisioned(
        secrets,
        restored=tuple(name for name in made if name in known),
        replaced=tuple(name for name in made if name not in known),
    )


async def _secret(cluster: Cluster, new: Object, job: ElasticJob, known: Secrets) -> tuple[Object, bool]:
    before = known.get(new["metadata"]["name"])
    return await _make_once(cluster, SECRET, master_objects.again(new, before) if before else new, job)


async def _make_once(cluster: Cluster, kind: Kind, item: Object, job: ElasticJob) -> tuple[Object, bool]:
    """The object of this name, made unless it is there, and whether it was made."""
    namespace, name = job.metadata.namespace, item["metadata"]["name"]
    made = await cluster.create(kind, item)
    if made is not None:
        return made, True
    there = await cluster.get(kind, namespace, name)
    if there is None or (master_objects.controlled(there) and not master_objects.owned_by(there, job.metadata.uid)):
        raise TryAgain(f"{kind.__name__} {name} of an earlier job of this name is still there")
    return there, False
