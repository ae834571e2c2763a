"""`resile manifests`: print or write the manifests that a cluster needs to run jobs."""

from __future__ import annotations

import re
from pathlib import Path

import click

from resile.cli.common_options import check_namespace
from resile.client.errors import CommandError, NotUsableError
from resile.deploy import installation, kustomize

_IMAGE = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9._:/@]{0,511}", re.ASCII)


@click.command()
@click.option("--image", default=installation.IMAGE, show_default=True, metavar="IMG", help="what the operator runs")
@click.option(
    "-n", "--namespace", default=installation.NAMESPACE, show_default=True, metavar="NS", help="where it runs"
)
@click.option("--crd-only", is_flag=True, help="only the CustomResourceDefinitions")
@click.option("--cel", is_flag=True, help="with rules in CEL, for Kubernetes 1.25 and later")
@click.option(
    "--kustomize",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="write everything as a kustomize tree into DIR instead",
)
def manifests(image: str, namespace: str, crd_only: bool, cel: bool, folder: Path | None) -> None:
    """Print everything a cluster needs: `resile manifests --image IMG | kubectl apply -f -`.

    It prints the definitions of all kinds of resources, the operator with its rights, and the namespaces.
    """
    if not _IMAGE.fullmatch(image):
        raise NotUsableError(f"--image: must be the name of an image such as {installation.IMAGE}, not {image[:60]!r}")
    check_namespace("--namespace", namespace)
    if folder is not None:
        if (image, namespace, crd_only, cel) != (installation.IMAGE, installation.NAMESPACE, False, False):
            raise NotUsableError("--kustomize: give it alone; kustomize itself sets images and namespaces")
        try:
            kustomize.write(folder)
        except OSError as error:
            raise CommandError(f"{folder}: cannot be written: {error.strerror}") from error
        return
    objects = installation.definitions(cel=cel) if crd_only else installation.everything(image, namespace, cel=cel)
    click.echo(kustomize.to_yaml(objects), nl=False)
