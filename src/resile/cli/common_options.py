"""Options and output functions that many commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from resile.api.manifests.errors import ManifestErrors
from resile.api.manifests.name_rules import check_dns_label
from resile.client.base import Jobs
from resile.client.errors import NotUsableError
from resile.client.target import Target

F = TypeVar("F", bound=Callable[..., Any])


def namespace_option(command: F) -> F:
    words = "where the job is (default: default, or that of the kubeconfig's context)"

    def checked(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        return value if value is None else check_namespace("-n", value)

    return click.option("-n", "--namespace", metavar="NAMESPACE", callback=checked, help=words)(command)


def check_namespace(flag: str, value: str) -> str:
    """Return the value of a flag. Raises `NotUsableError`, which names the flag, if the value is not a DNS label."""
    errors = ManifestErrors()
    check_dns_label(value, flag, errors)
    for error in errors.found():
        raise NotUsableError(str(error))
    return value


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-n`, `--local`, `--cluster`, `--kubeconfig` and `--context` to a command. It gets them as `target`."""

    @functools.wraps(command)
    def with_target(
        *words: Any, namespace: str | None, local: bool, cluster: bool, kubeconfig: str, context: str, **more: Any
    ) -> Any:
        target = Target(namespace=namespace, local=local, cluster=cluster, kubeconfig=kubeconfig, context=context)
        if target.local and target.names_cluster:
            raise NotUsableError("--local means this machine, and --cluster, --kubeconfig and --context a cluster")
        return command(*words, target=target, **more)

    for option in (
        click.option("--context", default="", metavar="NAME", help="of the kubeconfig file; means a cluster"),
        click.option("--kubeconfig", default="", metavar="FILE", help="which cluster (default: KUBECONFIG's)"),
        click.option("--cluster", is_flag=True, help="the cluster's, also where this machine has jobs"),
        click.option("--local", is_flag=True, help="this machine's jobs and no others"),
        namespace_option,
    ):
        with_target = option(with_target)
    return with_target


def jobs_of(target: Target, name: str = "", *, everywhere: bool = False) -> Jobs:
    """Return the jobs of this machine or those of a cluster, whichever the command means.

    `name` is the job or pod that the command names; it is empty for a listing. `everywhere` is True for a listing of
    all namespaces.
    """
    return target.jobs(say, local=target.is_local(name, everywhere=everywhere))


def say(sentence: str) -> None:
    """Print a message to standard error, since a program may read standard output."""
    click.echo(sentence, err=True)


def output_option(*formats: str) -> Callable[[F], F]:
    """Add `-o FORMAT` to a command; the first format is the default."""
    return click.option(
        "-o", "--output", type=click.Choice(formats), default=formats[0], show_default=True, help="how to print it"
    )


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def tell(output: str, sentence: str, **data: Any) -> None:
    """Print the result of a command: `sentence`, or `data` as JSON if `output` is `json`."""
    if output == "json":
        print_json(data)
    else:
        click.echo(sentence)
