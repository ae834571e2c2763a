"""A training process finds the variables that torchrun would give it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from resile.agent.options import RunOptions
from resile.agent.workers.env import NoDeviceError, worker_environment
from resile.api.ids import Rank, Round
from resile.protocol.reports import RendezvousConfig, RoundAssignment

PLACE = RoundAssignment(
    group_rank=Rank(0), group_world_size=1, first_rank=0, world_size=2, master_addr="h", master_port=5
)


def environment(
    base: dict[str, str] | None = None,
    *,
    local_rank: int = 0,
    place: RoundAssignment = PLACE,
    virtual: bool = False,
    extra: dict[str, str] | None = None,
) -> dict[str, str]:
    options = RunOptions(
        command=("python", "train.py"),
        nproc=2,
        rendezvous=RendezvousConfig(max_restarts=3),
        run_id="id",
        job_name="job",
        virtual_local_rank=virtual,
        environment=extra or {},
    )
    return worker_environment(
        base or {},
        options=options,
        place=place,
        local_rank=local_rank,
        round_=Round(7),
        restart_count=1,
        error_file="/logs/0/error.json",
        agent_socket="/run/agent.sock",
        worker="worker-0/0",
    )


def test_ranks_follow_from_the_place_in_the_round() -> None:
    second = RoundAssignment(
        group_rank=Rank(1), group_world_size=3, first_rank=2, world_size=6, master_addr="h", master_port=5
    )
    found = environment(local_rank=1, place=second)
    assert {name: found[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK")} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
    }
    assert (found["WORLD_SIZE"], found["GROUP_WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("6", "3", "2")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("h", "5")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "3")
    assert (found["RESILE_ROUND"], found["RESILE_WORKER"]) == ("7", "worker-0/0")
    assert found["RESILE_AGENT_SOCKET"] == "/run/agent.sock"


def test_the_users_variables_stay_and_the_secrets_do_not() -> None:
    found = environment({"HOME": "/h", "RESILE_TOKEN": "s", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "RANK": "9"})
    assert found["HOME"] == "/h"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert found["RANK"] == "0"
    assert "RESILE_TOKEN" not in found


def test_what_dlrovers_trainer_library_reads_is_there_unless_the_user_said_otherwise() -> None:
    assert environment()["DLROVER_PARAL_CONFIG_PATH"] == "/tmp/dlrover/auto_paral_config.json"
    assert environment({"RUNTIME_METRICS_PATH": "/x"})["RUNTIME_METRICS_PATH"] == "/x"


def test_large_copies_go_past_the_caches_unless_the_user_tunes_the_c_library() -> None:
    assert environment()["GLIBC_TUNABLES"] == "glibc.cpu.x86_non_temporal_threshold=0x400000"
    assert environment({"GLIBC_TUNABLES": "x=y"})["GLIBC_TUNABLES"] == "x=y"


def test_with_virtual_local_ranks_each_process_sees_its_own_gpu_as_the_first() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in environment(local_rank=1)
    found = environment({"CUDA_VISIBLE_DEVICES": "4, 6"}, local_rank=1, virtual=True)
    assert (found["LOCAL_RANK"], found["RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "1", "6")
    assert environment(local_rank=1, virtual=True)["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(NoDeviceError, match="local rank 1 has no GPU of its own"):
        environment({"CUDA_VISIBLE_DEVICES": "4"}, local_rank=1, virtual=True)


def test_every_variable_that_torchrun_gives_a_process_is_given_here_too(tmp_path: Path) -> None:
    script = tmp_path / "dump.py"
    script.write_text(
        "import json, os\n"
        "name = os.path.join(os.environ['DUMP'], os.environ['RANK'] + '.json')\n"
        "json.dump(dict(os.environ), open(name, 'w'))\n"
    )
    base = {
        name: value
        for name, value in os.environ.items()
        if name != "OMP_NUM_THREADS" and not name.startswith(("PET_", "TORCH", "RESILE_"))
    }
    base["DUMP"] = str(tmp_path)
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3", str(script)]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words], env=base, check=True, capture_output=True, timeout=120
    )
    from resile.cli.run.main import options as options_of

    options = options_of(words, base)
    for local_rank in (0, 1):
        theirs = json.loads((tmp_path / f"{local_rank}.json").read_text())
        added = {name: value for name, value in theirs.items() if base.get(name) != value}
        added.pop("LC_CTYPE", None)  # Python's own, where the locale is C
        place = RoundAssignment(
            group_rank=Rank(0),
            group_world_size=1,
            first_rank=0,
            world_size=2,
            master_addr=added["MASTER_ADDR"],
            master_port=int(added["MASTER_PORT"]),
        )
        ours = worker_environment(
            base,
            options=msgspec.structs.replace(options, run_id=added["TORCHELASTIC_RUN_ID"]),
            place=place,
            local_rank=local_rank,
            round_=Round(1),
            restart_count=0,
            error_file=added["TORCHELASTIC_ERROR_FILE"],
            agent_socket="",
            worker="",
        )
        expected = added | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
        assert {name: ours.get(name) for name in expected} == expected
        assert {"RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE"} <= set(added)
