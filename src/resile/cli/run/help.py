"""The texts of `resile run --help`, and the notices about flags that are accepted without effect.

They are apart from the table of flags because a reader of that table seldom wants prose.
"""

from __future__ import annotations

HELP_WIDTH = 100

DESCRIPTION = """
Run a training script as several processes, on this machine or together with others, and keep it
running when processes or machines are lost. Scripts written for torchrun run unchanged.
Defaults are in parentheses.
"""

EPILOG = """
examples:
  all GPUs of this machine:
      resile run --standalone --nproc-per-node gpu train.py --epochs 3
  two to four machines, the same line on each; the one called node0 hosts the rendezvous:
      resile run --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint node0:29400 \\
          --rdzv-id my-job --max-restarts 3 train.py
  try recovery on a laptop: kill -9 one of the processes and watch
      resile run --standalone --nproc-per-node 2 --max-restarts 3 -m my.package.train

Dashes may be underscores (--max_restarts). Every flag of torchrun and dlrover-run can be a variable
PET_<NAME> instead (PET_MAX_RESTARTS=3), every flag of resile's own a RESILE_<NAME>; the flag wins.
"""

_NOT_YET = "is not in this version yet and is skipped"

ACCEPTED: dict[str, str] = {
    "--monitor-interval": "resile is told when a process ends and polls nothing",
    "--start-method": "training processes are always started afresh, as with spawn",
    "--event-log-handler": "torch's event handlers are not called",
    "--logs-specs": "torchrun's log plugins are not loaded",
    "--duplicate-stdout-filters": f"the filtered copy of the logs {_NOT_YET}",
    "--duplicate-stderr-filters": f"the filtered copy of the logs {_NOT_YET}",
    "--numa-binding": f"binding to the CPUs near a GPU {_NOT_YET}",
    "--numa-affinity": f"binding to the CPUs near a GPU {_NOT_YET}",
    "--membind-policy": f"binding of memory {_NOT_YET}",
    "--network-check": f"the node check {_NOT_YET}",
    "--precheck": f"the node check {_NOT_YET}",
    "--comm-perf-test": f"the network's speed test {_NOT_YET}",
    "--exclude-straggler": f"the search for slow nodes {_NOT_YET}",
    "--auto-tunning": f"tuning of the batch size {_NOT_YET}",
    "--save-at-breakpoint": "the last checkpoint in memory goes to storage after every crash, without it",
    "--training-port": "each round takes a free port instead",
    "--ucp-device-type": f"universal checkpointing {_NOT_YET}",
}
"""Flags without effect, with their help texts. A flag that is not at its default causes a notice with this text."""

GROUPS: dict[str, tuple[str, dict[str, str]]] = {
    "what": (
        "what to run",
        {
            "--module": "the script is the name of a module, run as `python -m` does",
            "--no-python": "the script is a program of any kind, run as it is",
            "--run-path": "the script is a Python file, whatever --no-python says",
            "--role": "what processes see as ROLE_NAME (default; dlrover-run: dlrover-trainer)",
            "--job-name": "the job's name in messages and commands (the --rdzv-id or the script's name)",
        },
    ),
    "many": (
        "how many",
        {
            "--nnodes": "machines: a number, or the fewest and the most; training goes on with any number between (1)",
            "--nproc-per-node": "processes on this machine; `gpu`: one per GPU (CUDA_VISIBLE_DEVICES, else "
            "/dev/nvidia*), `npu` and `musa`: one per device of Ascend or Moore Threads, `cpu`: one per usable CPU, "
            "`auto`: one per device where there are any, else as cpu (1)",
            "--node-unit": "only take part in multiples of N machines, as models split across N need (1)",
            "--auto-config": "take --nnodes from NODE_NUM and --nproc-per-node from the GPUs, where they are not given",
            "--accelerator": "what --auto-config counts: nvidia.com/gpu, ascend-npu, mthreads.com/gpu or "
            "metax-tech.com/gpu (nvidia.com/gpu)",
            "--virtual-local-rank": "each process sees its own GPU alone, as device 0, and LOCAL_RANK=0",
        },
    ),
    "meet": (
        "meeting other machines",
        {
            "--standalone": "this machine is the whole job; the flags below are not needed",
            "--rdzv-endpoint": "where all machines meet; the one that is HOST hosts the rendezvous",
            "--rdzv-id": "the same word on every machine of a job keeps jobs apart",
            "--rdzv-backend": "c10d: places are given as machines come, port 29400 unless said; static: places by "
            "--node-rank, at --master-addr (static; c10d if there is an --rdzv-endpoint and no --node-rank)",
            "--rdzv-conf": "time-outs in seconds: join_timeout (too few machines: give up), lastcall_timeout (enough: "
            "wait for more), pend_timeout (no room for a pod: give up); is_host=1|0 says whether this machine hosts",
            "--master-addr": "static only: the machine with --node-rank 0 (127.0.0.1)",
            "--master-port": "static only: its port (29500)",
            "--node-rank": "static only: the place of this machine, from 0 (0)",
            "--local-addr": "how the others reach this machine, if its name is not good enough",
        },
    ),
    "recover": (
        "recovering",
        {
            "--max-restarts": "how many crashes of the script are answered with a restart; lost machines are not "
            "counted (0)",
            "--recovery-budget": "the longest standstill after a loss, from 1 to 3600; every other time-out is derived "
            "from it (10)",
            "--shutdown-timeout": "how long processes may take to end when the run is ended from outside, before they "
            "are killed (30, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
            "--signals-to-handle": "signals that end the run and are passed on to the processes "
            "(SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
            "--standbys": "interpreters that have imported torch ahead and wait to replace processes; 0 for none (one "
            "for each process, if the script imports torch and there is memory for it)",
            "--preload": "what else they import ahead, as in transformers,datasets; RESILE_STANDBY_MEMORY=1Gi bounds "
            "their memory",
            "--state-dir": "where the master keeps what it must not forget when it is restarted",
        },
    ),
    "logs": (
        "logs",
        {
            "--log-dir": "where log files go, in a directory for each run, attempt and local rank",
            "--redirects": "send streams to files: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank, as in 0:3,1:2 "
            "(0)",
            "--tee": "send streams to files and to the console, each line marked with its rank; as --redirects (0)",
            "--local-ranks-filter": "only these local ranks may write to the console, as in 0,1",
        },
    ),
    "secure": (
        "security",
        {
            "--token-file": "the job's secret; a machine without it gets no place (or the secret itself in "
            "RESILE_TOKEN)",
            "--tls-cert": "this machine's certificate; TLS is mutual, so a machine that may run the master needs all "
            "three of --tls-cert, --tls-key and --tls-ca",
            "--tls-key": "the key of --tls-cert",
            "--tls-ca": "the authority that must have signed the others' certificates",
            "--tls-name": "the name that the master's certificate must hold (any that --tls-ca has signed)",
        },
    ),
    "compat": ("accepted for compatibility; one line says so when given", ACCEPTED),
}
"""Titles and help texts by group, in the order of the help; every flag has exactly one text."""
