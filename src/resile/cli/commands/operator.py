"""`resile operator`: run the operator, for the cluster of its pod or of KUBECONFIG."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import click

from resile.client.errors import CommandError

ALL = "all"


@click.command()
@click.option(
    "-n", "--namespace", default=ALL, show_default=True, metavar="NAMESPACE", help="whose jobs to run, or all"
)
@click.option(
    "--leader-elect/--no-leader-elect",
    default=True,
    show_default=True,
    help="act only while holding the Lease resile-operator, so that several operators can run side by side",
)
@click.option("--lease-namespace", metavar="NAMESPACE", help="where the Lease is (default: the operator's own)")
@click.option(
    "--master-image",
    envvar="RESILE_MASTER_IMAGE",
    default="",
    metavar="IMG",
    help="the image of masters (default: the operator's own)",
)
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    default=8081,
    show_default=True,
    metavar="PORT",
    help="for /healthz, /readyz and /metrics; 0 for none",
)
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), default=0, metavar="PORT", help="for /metrics alone, beside it"
)
@click.option("--host", default="0.0.0.0", show_default=True, metavar="HOST", help="the address of these ports")
def operator(
    namespace: str,
    leader_elect: bool,
    lease_namespace: str | None,
    master_image: str,
    health_port: int,
    metrics_port: int,
    host: str,
) -> int:
    """Give every job of a cluster its master and keep it alive.

    Runs until SIGTERM, for the cluster of its own pod, else for that of KUBECONFIG. When it loses its Lease, it ends
    with exit code 1 and must be started again.
    """
    from resile.deploy.installation import IMAGE
    from resile.kube.client import Client
    from resile.kube.config import NoCluster, from_environment
    from resile.kube.kinds import ALL_NAMESPACES
    from resile.operator.app import Options, run
    from resile.operator.intervals import FIELD_MANAGER

    logging.basicConfig(
        format="[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s", level=logging.INFO, stream=sys.stderr
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line for every request

    async def main() -> int:
        client = Client(from_environment(), FIELD_MANAGER)
        own = os.environ.get("POD_NAMESPACE") or (client.namespace if namespace == ALL else namespace)
        options = Options(
            namespace=ALL_NAMESPACES if namespace == ALL else namespace,
            image=master_image,
            fallback_image=IMAGE,
            elect=leader_elect,
            lease_namespace=lease_namespace or own,
            host=host,
            health_port=health_port or None,
            metrics_port=metrics_port or None,
        )
        try:
            return await run(client, options)
        finally:
            await client.close()

    try:
        return asyncio.run(main())
    except NoCluster as error:
        raise CommandError(f"no cluster: {error}; set KUBECONFIG") from error
    except OSError as error:
        raise CommandError(error.strerror or str(error)) from error
