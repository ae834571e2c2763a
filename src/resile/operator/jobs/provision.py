"""Makes the objects that a master needs besides its pod, if they do not exist.

A token, a key or a journal of an earlier job of the same name is never used for this job. A Secret that is deleted
while the job runs is made again with the same content if this operator has seen it. Otherwise it gets new content, and
the master must be started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec

from resile.api.job import JobSpec
from resile.kube.client import Client
from resile.kube.kinds import CONFIG_MAPS, ROLE_BINDINGS, SECRETS, Kind, Object
from resile.kube.owner_references import is_controlled, is_owned_by
from resile.operator.jobs import master_objects
from resile.operator.jobs.master_pod import SECRETS_ANNOTATION
from resile.operator.workqueue import TryAgain

Secrets = Mapping[str, Object]


class Provisioned(msgspec.Struct, frozen=True):
    secrets: Secrets
    restored: tuple[str, ...] = ()
    """The names of Secrets that were gone and were made again with the same content."""
    replaced: tuple[str, ...] = ()
    """The names of Secrets that were made with new content; a running master or nodes may have older content."""


async def provision(client: Client, job: JobSpec, known: Secrets) -> Provisioned:
    """Make or correct all objects that the job's master needs. A missing Secret gets its old content if `known` has it.

    Raises `TryAgain` while an object of an earlier job of this name exists. Raises `KubeError` if a request fails.
    """
    provisioned, *_ = await together(
        _secrets(client, job, known),
        *(client.apply(kind, item) for kind, item in master_objects.applied(job)),
        _make_once(client, CONFIG_MAPS, master_objects.journal(job), job),
    )
    await client.apply(ROLE_BINDINGS, master_objects.binding(job))
    assert isinstance(provisioned, Provisioned)
    return provisioned


def outdated(pod: Object, provisioned: Provisioned) -> tuple[str, ...]:
    """The names of the Secrets whose content has changed since the master's `pod` was made.

    If an older operator made the pod, the pod does not name its Secrets. Then `provisioned.replaced` is returned.
    """
    noted = (pod["metadata"].get("annotations") or {}).get(SECRETS_ANNOTATION)
    if not noted:
        return provisioned.replaced
    held = noted.split(",")
    return tuple(name for name, secret in provisioned.secrets.items() if master_objects.identity(secret) not in held)


async def together(*requests: Awaitable[Any]) -> list[Any]:
    """Run all requests at once, wait until all have ended, and return their answers or raise the first error."""
    outcomes = await asyncio.gather(*requests, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


async def _secrets(client: Client, job: JobSpec, known: Secrets) -> Provisioned:
    pair, pair_made = await _secret(client, master_objects.key_pair(job), job, known)
    given, given_made = await _secret(client, master_objects.credentials(job, pair), job, known)
    trusted = master_objects.trusted(given)
    if trusted != master_objects.certificate(pair):
        given = await client.apply(SECRETS, master_objects.trusting(given, pair))
    secrets = {item["metadata"]["name"]: item for item in (pair, given)}
    # A job that began before there were certificates is not disturbed by a new one: its next master uses it.
    fresh = ((pair, pair_made and bool(trusted)), (given, given_made))
    made = [item["metadata"]["name"] for item, new in fresh if new]
    return Provisioned(
        secrets,
        restored=tuple(name for name in made if name in known),
        replaced=tuple(name for name in made if name not in known),
    )


async def _secret(client: Client, new: Object, job: JobSpec, known: Secrets) -> tuple[Object, bool]:
    before = known.get(new["metadata"]["name"])
    return await _make_once(client, SECRETS, master_objects.again(new, before) if before else new, job)


async def _make_once(client: Client, kind: Kind, item: Object, job: JobSpec) -> tuple[Object, bool]:
    namespace, name = job.namespace, item["metadata"]["name"]
    made = await client.create(kind, item)
    if made is not None:
        return made, True
    there = await client.get(kind, namespace, name)
    if there is None or (is_controlled(there) and not is_owned_by(there, job.uid)):
        raise TryAgain(f"{kind.name} {name} of an earlier job of this name is still there")
    return there, False
