"""The jobs of seed 004: their manifests, and what the logs of their workers say.

The jobs have names of their own, so that the experiments can go on beside one another and beside seed 000.
"""

from __future__ import annotations

import datetime
import json
import re

import yaml

from tests.kube.namespace import ROOT, master
from tests.kube.seeds.seed_lines import line, pod_rows, wait
from tests.support.paths import LEAN

MNIST = ROOT / "examples/pytorch/mnist"
BLOCK = re.compile(
    r"\[(?P<at>[^]]+)\] \[INFO\] \[\S+:\d+:\w+\] \[[\w-]+\] Rendezvous complete for workers\. Result:\n"
    r"  restart_count=(?P<restarts>\d+)\n"
    r"  master_addr=[\d.]+\n"
    r"  master_port=\d+\n"
    r"  group_rank=(?P<rank>\d+)\n"
    r"  group_world_size=(?P<size>\d+)\n"
    r"  local_ranks=\[0, 1\]\n"
    r"  role_ranks=\[\d+, \d+\]\n"
    r"  global_ranks=\[\d+, \d+\]\n"
    r"  role_world_sizes=\[(?P<world>\d+), (?P=world)\]\n"
    r"  global_world_sizes=\[(?P=world), (?P=world)\]\n"
)
LOADED = re.compile(
    r"\[INFO\] \[sampler\.py:\d+:load_state_dict\] Load epoch = (\d+), completed num = (\d+), num_samples = (\d+)"
)
STEP = re.compile(r"loss = [\d.]+, step = (\d+)")


def example(name: str, file: str, seat: str, more: str) -> str:
    """An example as it is, with a seat for each worker and more to do, so that there is something left to interrupt.

    Nobody asks for much else, so that seats alone decide who starts: a node here has two cores for everything. So the
    pods leave the same parts of torch out as processes of other tests; those of seed 000 import it whole.
    """
    manifest = yaml.safe_load((MNIST / file).read_text())
    manifest["metadata"]["name"] = name
    container = manifest["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
    container["command"][-1] = container["command"][-1].replace("--num_epochs 5", more)
    container["resources"]["requests"].update({"cpu": "100m", "memory": "512Mi", seat: "1"})
    container["resources"]["limits"].update({"cpu": "2", seat: "1"})
    container.setdefault("env", []).append({"name": "PYTHONPATH", "value": LEAN})
    return json.dumps(manifest)


def log_of(pod: str) -> str:
    return line(f"kubectl -n dlrover logs {pod} --tail=-1")


def rounds_of(log: str) -> list[tuple[int, int, int]]:
    """Of each group the log tells of: restart count, nodes, processes."""
    return [(int(b["restarts"]), int(b["size"]), int(b["world"])) for b in BLOCK.finditer(log)]


def after(log: str, round: int) -> str:
    """What the log says after the block of a round, counted from 0; nothing before it is there."""
    found = list(BLOCK.finditer(log))
    return log[found[round].end() :] if len(found) > round else ""


def steps_of(log: str, round: int) -> list[int]:
    return [int(step) for step in STEP.findall(after(log, round))]


def until_step(what: str, pod: str, round: int, step: int) -> None:
    wait(what, lambda: max(steps_of(log_of(pod), round), default=-1) >= step)


def listing(name: str, *states: str) -> dict[str, str]:
    workers = {f"{name}-edljob-worker-{number}": state for number, state in enumerate(states) if state}
    return {master(name): "Running", **workers}


def started_at(pod: str) -> datetime.datetime:
    status = json.loads(line(f"kubectl -n dlrover get pod {pod} -o json"))["status"]
    return datetime.datetime.fromisoformat(status["containerStatuses"][0]["state"]["running"]["startedAt"])


def delete(name: str) -> None:
    line(f"kubectl -n dlrover delete elasticjob {name}")
    wait(f"the end of {name}", lambda: not pod_rows(name))
