"""`python -m resile.master --directory DIR`: the process that serves one job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resile.api import master_exit_codes
from resile.api.defaults import TOKEN_FILE_VARIABLE
from resile.master import supervisor
from resile.wire.job_directory import DirectoryError, JobDirectory

if TYPE_CHECKING:
    from resile.master.app import Options
    from resile.platform.base import Platform

FLAGS_OF_PLATFORM = {
    "kubernetes": ("--namespace", "--job", "--kind", "--advertise"),
    "local": ("--workdir", "--enforce-memory"),
}

LOCK_SECONDS = 0.2
"""How long to try to lock the job directory. A process that only looks for a master locks it for a moment, too."""


def main() -> int:
    """Serve the job in a directory until it is over; the exit codes are in `resile.api.master_exit_codes`."""
    parser = argparse.ArgumentParser(prog="python -m resile.master", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--directory", required=True, type=Path, help="the job's directory")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: the one used before, or any)")
    parser.add_argument(
        "--platform", choices=("none", "local", "kubernetes"), default="none", help="who launches the nodes"
    )
    parser.add_argument("--namespace", help="the job's namespace (kubernetes platform; default: default)")
    parser.add_argument("--job", help="the job to serve (kubernetes platform)")
    parser.add_argument("--kind", help="the kind of the job (kubernetes platform)")
    parser.add_argument("--advertise", default="", help="HOST:PORT for pods, if not the master's Service")
    parser.add_argument("--workdir", type=Path, help="where the nodes' commands run (local platform)")
    parser.add_argument("--enforce-memory", action="store_true", help="hold nodes to their memory limits (cgroup)")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics on this loopback port")
    parser.add_argument("--tls-cert", type=Path, help="certificate to show (PEM); with --tls-key, TLS is spoken")
    parser.add_argument("--tls-key", type=Path, help="its key (PEM)")
    parser.add_argument("--tls-ca", type=Path, help="ask callers for a certificate of this CA (PEM)")
    parser.add_argument("--supervise", action="store_true", help="start the master anew whenever it dies")
    arguments = parser.parse_args()
    _check(parser, arguments)
    if arguments.supervise:
        words = [word for word in sys.argv[1:] if word != "--supervise"]
        return supervisor.supervise([sys.executable, "-m", "resile.master", *words])
    return _serve(arguments)


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    given = vars(arguments)
    for platform, flags in FLAGS_OF_PLATFORM.items():
        for flag in flags:
            if given[flag[2:].replace("-", "_")] and arguments.platform != platform:
                parser.error(f"{flag} needs --platform {platform}")
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        parser.error("--tls-cert and --tls-key need each other")
    if arguments.tls_ca is not None and arguments.tls_cert is None:
        parser.error("--tls-ca needs --tls-cert and --tls-key")
    if arguments.platform == "kubernetes":
        from resile.api.kinds import registry  # only here, since a supervisor stays small

        if not arguments.job or not arguments.kind:
            parser.error("--platform kubernetes needs --job and --kind")
        known = [kind.name for kind in registry.JOB_KINDS]
        if arguments.kind not in known:
            parser.error(f"--kind must be one of {', '.join(known)}, not {arguments.kind}")


def _serve(arguments: argparse.Namespace) -> int:
    from resile.master.app import Options, run_master
    from resile.master.journal.base import JournalDamaged, JournalError
    from resile.wire.connection import CannotListen
    from resile.wire.tls import BadTLS, server_context

    logging.basicConfig(format="[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s", level=logging.INFO)
    directory = JobDirectory(arguments.directory)
    try:
        if arguments.platform == "kubernetes":
            arguments.directory.mkdir(parents=True, exist_ok=True)
        in_use = directory.exists or arguments.platform == "kubernetes"
        lock = _lock(directory) if in_use else None
        if lock is None:
            why = "has a master already" if in_use else "is not there"
            print(f"resile master: the job in {directory.path} {why}", file=sys.stderr)
            return master_exit_codes.ALREADY_SERVED if in_use else master_exit_codes.CANNOT_SERVE
        if arguments.platform != "local":
            _allow_many_agents()
        tls = None
        if arguments.tls_cert is not None:
            tls = server_context(arguments.tls_cert, arguments.tls_key, client_ca=arguments.tls_ca)
        options = Options(host=arguments.host, port=arguments.port, tls=tls, metrics_port=arguments.metrics_port)
        if arguments.platform == "kubernetes":
            return _serve_on_kubernetes(arguments, directory, options)
        make_platform = _local(arguments, directory) if arguments.platform == "local" else None
        return asyncio.run(_until_sigterm(run_master(directory, options, make_platform)))
    except (JournalError, CannotListen, DirectoryError, BadTLS) as error:
        print(f"resile master: {error}", file=sys.stderr)
        # A disk may get room and an old port may become free again, and nodes wait for this master. In a pod the
        # directory is new every time, and the port is never a wrong choice of the user.
        full = isinstance(error, JournalError) and not isinstance(error, JournalDamaged)
        in_a_pod = arguments.platform == "kubernetes"
        taken = isinstance(error, CannotListen) and (in_a_pod or directory.address() is not None)
        return master_exit_codes.TRY_AGAIN if taken or full else master_exit_codes.CANNOT_SERVE


def _serve_on_kubernetes(arguments: argparse.Namespace, directory: JobDirectory, options: Options) -> int:
    from resile.api.kinds import registry
    from resile.master.kubernetes.app import ClusterOptions, NoJob, serve_on_kubernetes

    where = ClusterOptions(
        namespace=arguments.namespace or "default",
        job=arguments.job,
        kind=registry.job_kind(arguments.kind),
        advertise=arguments.advertise,
    )
    try:
        return asyncio.run(_until_sigterm(serve_on_kubernetes(directory, options, where)))
    except NoJob as error:
        print(f"resile master: {error}", file=sys.stderr)
        # The server may answer later, and a bad edit may be corrected. For a deleted job the operator starts no master.
        return master_exit_codes.TRY_AGAIN


def _lock(directory: JobDirectory) -> int | None:
    until = time.monotonic() + LOCK_SECONDS
    while (lock := directory.lock()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return lock


def _allow_many_agents() -> None:
    """Raise this process's limit of open files as far as allowed, so that many agents can connect.

    Not for the local platform, because its nodes would inherit the limit, and select() breaks on high descriptors.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _until_sigterm(job: Coroutine[Any, Any, bool]) -> int:
    task = asyncio.ensure_future(job)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        succeeded = await task
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return master_exit_codes.JOB_SUCCEEDED if succeeded else master_exit_codes.JOB_FAILED


def _local(arguments: argparse.Namespace, directory: JobDirectory) -> Callable[[str], Platform]:
    from resile.platform.local.platform import LocalPlatform

    def make(master_address: str) -> Platform:
        platform = LocalPlatform(
            directory.spec(),
            directory.path,
            master_address,
            secrets={TOKEN_FILE_VARIABLE: str(directory.token_file)},
            enforce_memory=arguments.enforce_memory,
            workdir=arguments.workdir,
        )
        for warning in platform.warnings:
            logging.getLogger("resile.master").warning("%s", warning)
        return platform

    return make


if __name__ == "__main__":
    sys.exit(main())
