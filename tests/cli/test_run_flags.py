"""`resile run` reads what torchrun and dlrover-run read, and says in one sentence what is wrong."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from resile import __version__
from resile.agent.options import Endpoint, RunOptions, Std
from resile.cli.run import main
from resile.cli.run.devices import count_devices, usable_cpus
from resile.cli.run.flags import FLAGS, FlagError, build_parser, parse
from resile.cli.run.help import ACCEPTED, GROUPS

SAMPLES = {
    "nnodes": "2:5",
    "nproc_per_node": "cpu",
    "start_method": "fork",
    "numa_binding": "socket",
    "monitor_interval": "2.5",
    "duplicate_stdout_filters": "apple,orange,,juice",
    "duplicate_stderr_filters": "pear",
}
DLROVER = {
    "--precheck": "1",
    "--node_unit": "2",
    "--auto_config": None,
    "--auto_tunning": None,
    "--exclude-straggler": None,
    "--save_at_breakpoint": None,
    "--accelerator": "ascend-npu",
    "--training_port": "61000",
    "--numa-affinity": None,
    "--membind-policy": "bind",
    "--network-check": None,
    "--comm-perf-test": None,
    "--ucp_device_type": "gpu",
}
"""dlrover-run's own flags and a value for each; None for a switch."""

TORCH_ACTIONS = [action for action in get_args_parser()._actions if action.option_strings and action.dest != "help"]
TORCH_SPELLINGS = [(action, spelling) for action in TORCH_ACTIONS for spelling in action.option_strings]


def sample(action: Any) -> list[str]:
    """Words that give this flag a value other than its default."""
    if action.nargs == 0:
        return []
    return [SAMPLES.get(action.dest, "7" if action.type is int else "something")]


def of_torch(words: list[str]) -> dict[str, Any]:
    return vars(get_args_parser().parse_args(words))


def of_ours(words: list[str], environ: dict[str, str] | None = None) -> dict[str, Any]:
    return parse(words, environ or {}).values


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "RESILE_", "DLROVER_")):
            monkeypatch.delenv(name)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunOptions]:
    """Resolves a command line for a script that exists; the environment is empty but for what is given."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def resolved(words: str = "", script: str = "train.py", prog: str = "resile run", **environ: str) -> RunOptions:
        return main.options([*words.split(), *script.split()], environ, prog)

    return resolved


# the same as torchrun -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "spelling"), TORCH_SPELLINGS, ids=[spelling for _, spelling in TORCH_SPELLINGS])
def test_every_spelling_of_every_torchrun_flag_gives_torchruns_value(action: Any, spelling: str) -> None:
    words = [spelling, *sample(action), "train.py", "--lr", "1"]
    theirs, ours = of_torch(words), of_ours(words)
    assert ours[action.dest] == theirs[action.dest]
    assert type(ours[action.dest]) is type(theirs[action.dest])
    assert ours[action.dest] != action.default
    assert {name: ours[name] for name in theirs} == theirs


def test_every_default_is_torchruns() -> None:
    theirs = of_torch(["train.py"])
    assert {name: of_ours(["train.py"])[name] for name in theirs} == theirs


@pytest.mark.parametrize("action", TORCH_ACTIONS, ids=[action.dest for action in TORCH_ACTIONS])
def test_every_pet_variable_stands_in_for_its_flag_and_gives_way_to_it(
    action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "1" if action.nargs == 0 else sample(action)[0]
    variable = f"PET_{action.dest.upper()}"
    monkeypatch.setenv(variable, text)
    theirs = of_torch(["train.py"])[action.dest]
    assert of_ours(["train.py"], {variable: text})[action.dest] == theirs
    monkeypatch.setenv(variable, "0")
    flag = [action.option_strings[-1], *sample(action)]
    assert of_ours([*flag, "train.py"], {variable: "0"})[action.dest] == of_torch([*flag, "train.py"])[action.dest]


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes=2", "train.py", "--nnodes", "9", "-m", "--unknown"],
        ["-m", "my.module", "--", "-r", "3"],
        ["-r3", "-t", "0:1,1:2", "train.py"],
        ["--stand", "train.py"],
        ["--max-r", "3", "--node-r=1", "train.py"],
        ["--node_r", "1", "--numa-b", "node", "train.py"],
        ["--no-p", "prog", "arg"],
        ["train.py", "--"],
    ],
)
def test_words_after_the_script_and_abbreviations_are_read_as_torchrun_does(words: list[str]) -> None:
    theirs = of_torch(words)
    assert {name: of_ours(words)[name] for name in theirs} == theirs


def test_every_abbreviation_that_torchrun_understands_means_the_same_here() -> None:
    parser = get_args_parser()
    understood = 0
    for action, spelling in TORCH_SPELLINGS:
        for end in range(3, len(spelling)):
            short = spelling[:end]
            if not spelling.startswith("--") or short in parser._option_string_actions:
                continue
            if len(parser._get_option_tuples(short)) == 1:
                understood += 1
                words = [short, *sample(action), "train.py"]
                assert of_ours(words)[action.dest] == of_torch(words)[action.dest], short
    assert understood > 100


# dlrover-run's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DLROVER)
def test_dlrovers_flags_are_known_in_both_spellings_and_as_variables(name: str) -> None:
    dest = name.strip("-").replace("-", "_")
    words = [] if DLROVER[name] is None else [DLROVER[name]]
    dashed, underscored = "--" + dest.replace("_", "-"), "--" + dest
    values = [of_ours([spelling, *words, "train.py"])[dest] for spelling in (dashed, underscored)]
    values.append(of_ours(["train.py"], {f"PET_{dest.upper()}": DLROVER[name] or "1"})[dest])
    assert str(values[0]) == (DLROVER[name] or "True")
    assert values == [values[0]] * 3
    assert values[0] != of_ours(["train.py"])[dest]


def test_each_flag_whose_feature_is_missing_is_accepted_with_one_line(options: Callable[..., RunOptions]) -> None:
    assert options("--network-check").notices == (
        "--network-check: accepted; the node check is not in this version yet and is skipped",
    )
    seen = options("--network_check --exclude-straggler --auto_tunning --save_at_breakpoint --comm-perf-test").notices
    assert [line.split(":")[0] for line in seen] == [
        "--network-check",
        "--comm-perf-test",
        "--exclude-straggler",
        "--auto-tunning",
        "--save-at-breakpoint",
    ]
    assert options("", PET_NUMA_AFFINITY="1").notices[0].startswith("PET_NUMA_AFFINITY: accepted; ")
    assert options("--precheck 0 --monitor-interval 0.1").notices == ()
    assert len(options("--duplicate-stdout-filters a,b --monitor-interval 5 --numa-binding node").notices) == 3


def test_every_flag_accepted_without_effect_has_its_line_and_stands_in_that_group() -> None:
    assert {flag.name for flag in FLAGS if flag.group == "compat"} == set(ACCEPTED)
    assert all("\n" not in line for line in ACCEPTED.values())


def test_auto_config_takes_nodes_from_the_platform_and_processes_from_the_gpus(
    options: Callable[..., RunOptions],
) -> None:
    found = options("--auto_config", NODE_NUM="4", CUDA_VISIBLE_DEVICES="0,1,2")
    assert (found.rendezvous.min_nodes, found.rendezvous.max_nodes, found.nproc) == (4, 4, 3)
    assert options("--auto-config", WORKER_NUM="2", CUDA_VISIBLE_DEVICES="").nproc == 1
    assert options("--auto-config --nnodes 1:3", NODE_NUM="2").rendezvous.max_nodes == 3


# what it comes to -----------------------------------------------------------------------------------------------------


def test_the_command_is_python_unbuffered_a_module_or_any_program(options: Callable[..., RunOptions]) -> None:
    assert options("", "train.py --lr 0.1").command == (sys.executable, "-u", "train.py", "--lr", "0.1")
    assert options("", "train.py", PYTHON_EXEC="/opt/py").command == ("/opt/py", "-u", "train.py")
    assert options("-m", "email.mime -x").command == (sys.executable, "-u", "-m", "email.mime", "-x")
    assert options("--no-python", "/bin/sh -c true").command == ("/bin/sh", "-c", "true")
    assert options("--run-path --no-python", "train.py").command == (sys.executable, "-u", "train.py")
    assert options("", "train.py ${local_rank}").command_of(3)[-1] == "3"


def test_counts_are_numbers(options: Callable[..., RunOptions]) -> None:
    assert options("--nproc-per-node 3").nproc == 3
    assert options("--nproc-per-node gpu", CUDA_VISIBLE_DEVICES="0,1").nproc == 2
    assert options("--nproc-per-node auto", CUDA_VISIBLE_DEVICES="GPU-8f,GPU-9e,-1,3").nproc == 2
    assert options("--nproc-per-node auto", CUDA_VISIBLE_DEVICES="").nproc == usable_cpus()
    assert options("--nproc-per-node cpu").nproc == usable_cpus()
    rendezvous = options("--nnodes 2:8 --node_unit 2 --max-restarts 3 --rdzv-endpoint h:1").rendezvous
    assert (rendezvous.min_nodes, rendezvous.max_nodes, rendezvous.node_unit, rendezvous.max_restarts) == (2, 8, 2, 3)


def test_gpus_are_counted_by_device_files_when_nothing_narrows_the_choice(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "davinci0", "davinci_manager", "null"):
        (tmp_path / name).touch()
    assert count_devices("gpu", {}, str(tmp_path)) == 3
    assert count_devices("npu", {}, str(tmp_path)) == 1
    assert count_devices("gpu", {}, str(tmp_path / "nowhere")) == 0


def test_one_machine_is_a_job_of_its_own_with_a_new_id_each_time(options: Callable[..., RunOptions]) -> None:
    for words in ("", "--standalone --rdzv-id x", "--rdzv-backend c10d --rdzv-endpoint localhost:0"):
        first, second = options(words), options(words)
        assert first.endpoint is None
        assert first.run_id != second.run_id
        assert first.job_name in ("train", "x")


def test_machines_meet_where_torchrun_would_meet(options: Callable[..., RunOptions]) -> None:
    c10d = options("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0 --rdzv-id j1")
    assert (c10d.endpoint, c10d.hosts, c10d.node_rank, c10d.run_id) == (Endpoint("node0", 29400), None, None, "j1")
    assert options("--nnodes 2 --rdzv-backend c10d").endpoint == Endpoint("localhost", 29400)
    static = options("--nnodes 2 --master-addr 10.0.0.1 --node-rank 1")
    assert (static.endpoint, static.hosts, static.node_rank) == (Endpoint("10.0.0.1", 29500), False, 1)
    assert options("--nnodes 2 --master-addr [::1] --master-port 7").endpoint == Endpoint("::1", 7)
    assert options("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint [fe80::1]:9").endpoint == Endpoint("fe80::1", 9)
    assert options("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint [fe80::1]").endpoint == Endpoint("fe80::1", 29400)
    assert str(Endpoint("fe80::1", 9)) == "[fe80::1]:9"
    assert options("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:9 --rdzv-conf is_host=true").hosts is True


def test_an_endpoint_alone_is_enough_to_meet(options: Callable[..., RunOptions]) -> None:
    found = options("--nnodes 2:4 --rdzv-endpoint node0:29400")
    assert (found.endpoint, found.hosts, found.node_rank) == (Endpoint("node0", 29400), None, None)


def test_a_managed_node_meets_at_the_master_it_was_given(options: Callable[..., RunOptions]) -> None:
    found = options("--nnodes 2", DLROVER_MASTER_ADDR="elasticjob-a-dlrover-master:50001", ELASTIC_JOB_NAME="a")
    assert found.managed
    assert found.endpoint == Endpoint("elasticjob-a-dlrover-master", 50001)
    assert (found.run_id, found.job_name, found.role) == ("a", "a", "dlrover-trainer")
    assert options(prog="dlrover-run").role == "dlrover-trainer"
    assert options("--role x", prog="dlrover-run").role == "x"
    assert options().role == "default"


def test_rdzv_conf_and_the_budget_become_time_outs(options: Callable[..., RunOptions]) -> None:
    found = options("--rdzv_conf join_timeout=60,lastcall_timeout=2,pend_timeout=30 --recovery-budget 20")
    assert (found.rendezvous.join_timeout, found.rendezvous.last_call, found.rendezvous.pend_timeout) == (60, 2, 30)
    times = found.timeouts
    assert (times.recovery_budget, times.join, times.last_call, times.pend) == (20, 60, 2, 30)
    assert options("--rdzv-conf last_call_timeout=5,timeout=7").timeouts.last_call == 5
    assert options("--shutdown-timeout 3").timeouts.exit_grace == 3
    assert options("", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").timeouts.exit_grace == 4
    assert options("--rdzv-conf close_timeout=3").notices == (
        "--rdzv-conf: close_timeout: accepted; a round closes the moment every node knows of it",
    )


def test_streams_are_chosen_for_every_local_rank(options: Callable[..., RunOptions]) -> None:
    found = options("--nproc-per-node 2 -r 3 -t 1:1 --local-ranks-filter 1")
    assert found.redirects == {0: Std.ALL, 1: Std.ALL}
    assert found.tee == {0: Std.NONE, 1: Std.OUT}
    assert found.local_ranks_filter == {1}
    assert (found.to_console(0), found.to_console(1), found.to_file(1)) == (Std.NONE, Std.OUT, Std.ALL)
    assert options("--nproc-per-node 12 -r 11:2").redirects[11] is Std.ERR
    assert options().to_console(0) is Std.ALL


def test_threads_are_held_to_one_only_among_several_processes_and_unless_said(
    options: Callable[..., RunOptions],
) -> None:
    assert options("--nproc-per-node 2").environment["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in options().environment
    assert "OMP_NUM_THREADS" not in options("--nproc-per-node 2", OMP_NUM_THREADS="8").environment


def test_signals_have_numbers(options: Callable[..., RunOptions]) -> None:
    assert options().signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert options("--signals-to-handle SIGUSR1").signals == (signal.SIGUSR1,)


def test_the_secret_is_read_from_its_file_and_never_shown(options: Callable[..., RunOptions], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    for found in (
        options("--token-file token"),
        options("", RESILE_TOKEN_FILE="token", RESILE_TOKEN="other"),
        options("", RESILE_TOKEN="s3cret"),
    ):
        assert found.security.token == "s3cret"
        assert "s3cret" not in repr(found)


ELSEWHERE = "--nnodes 2 --rdzv-endpoint node0:1 --rdzv-conf is_host=0"


@pytest.mark.parametrize("where", ["", ELSEWHERE])
def test_a_whole_set_of_certificates_is_good_and_the_authority_alone_where_the_master_is_elsewhere(
    options: Callable[..., RunOptions], where: str
) -> None:
    words = f"{where} --tls-cert train.py --tls-key train.py --tls-ca train.py"
    assert options(words).security.tls_key == "train.py"
    if where:
        assert options(f"{where} --tls-ca train.py").security.tls_ca == "train.py"
        assert options(f"{where} --tls-ca train.py --tls-name m").security.tls_name == "m"


# what is wrong is said in one sentence --------------------------------------------------------------------------------

BAD = {
    "--nnodes 3:2": "--nnodes: '3:2' has a maximum below its minimum; did you mean 2:3?",
    "--nnodes 0": "--nnodes: '0' asks for no nodes; the least is 1",
    "--nnodes two": "--nnodes: 'two' is neither a number of nodes nor MIN:MAX",
    "--nnodes 1:2:3": "--nnodes: '1:2:3' is neither",
    "--nproc-per-node 0": "--nproc-per-node: 0 processes cannot train; the least is 1",
    "--nproc_per_node -1": "--nproc-per-node: -1 processes",
    "--nproc-per-node many": "--nproc-per-node: 'many' is neither a number of processes nor one of gpu, npu, "
    "musa, cpu, auto",
    "--nproc-per-node npu": "--nproc-per-node: 'npu', but this machine shows no npu",
    "--nnodes 2 --rdzv-endpoint node0": "--rdzv-endpoint: 'node0' has no port; write HOST:PORT",
    "--nnodes 2 --rdzv-endpoint node0:x": "--rdzv-endpoint: 'node0:x' has no good port: 'x'",
    "--nnodes 2 --rdzv-endpoint node0:70000": "--rdzv-endpoint: 'node0:70000' has no good port",
    "--nnodes 2 --rdzv-endpoint node0:0": "--rdzv-endpoint: 'node0:0': port 0 is any free port",
    "--nnodes 2 --rdzv-endpoint http://h:1": "--rdzv-endpoint: 'http://h:1' is not HOST:PORT",
    "--nnodes 2 --master-port 70000": "--master-port: 70000 is not a port",
    "--nnodes 2 --node-rank 2": "--node-rank: 2 is not a place among 2; allowed are 0 to 1",
    "--standalone --nnodes 2": "--standalone: means this machine alone, but --nnodes asks for 2",
    "--rdzv-backend etcd": "--rdzv-backend: 'etcd' is not one of c10d, static, dlrover-master",
    "--rdzv-conf joint_timeout=3": "--rdzv-conf: 'joint_timeout' is no known key; did you mean join_timeout?",
    "--rdzv-conf join_timeout": "--rdzv-conf: 'join_timeout' is not KEY=VALUE",
    "--rdzv-conf join_timeout=soon": "--rdzv-conf: join_timeout: 'soon' is not a number of seconds above 0",
    "--rdzv-conf join_timeout=nan": "--rdzv-conf: join_timeout: 'nan' is not",
    "--max-restarts -1": "--max-restarts: -1 is negative",
    "--max-restarts x": "--max-restarts: 'x' is not a whole number",
    "--node_unit 0": "--node-unit: 0 is not a number of nodes",
    "--nnodes 3:3 --node_unit 2": "--node-unit: no multiple of 2 lies within --nnodes 3:3",
    "--start-method threads": "--start-method: 'threads' is not one of spawn, fork, forkserver",
    "-r 4": "--redirects: '4' is neither 0 (none), 1 (stdout)",
    "--tee 0:1,": "--tee: '0:1,' is neither",
    "--local-ranks-filter 0,b": "--local-ranks-filter: '0,b' is not a list of local ranks",
    "--signals-to-handle SIGNOPE": "--signals-to-handle: 'SIGNOPE' is not the name of a signal",
    "--signals-to-handle SIGKILL": "--signals-to-handle: SIGKILL cannot be handled",
    "--recovery-budget 0.1": "--recovery-budget: must be between 1 and 3600 seconds, not 0.1",
    "--recovery-budget fast": "--recovery-budget: 'fast' is not a number of seconds",
    "--recovery-budget nan": "--recovery-budget: must be between 1 and 3600 seconds, not nan",
    "--recovery-budget 0": "--recovery-budget: must be between 1 and 3600 seconds, not 0",
    "--monitor-interval often": "--monitor-interval: 'often' is not a number of seconds",
    "--shutdown-timeout -3": "--shutdown-timeout: -3 is negative",
    "--token-file nowhere": "--token-file: 'nowhere' does not exist or cannot be read",
    "--tls-cert train.py": "--tls-cert: this node may run the master, which needs all three; add --tls-key and",
    "--tls-cert train.py --tls-key train.py": "--tls-cert, --tls-key: this node may run the master, which needs all "
    "three; add --tls-ca",
    "--tls-name master": "--tls-name: a name is checked in signed certificates; add --tls-ca",
    "--tls-ca train.py": "--tls-ca: this node may run the master, which needs all three; add --tls-cert and --tls-key",
    f"{ELSEWHERE} --tls-cert train.py --tls-key train.py": "--tls-cert, --tls-key: TLS needs the others; add --tls-ca",
    f"{ELSEWHERE} --tls-ca train.py --tls-key train.py": "--tls-key, --tls-ca: TLS needs the others; add --tls-cert",
    "--token-file train.py": "--token-file: 'train.py' is empty",
    "--standalone=yes": "--standalone: is on or off and takes no value",
    "--nprocs 2": "--nprocs: no such flag; did you mean --nproc-per-node?",
    "--max-restart-count 3": "--max-restart-count: no such flag; did you mean --max-restarts?",
    "--zzzzz": "--zzzzz: no such flag; --help lists all flags",
    "--no-python -m": "--module: a module needs Python; leave out --no-python",
    "--log": "ambiguous option: --log could match",
}


@pytest.mark.parametrize(("words", "said"), BAD.items(), ids=BAD)
def test_a_bad_value_gets_one_sentence(words: str, said: str, options: Callable[..., RunOptions]) -> None:
    with pytest.raises(FlagError, match=re.escape(said)) as caught:
        options(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("PET_NNODES", "3:2", "'3:2' has a maximum"),
        ("PET_MAX_RESTARTS", "some", "'some' is not a whole number"),
        ("PET_STANDALONE", "yes", "'yes' is neither 1 (on) nor 0 (off)"),
        ("PET_START_METHOD", "x", "'x' is not one of spawn"),
        ("PET_RDZV_CONF", "a=b", "'a' is no known key"),
        ("PET_NPROC_PER_NODE", "", "'' is neither"),
        ("RESILE_RECOVERY_BUDGET", "0", "must be"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "x", "'x' is not a whole number"),
        ("DLROVER_MASTER_ADDR", "here", "'here' has no port"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, said: str, options: Callable[..., RunOptions]) -> None:
    with pytest.raises(FlagError, match=re.escape(f"{variable}: {said}")):
        options(**{variable: text})


def test_what_cannot_be_run_is_said_before_anything_starts(options: Callable[..., RunOptions]) -> None:
    with pytest.raises(FlagError, match=r"^script 'x\.py' does not exist$"):
        options("", "x.py")
    with pytest.raises(FlagError, match="program 'nothing-of-that-name' does not exist"):
        options("--no-python", "nothing-of-that-name")
    with pytest.raises(FlagError, match=r"^nothing to run: name a script, as in `resile run train\.py`$"):
        options("--standalone", "")


def test_a_script_that_is_not_python_is_refused_with_its_line(options: Callable[..., RunOptions]) -> None:
    Path("bad.py").write_text("import os\n\nfor x in\n")
    with pytest.raises(FlagError, match=r"^script 'bad\.py' is not Python: line 3: invalid syntax$"):
        options("", "bad.py")
    with pytest.raises(FlagError, match=r"^module 'bad' is not Python: line 3: invalid syntax$"):
        options("-m", "bad")
    assert options("", "bad.py", PYTHON_EXEC="/opt/py2").command[0] == "/opt/py2", "it may be of that language"
    Path("bad.py").chmod(0o755)
    assert options("--no-python", "./bad.py").command == ("./bad.py",)


def test_a_directory_is_refused_unless_python_can_run_it(options: Callable[..., RunOptions]) -> None:
    Path("folder").mkdir()
    with pytest.raises(FlagError, match=r"^script 'folder' is a directory without a __main__\.py; name a file in it$"):
        options("", "folder")
    Path("folder/__main__.py").write_text("def f(:\n")
    with pytest.raises(FlagError, match=r"^script 'folder/__main__\.py' is not Python: line 1: "):
        options("", "folder")
    Path("folder/__main__.py").write_text("print()\n")
    assert options("", "folder").command[-1] == "folder"


def test_a_module_that_nobody_finds_is_refused(options: Callable[..., RunOptions]) -> None:
    for name, init in (("plain", "print('executed')"), ("moving", "__path__.append('elsewhere')")):
        Path(name).mkdir()
        Path(name, "__init__.py").write_text(init)
        Path(name, "train.py").write_text("")
    assert options("-m", "plain.train").command[-1] == "plain.train"
    for name, said in (
        ("nomodule", "module 'nomodule' does not exist"),
        ("nomodule.here", "module 'nomodule.here' does not exist: there is no 'nomodule'"),
        ("plain.there", "module 'plain.there' does not exist"),
    ):
        with pytest.raises(FlagError, match=f"^{re.escape(said)}$"):
            options("-m", name)
    assert options("-m", "moving.there").command[-1] == "moving.there", "nobody knows before it has run"
    assert "plain" not in sys.modules


def test_what_python_takes_that_is_no_source_is_left_to_it(options: Callable[..., RunOptions]) -> None:
    with zipfile.ZipFile("app.pyz", "w") as archive:
        archive.writestr("__main__.py", "print()")
    os.mkfifo("pipe")
    assert options("", "app.pyz").command[-1] == "app.pyz"
    assert options("", "pipe").command[-1] == "pipe", "reading it would wait for ever, or take it away"


# the program ----------------------------------------------------------------------------------------------------------


def resile(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from resile.cli.main import main; main(sys.argv[1:])"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "RESILE_", "COLUMNS"))}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=clean | environ, timeout=60
    )


def test_bad_usage_ends_with_code_2_and_one_line() -> None:
    for words, said in (
        (["run", "x.py"], "resile run: script 'x.py' does not exist\n"),
        (["run"], "resile run: nothing to run: name a script, as in `resile run train.py`\n"),
        (["rnu"], "resile: no command 'rnu'; did you mean run?\n"),
    ):
        ended = resile(*words)
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)


def test_help_teaches_every_flag_once_within_100_columns_and_fast() -> None:
    began = time.monotonic()
    shown = resile("run", "--help")
    took = time.monotonic() - began
    assert shown.returncode == 0
    assert max(map(len, shown.stdout.splitlines())) <= 100
    for flag in FLAGS:
        assert len(re.findall(rf"^  (?:-\w, )?{flag.name}\b", shown.stdout, re.M)) == 1, flag.name
    assert {flag.name for flag in FLAGS} == {name for _, texts in GROUPS.values() for name in texts}
    assert shown.stdout.count("resile run --") == 3
    assert took < 2


def test_the_version_is_told_under_every_name() -> None:
    for prog in ("resile run", "dlrover-run"):
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as said:
            parse(["--version"], {}, prog)
        assert (ended.value.code, said.getvalue()) == (0, f"resile {__version__}\n")


def test_the_examples_of_the_help_are_accepted() -> None:
    text = (build_parser().epilog or "").replace("\\\n", " ")
    examples = [line.split()[2:] for line in text.splitlines() if line.strip().startswith("resile run")]
    assert len(examples) == 3
    for words in examples:
        assert parse(words, {}).values["training_script"]


@pytest.mark.parametrize("words", [["run", "--help"], ["run", "x.py"], ["--help"], ["--version"]])
def test_run_and_the_overview_load_neither_click_nor_rich_nor_asyncio_nor_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom resile.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([m for m in ('click', 'rich', 'asyncio', 'torch', 'numpy', 'yaml', 'ssl') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["get", "--help"], ["run", "--help"], ["explain"]])
def test_a_reader_that_leaves_before_the_help_is_printed_sees_no_traceback(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run(
            [Path(sys.executable).with_name("resile"), *words], stdout=closed, stderr=subprocess.PIPE, timeout=60
        )
    assert ended.stderr == b""
    assert ended.returncode in (0, 1)  # argparse does not mind


def test_the_overview_lists_every_command() -> None:
    from resile.cli.main import COMMANDS, overview

    assert resile().stdout == resile("--help").stdout == overview() + "\n"
    assert all(f"  {name} " in overview() and purpose in overview() for name, purpose in COMMANDS.items())
    assert re.fullmatch(r"resile \d+\.\d+\.\d+\n", resile("--version").stdout)
