"""Turns the values of flags into `RunOptions`, and checks all of them before any process is launched.

The rules are those of torchrun, so that a command line keeps its meaning. Where torchrun would fail late with a
traceback, this module raises `FlagError` at once: one sentence that names the flag or variable and what is allowed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from resile.agent.options import DLROVER_ROLE, Endpoint, RunOptions, Security, Std
from resile.api.defaults import DEFAULT_RECOVERY_BUDGET
from resile.api.ids import Rank, Seconds
from resile.api.timeouts import BadTimeouts, Timeouts, derive
from resile.cli.run.devices import DEVICE_KINDS, DEVICE_OF_ACCELERATOR, count_devices, usable_cpus
from resile.cli.run.flags import FLAGS, FlagError, Given
from resile.cli.run.help import ACCEPTED
from resile.cli.run.rdzv_conf import RdzvConf, read_rdzv_conf
from resile.cli.run.script import error_in_module, error_in_script
from resile.protocol.reports import RendezvousConfig

STATIC_PORT = 29500
C10D_PORT = 29400
BACKENDS = ("c10d", "static", "dlrover-master")
LARGEST_PORT = 65535
MASTER_ADDR = "DLROVER_MASTER_ADDR"
MAX_STANDBYS = 1024
COUNTED = (*DEVICE_KINDS, "cpu", "auto")
"""The words that `--nproc-per-node` takes in place of a number."""


def resolve(given: Given, environ: Mapping[str, str], prog: str = "resile run") -> RunOptions:
    """Work out the options of an agent from its flags and environment variables.

    Counts device files, looks for errors in the script and reads the token file. Raises `FlagError` if a flag or
    variable cannot be used.
    """
    values = given.values
    command = _command(given, environ)
    nproc = _nproc(given, environ)
    min_nodes, max_nodes = _nnodes(given, environ)
    conf = read_rdzv_conf(given.named("rdzv_conf"), values["rdzv_conf"])
    config = _rendezvous_config(given, min_nodes, max_nodes, conf)
    rendezvous = _rendezvous(given, environ, config, conf)
    alone = rendezvous.endpoint is None
    job = environ.get("ELASTIC_JOB_NAME", "")
    run_id = str(uuid.uuid4()) if alone else values["rdzv_id"]
    if not alone and "rdzv_id" not in given.source and job:
        run_id = job
    job_name = values["job_name"] or job or (values["rdzv_id"] if "rdzv_id" in given.source else "")
    role = values["role"]
    if "role" not in given.source and (prog == "dlrover-run" or rendezvous.managed):
        role = DLROVER_ROLE
    return RunOptions(
        command=command,
        nproc=nproc,
        rendezvous=config,
        run_id=run_id,
        job_name=job_name or _name_of(values["training_script"]),
        role=role,
        **rendezvous._asdict(),
        local_addr=values["local_addr"],
        timeouts=_timeouts(given, environ, conf),
        signals=_signals(given),
        standbys=_standbys(given, nproc),
        preload=_preload(given),
        log_dir=values["log_dir"],
        redirects=_streams(given, "redirects", nproc),
        tee=_streams(given, "tee", nproc),
        local_ranks_filter=_ranks(given),
        log_prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        environment=_environment(given, environ, nproc),
        virtual_local_rank=values["virtual_local_rank"],
        security=_security(given, environ, may_host=rendezvous.hosts is not False),
        state_dir=values["state_dir"],
        notices=_notices(given, conf),
    )


# what to run ----------------------------------------------------------------------------------------------------------


def _command(given: Given, environ: Mapping[str, str]) -> tuple[str, ...]:
    values = given.values
    script, arguments = values["training_script"], tuple(values["training_script_args"])
    elsewhere = environ.get("PYTHON_EXEC")  # another interpreter, which may run other scripts than this one
    python = (elsewhere or sys.executable, "-u")
    if values["no_python"] and values["module"]:
        raise given.error("module", f"a module needs Python; leave out {given.named('no_python')}")
    if values["module"] and not values["run_path"]:
        if not elsewhere and (error := error_in_module(script)):
            raise FlagError(error)
        return (*python, "-m", script, *arguments)
    if values["no_python"] and not values["run_path"]:
        if shutil.which(script, path=environ.get("PATH")) is None:
            raise FlagError(f"program {script!r} does not exist or may not be executed")
        return (script, *arguments)
    if not os.path.exists(script):
        raise FlagError(f"script {script!r} does not exist")
    if not elsewhere and (error := error_in_script(script)):
        raise FlagError(error)
    return (*python, script, *arguments)


def _name_of(script: str) -> str:
    stem = os.path.basename(os.path.normpath(script)).removesuffix(".py")
    return re.sub(r"[^A-Za-z0-9.-]+", "-", stem).strip("-.") or "job"


# how many -------------------------------------------------------------------------------------------------------------


def _nnodes(given: Given, environ: Mapping[str, str]) -> tuple[int, int]:
    name, text = given.named("nnodes"), given.values["nnodes"]
    if given.values["auto_config"] and "nnodes" not in given.source:
        name = "NODE_NUM" if "NODE_NUM" in environ else "WORKER_NUM"
        text = environ.get(name, "1")
    found = re.fullmatch(r"\s*(\d+)\s*(?::\s*(\d+)\s*)?", text)
    if not found:
        raise FlagError(f"{name}: {text!r} is neither a number of nodes nor MIN:MAX, such as 2 or 2:4")
    fewest, most = int(found[1]), int(found[2] or found[1])
    if fewest < 1:
        raise FlagError(f"{name}: {text!r} asks for no nodes; the least is 1")
    if most < fewest:
        raise FlagError(f"{name}: {text!r} has a maximum below its minimum; did you mean {most}:{fewest}?")
    return fewest, most


def _nproc(given: Given, environ: Mapping[str, str]) -> int:
    name, word = given.named("nproc_per_node"), given.values["nproc_per_node"].strip()
    if given.values["auto_config"] and "nproc_per_node" not in given.source:
        return max(1, count_devices(DEVICE_OF_ACCELERATOR[given.values["accelerator"]], environ))
    if word == "cpu":
        return usable_cpus()
    if word == "auto":
        return next((n for kind in DEVICE_KINDS if (n := count_devices(kind, environ))), 0) or usable_cpus()
    if word in DEVICE_KINDS:
        count = count_devices(word, environ)
        if not count:
            raise FlagError(f"{name}: {word!r}, but this machine shows no {word}; give a number, cpu or auto")
        return count
    if not re.fullmatch(r"[+-]?\d+", word):
        raise FlagError(f"{name}: {word!r} is neither a number of processes nor one of {', '.join(COUNTED)}")
    if int(word) < 1:
        raise FlagError(f"{name}: {word} processes cannot train; the least is 1")
    return int(word)


# rendezvous -----------------------------------------------------------------------------------------------------------


class _Rendezvous(NamedTuple):
    endpoint: Endpoint | None = None
    managed: bool = False
    hosts: bool | None = None
    node_rank: Rank | None = None


def _rendezvous_config(given: Given, min_nodes: int, max_nodes: int, conf: RdzvConf) -> RendezvousConfig:
    unit, restarts = given.values["node_unit"], given.values["max_restarts"]
    if unit < 1:
        raise given.error("node_unit", f"{unit} is not a number of nodes; the least is 1")
    if max_nodes // unit * unit < min_nodes:
        problem = f"no multiple of {unit} lies within --nnodes {min_nodes}:{max_nodes}, so no node could ever start"
        raise given.error("node_unit", problem)
    if restarts < 0:
        raise given.error("max_restarts", f"{restarts} is negative; 0 means no restart")
    return RendezvousConfig(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_unit=unit,
        max_restarts=restarts,
        join_timeout=conf.join_timeout,
        last_call=conf.last_call_timeout,
        pend_timeout=conf.pend_timeout,
    )


def _rendezvous(given: Given, environ: Mapping[str, str], config: RendezvousConfig, conf: RdzvConf) -> _Rendezvous:
    values = given.values
    backend, text = values["rdzv_backend"].strip(), values["rdzv_endpoint"].strip()
    if environ.get(MASTER_ADDR):
        return _Rendezvous(endpoint_of(MASTER_ADDR, environ[MASTER_ADDR]), managed=True, hosts=False)
    if backend not in BACKENDS:
        why = "machines meet at resile's own master, which needs no other service"
        raise given.error("rdzv_backend", f"{backend!r} is not one of {', '.join(BACKENDS)}; {why}")
    if values["standalone"]:
        if config.min_nodes > 1:
            other = f"{given.named('nnodes')} asks for {config.min_nodes} or more"
            raise given.error("standalone", f"means this machine alone, but {other}")
        return _Rendezvous()
    if backend == "static":
        if not text and values["master_port"] is None and config.max_nodes == 1:
            return _Rendezvous()
        if text and "rdzv_backend" not in given.source and "node_rank" not in given.source:
            return _dynamic_rendezvous(given, text, None, config, conf)  # the master gives out ranks
        rank = values["node_rank"]
        if not 0 <= rank < config.max_nodes:
            most = config.max_nodes
            raise given.error("node_rank", f"{rank} is not a place among {most}; allowed are 0 to {most - 1}")
        endpoint = endpoint_of(given.named("rdzv_endpoint"), text) if text else _master_endpoint(given)
        if not endpoint.port:
            raise given.error("rdzv_endpoint", f"{text!r}: port 0 is any free port; fixed places need a fixed one")
        return _Rendezvous(endpoint, hosts=rank == 0 if conf.is_host is None else conf.is_host, node_rank=rank)
    return _dynamic_rendezvous(given, text or "localhost", C10D_PORT, config, conf)


def _dynamic_rendezvous(
    given: Given, text: str, default_port: int | None, config: RendezvousConfig, conf: RdzvConf
) -> _Rendezvous:
    name = given.named("rdzv_endpoint")
    endpoint = endpoint_of(name, text, default_port)
    if endpoint.port:
        return _Rendezvous(endpoint, hosts=conf.is_host)
    if config.max_nodes > 1:
        raise FlagError(f"{name}: {text!r}: port 0 is any free port; several nodes need to know which")
    return _Rendezvous()


def _master_endpoint(given: Given) -> Endpoint:
    port = given.values["master_port"]
    port = STATIC_PORT if port is None else port
    if not 1 <= port <= LARGEST_PORT:
        raise given.error("master_port", f"{port} is not a port; allowed are 1 to {LARGEST_PORT}")
    host = given.values["master_addr"].strip()
    return endpoint_of(given.named("master_addr"), f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}")


def endpoint_of(name: str, text: str, default_port: int | None = None) -> Endpoint:
    """Split `text`, the HOST:PORT that was given to the flag `name`. Raises `FlagError` if it has another form.

    An IPv6 address is in brackets. Port 0 means any free port. If the text has no port, `default_port` is used. If
    `default_port` is None, a missing port is an error.
    """
    text = text.strip()
    host, colon, port = (text, "", "") if text.endswith("]") else text.rpartition(":")
    host = (host if colon else text).removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[\w.:%-]+", host):
        raise FlagError(f"{name}: {text!r} is not HOST:PORT; a host is a name, an IPv4 address or [an IPv6 address]")
    if not colon:
        if default_port is None:
            raise FlagError(f"{name}: {text!r} has no port; write HOST:PORT, such as {text}:{STATIC_PORT}")
        return Endpoint(host, default_port)
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > LARGEST_PORT:
        raise FlagError(f"{name}: {text!r} has no good port: {port!r} is not a number from 0 to {LARGEST_PORT}")
    return Endpoint(host, int(port))


# recovering -----------------------------------------------------------------------------------------------------------


def _timeouts(given: Given, environ: Mapping[str, str], conf: RdzvConf) -> Timeouts:
    budget, grace = given.values["recovery_budget"], given.values["shutdown_timeout"]
    named = given.named("shutdown_timeout")
    if grace is None and (text := environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")):
        named = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        if not text.strip().isdigit():
            raise FlagError(f"{named}: {text!r} is not a whole number of seconds")
        grace = int(text)
    if grace is not None and grace < 0:
        raise FlagError(f"{named}: {grace} is negative; 0 kills at once")
    at_once = 0.001
    try:
        return derive(
            DEFAULT_RECOVERY_BUDGET if budget is None else Seconds(budget),
            join=conf.join_timeout,
            last_call=conf.last_call_timeout,
            pend=conf.pend_timeout,
            exit_grace=None if grace is None else max(float(grace), at_once),
        )
    except BadTimeouts as error:
        raise FlagError(str(error).replace("recovery_budget", given.named("recovery_budget"), 1)) from None


def _standbys(given: Given, nproc: int) -> int:
    number = given.values["standbys"]
    if number is None:
        return nproc
    if not 0 <= number <= MAX_STANDBYS:
        raise given.error("standbys", f"{number} is not a number of standbys; allowed are 0 to {MAX_STANDBYS}")
    return int(number)


def _preload(given: Given) -> tuple[str, ...]:
    names = [name.strip() for name in given.values["preload"] if name.strip()]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise given.error("preload", f"{name!r} is not the name of a module, such as transformers")
    return tuple(dict.fromkeys(names))


def _signals(given: Given) -> tuple[int, ...]:
    numbers: list[int] = []
    name = given.named("signals_to_handle")
    for word in given.values["signals_to_handle"].split(","):
        known = getattr(signal, word.strip(), None)
        if not isinstance(known, signal.Signals):
            raise FlagError(f"{name}: {word.strip()!r} is not the name of a signal, such as SIGTERM or SIGUSR1")
        if known in (signal.SIGKILL, signal.SIGSTOP):
            raise FlagError(f"{name}: {known.name} cannot be handled by any process")
        numbers.append(int(known))
    return tuple(dict.fromkeys(numbers))


# logs -----------------------------------------------------------------------------------------------------------------


def _streams(given: Given, dest: str, nproc: int) -> dict[int, Std]:
    text = given.values[dest]
    if re.fullmatch("[0-3]", text):
        return dict.fromkeys(range(nproc), Std(int(text)))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        alone = "0 (none), 1 (stdout), 2 (stderr), 3 (both)"
        raise given.error(dest, f"{text!r} is neither {alone} nor such a number for each local rank, as in 0:3,1:2")
    chosen = {int(rank): Std(int(std)) for rank, std in (pair.split(":") for pair in text.split(","))}
    return {rank: chosen.get(rank, Std.NONE) for rank in range(nproc)}


def _ranks(given: Given) -> frozenset[int] | None:
    text = given.values["local_ranks_filter"]
    if not text:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise given.error("local_ranks_filter", f"{text!r} is not a list of local ranks, such as 0,1")
    return frozenset(int(rank) for rank in text.split(","))


def _environment(given: Given, environ: Mapping[str, str], nproc: int) -> dict[str, str]:
    extra = {"TORCHELASTIC_SIGNALS_TO_HANDLE": given.values["signals_to_handle"]}
    if nproc > 1 and "OMP_NUM_THREADS" not in environ:
        extra["OMP_NUM_THREADS"] = "1"  # by default, each process would start a thread per CPU
    return extra


# security -------------------------------------------------------------------------------------------------------------


def _security(given: Given, environ: Mapping[str, str], *, may_host: bool) -> Security:
    files = {dest: given.values[dest] or "" for dest in ("token_file", "tls_cert", "tls_key", "tls_ca")}
    for dest, path in files.items():
        if path and not os.access(path, os.R_OK):
            raise FlagError(f"{given.named(dest)}: {path!r} does not exist or cannot be read")
    _check_tls(given, may_host)
    token = environ.get("RESILE_TOKEN", "")
    if files["token_file"]:
        try:
            with open(files["token_file"], encoding="utf-8") as file:
                token = file.read(4096).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise given.error("token_file", f"{files['token_file']!r} cannot be read: {error}") from None
        if not token:
            raise given.error("token_file", f"{files['token_file']!r} is empty")
    return Security(token=token, tls_name=given.values["tls_name"] or "", **files)


def _check_tls(given: Given, may_host: bool) -> None:
    """Raise `FlagError` if a flag for TLS is given without the other flags that it needs.

    `--tls-cert`, `--tls-key` and `--tls-ca` need each other. `may_host` is True if this node may run the master. If it
    is False, `--tls-ca` alone is enough, because the master may ask agents for the token only.
    """
    if given.values["tls_name"] and not given.values["tls_ca"]:
        raise given.error("tls_name", "a name is checked in signed certificates; add --tls-ca")
    flags = ("tls_cert", "tls_key", "tls_ca")
    present = [given.named(dest) for dest in flags if given.values[dest]]
    missing = [given.named(dest) for dest in flags if not given.values[dest]]
    if not present or not missing:
        return
    if not may_host and given.values["tls_ca"] and len(present) == 1:
        return  # its master may ask for the token only
    needs = "this node may run the master, which needs all three" if may_host else "TLS needs the others"
    raise FlagError(f"{', '.join(present)}: {needs}; add {' and '.join(missing)}")


def _notices(given: Given, conf: RdzvConf) -> tuple[str, ...]:
    lines = [
        f"{given.source[flag.dest]}: accepted; {ACCEPTED[flag.name]}"
        for flag in FLAGS
        if flag.name in ACCEPTED and flag.dest in given.source and given.values[flag.dest] not in (flag.default, [])
    ]
    return (*lines, *conf.notices)
