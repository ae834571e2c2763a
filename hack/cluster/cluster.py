#!/usr/bin/env python3
"""A real Kubernetes on this machine; see `cluster.py --help` and the README beside it."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time

from build import build
from console import ClusterError, complain, say
from images import Image, import_images
from lifecycle import down, freeze, one_at_a_time, require_up, restart, status, thaw, up
from requirements import check


def main() -> int:
    """Run one command; return 0, or 1 after one sentence that says what is wrong."""
    arguments = _parser().parse_args()
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended politely, it ends what it runs
    try:
        if arguments.command == "check":
            say(check())
            return 0
        if os.geteuid() != 0:
            raise ClusterError("the cluster needs root: it makes network namespaces, mounts and cgroups")
        if arguments.command == "status":
            return 0 if status() else 1
        with one_at_a_time():
            _change(arguments)
    except ClusterError as error:
        complain(error)
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        complain(ClusterError(f"{arguments.command} was interrupted; it can be repeated"))
        return 130
    say(f"{arguments.command}: {time.monotonic() - begun:.1f} s")
    return 0


def _change(arguments: argparse.Namespace) -> None:
    match arguments.command:
        case "build":
            build(arguments.jobs, arguments.keep_work)
        case "up":
            check()
            up()
        case "down":
            down()
        case "restart":
            require_up()
            restart(arguments.names)
        case "freeze" | "thaw":
            (freeze if arguments.command == "freeze" else thaw)(arguments.node)
        case "image":
            require_up()
            command = tuple(shlex.split(arguments.run)) or ("sh",)
            import_images([Image(name, command, arguments.user) for name in arguments.names])
            say(f"on every node: {', '.join(arguments.names)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster.py", description="A real Kubernetes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether this machine can run the cluster; exit code 0 if it can")
    command = commands.add_parser("build", help="install and compile what is missing (minutes the first time)")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="packages compiled at a time")
    command.add_argument("--keep-work", action="store_true", help="keep sources and compiler cache (3 GB)")
    commands.add_parser("up", help="bring the cluster up, or repair it; builds first what is missing")
    commands.add_parser("down", help="take the cluster down and leave nothing behind")
    commands.add_parser("status", help="say what runs; exit code 0 if everything does")
    command = commands.add_parser("restart", help="kill parts of the cluster and start them again (see `status`)")
    command.add_argument("names", nargs="+", metavar="NAME")
    for name, what in (("freeze", "make a node's machine stand still, all it runs included"), ("thaw", "let it go on")):
        commands.add_parser(name, help=what).add_argument("node", metavar="NODE")
    command = commands.add_parser("image", help="give the host's files as an image of any name to all nodes")
    command.add_argument("names", nargs="+", metavar="NAME[:TAG]")
    command.add_argument("--run", default="", metavar="COMMAND", help="what it runs unless the pod says (default: sh)")
    command.add_argument("--user", default="", metavar="UID[:GID]", help="whom it runs as unless the pod says")
    return parser


if __name__ == "__main__":
    sys.exit(main())
