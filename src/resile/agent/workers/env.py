"""The environment variables of a training process under `resile run`.

They are those of torchrun (or dlrover-run), so a script runs unchanged under either. One value differs on purpose:
TORCHELASTIC_USE_AGENT_STORE is False. The agent imports no torch and has no store. Rank 0 of the round hosts the store,
on a port that is used for this round only, so no process of an older round can reach it.
"""

from __future__ import annotations

from collections.abc import Mapping

from resile.agent.options import RunOptions
from resile.api.defaults import TOKEN_FILE_VARIABLE
from resile.api.ids import Round
from resile.protocol.reports import RoundAssignment
from resile.wire.env import AGENT_SOCKET, OWNER, ROUND, WORKER

KEPT_BACK = ("RESILE_TOKEN", TOKEN_FILE_VARIABLE, "RESILE_TLS_KEY", OWNER)
"""Variables that training processes do not get. Secrets are for the agent alone: its socket needs none.
OWNER is set by each training process for its children; the agent's own value would be wrong."""

_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_DEFAULTS = {
    "DLROVER_PARAL_CONFIG_PATH": "/tmp/dlrover/auto_paral_config.json",
    "RUNTIME_METRICS_PATH": "/tmp/dlrover/runtime_metrics.json",
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x400000",
}
"""Variables that are set unless the user has set them. The first two name files that DLRover's trainer library reads.

With the last one, copies of 4 MiB and more bypass the CPU caches. Saving many tensors then takes as long as one copy of
all bytes; with glibc's threshold (104 MB on a machine with a large cache) it takes 1.6 times as long. Other C libraries
ignore the variable."""
CHANGING = frozenset(
    {
        "LOCAL_RANK",
        "RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_ERROR_FILE",
        AGENT_SOCKET,
        WORKER,
        ROUND,
    }
)
"""Variables that differ between processes and starts. All others are the same for every process of an agent."""


class NoDeviceError(ValueError):
    """There is no GPU for a process; the text is one sentence."""


def worker_environment(
    base: Mapping[str, str],
    *,
    options: RunOptions,
    place: RoundAssignment,
    local_rank: int,
    round_: Round,
    restart_count: int,
    error_file: str,
    agent_socket: str,
    worker: str,
) -> dict[str, str]:
    """Make the environment of the process `local_rank` from the agent's own (`base`) and the assignment `place`.

    All nodes have one role, so ROLE_RANK is the global rank, as torchrun sets it. Raises NoDeviceError if
    `--virtual-local-rank` finds fewer GPUs in CUDA_VISIBLE_DEVICES than there are processes.
    """
    rank = str(place.first_rank + local_rank)
    environment = shared_environment(base, options=options)
    environment.update(
        {
            "LOCAL_RANK": str(local_rank),
            "RANK": rank,
            "GROUP_RANK": str(place.group_rank),
            "ROLE_RANK": rank,
            "LOCAL_WORLD_SIZE": str(options.nproc),
            "WORLD_SIZE": str(place.world_size),
            "GROUP_WORLD_SIZE": str(place.group_world_size),
            "ROLE_WORLD_SIZE": str(place.world_size),
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(place.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(restart_count),
            "TORCHELASTIC_ERROR_FILE": error_file,
            AGENT_SOCKET: agent_socket,
            WORKER: worker,
            ROUND: str(round_),
        }
    )
    if options.virtual_local_rank:
        environment["LOCAL_RANK"] = "0"
        environment["CUDA_VISIBLE_DEVICES"] = _own_device(base.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return environment


def shared_environment(base: Mapping[str, str], *, options: RunOptions) -> dict[str, str]:
    """The variables that all processes of this agent share in every round: all but those in `CHANGING`."""
    environment = {name: value for name, value in base.items() if name not in KEPT_BACK and name not in CHANGING}
    environment.update(options.environment)
    environment.update(
        {
            "ROLE_NAME": options.role,
            "TORCHELASTIC_MAX_RESTARTS": str(options.rendezvous.max_restarts),
            "TORCHELASTIC_RUN_ID": options.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            _NCCL_ERRORS: base.get(_NCCL_ERRORS, "1"),
        }
    )
    return _DEFAULTS | environment


def _own_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise NoDeviceError(
            f"--virtual-local-rank: local rank {local_rank} has no GPU of its own, "
            f"CUDA_VISIBLE_DEVICES={visible} lists {len(devices)}"
        )
    return devices[local_rank].strip()
