"""The options that many commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from resile.api.mistakes import Mistakes
from resile.api.names import check_dns_label
from resile.cli.errors import NotUsableError

F = TypeVar("F", bound=Callable[..., Any])


def namespace_option(command: F) -> F:
    """`-n NAMESPACE`."""
    words = "where the job is (default: default, or that of the kubeconfig's context)"
    return click.option("-n", "--namespace", metavar="NAMESPACE", callback=_namespace, help=words)(command)


def _namespace(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """It becomes the name of a folder, so it must be a name and nothing else."""
    mistakes = Mistakes()
    if value is not None:
        check_dns_label(value, "-n", mistakes)
    if mistakes:
        raise NotUsableError(str(mistakes.found()[0]))
    return value


def output_option(*formats: str) -> Callable[[F], F]:
    """`-o FORMAT`; the first format is the default."""
    return click.option(
        "-o", "--output", type=click.Choice(formats), default=formats[0], show_default=True, help="how to print it"
    )


def print_json(value: Any) -> None:
    """Print data as indented JSON, dataclasses and structs included."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def tell(output: str, sentence: str, **data: Any) -> None:
    """Say what was done: a sentence for people, one JSON object for programs."""
    if output == "json":
        print_json(data)
    else:
        click.echo(sentence)
