"""The script that a kill schedule strikes: a small elastic training whose processes strike by themselves."""

from __future__ import annotations

from tests.local.elastic.test_elastic import SETTING

TRAIN = (
    SETTING
    + """
import contextlib, glob, signal, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from resile.checkpoint.buffer import Buffer
from resile.torch import Checkpointer, ElasticLoader

BLOWS = [dict(zip(("step", "moment", "target", "rank"), blow)) for blow in json.loads(os.environ.get("BLOWS", "[]"))]
WORLD, EPOCHS, STORE_EVERY, LAST = (int(os.environ[name]) for name in ("WHOLE", "EPOCHS", "STORE_EVERY", "STEPS"))
DATA, SHARDED = os.environ["DATA"], os.environ["SHARDED"] == "True"
STORAGE = os.path.join(HERE, "storage")
stepping, total, words, begun, stepped = False, 0, 0, 0, 0


def open_blows():
    return [number for number in range(len(BLOWS)) if not there(f"blow-{number}")]


def strike(moment):
    '''The blows of this moment whose turn it is; each falls once, whoever comes by again.'''
    for number in open_blows():
        blow = BLOWS[number]
        if blow["moment"] != moment:
            continue
        if in_recovery(blow):
            if not all(there(f"blow-{n}") for n in range(number)):
                continue
            if moment != "giving" and dist.get_rank() != blow["rank"] % dist.get_world_size():
                continue
        elif elastic.completed < blow["step"] or (elastic.rank, elastic.world) != (blow["rank"], WORLD):
            continue
        elif stepped != elastic.round:  # some member may not be there yet, or be struck as it comes
            continue
        if moment == "storing":
            await_draft()
        note("blow", number=number, node=int(os.environ["NODE"]), round=elastic.round, **blow)
        with open(os.path.join(HERE, f"blow-{number}"), "x"):
            pass
        await_others(blow)
        if blow["target"] == "master":
            strike_master(number)
        elif blow["target"] == "drain":
            os.kill(os.getppid(), signal.SIGTERM)
        elif blow["target"] == "come":
            wait_for(f"came-{number}")
        elif blow["target"] in ("freeze", "ice"):
            freeze(number)
        else:
            if blow["target"] == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def is_due():
    '''Whether a blow waits for all to be there. One in the middle of a recovery does not: others train on till then.

    A round in which no step was taken would keep newcomers waiting, so there is one.
    '''
    if stepped != elastic.round:
        return False
    due = (BLOWS[number] for number in open_blows())
    return any(blow["step"] <= elastic.completed and not in_recovery(blow) for blow in due)


def in_recovery(blow):
    return blow["moment"] == "giving" or blow["moment"].startswith("restore-")


def freeze(number):
    '''This node: its agent and all ranks, this one last; it is for the test to thaw them.'''
    with open(os.path.join(HERE, "notes")) as file:
        notes = [json.loads(line) for line in file]
    ranks = {each["pid"] for each in notes if each["agent"] == os.getppid()} - {os.getpid()}
    ranks = [pid for pid in ranks if os.path.exists(f"/proc/{pid}")]
    note("frozen", number=number, pids=[*ranks, os.getppid(), os.getpid()])
    for pid in (*ranks, os.getppid(), os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def strike_master(number):
    '''The one that lives; if an earlier blow has just killed it, its successor.'''
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for announced in glob.glob(os.path.join(os.environ["RESILE_STATE_DIR"], "runs", "*", "master.json")):
            with contextlib.suppress(ProcessLookupError, ValueError), open(announced) as file:
                os.kill(json.load(file)["pid"], signal.SIGKILL)
                note("master", number=number)
                open(os.path.join(HERE, f"struck-{number}"), "x").close()
                return
        time.sleep(0.01)


def await_others(blow):
    '''Until all that are to fall at this step and moment are about to: nobody notices one of them before.'''
    if in_recovery(blow):
        return
    same = lambda other: (other["step"], other["moment"]) == (blow["step"], blow["moment"])
    together = [n for n, other in enumerate(BLOWS) if same(other)]
    awaited = [f"blow-{n}" for n in together]
    if blow["target"] != "master":  # whoever strikes the master must live to do so
        awaited += [f"struck-{n}" for n in together if BLOWS[n]["target"] == "master"]
    until = time.monotonic() + 60
    while not all(map(there, awaited)) and time.monotonic() < until:
        time.sleep(0.002)


def await_draft():
    '''Until the agents have begun to store this step; a part of a second too late is a blow, too.'''
    until = time.monotonic() + 5
    while time.monotonic() < until and not glob.glob(os.path.join(STORAGE, f"*step-{elastic.completed}*")):
        pass


def striking(moment, owner, name, first=False):
    '''Have a blow of this moment fall after a call of a function, or before it.'''
    honest = getattr(owner, name)

    def struck(*args, **kwargs):
        if first:
            strike(moment)
        result = honest(*args, **kwargs)
        if not first:
            strike(moment)
        return result

    setattr(owner, name, struck)


def give(tensor, src, **kwargs):
    if not stepping and src == dist.get_rank():
        strike("giving")
    return broadcast(tensor, src, **kwargs)


def give_one(tensor, dst, **kwargs):
    if not stepping:
        strike("giving")
    return isend(tensor, dst, **kwargs)


def tell(*args, **kwargs):
    global words
    if words:
        strike(f"restore-{words}")
        words += 1
    return all_gather(*args, **kwargs)


def restore(*args, **kwargs):
    global words
    words = 1
    try:
        return honest_restore(*args, **kwargs)
    finally:
        words = 0


honest_restore, Checkpointer.restore = Checkpointer.restore, restore
broadcast, dist.broadcast = dist.broadcast, give
isend, dist.isend = dist.isend, give_one
all_gather, dist.all_gather = dist.all_gather, tell
striking("averaging", dist, "all_reduce")
striking("averaging", dist, "reduce_scatter_single")  # of shards
striking("copy", Buffer, "begin")
striking("record", Buffer, "commit", first=True)


def build():
    '''The same in every round; what it holds comes from a checkpoint.'''
    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)]
    model = torch.nn.Sequential(*layers)
    for part in (layers[0], layers[3], model):
        fully_shard(part)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: strike("commit"))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50)


def before_step():
    seen.steps.append([sampler.epoch, sampler.completed, total, elastic.round])


if DATA == "loader":
    numbered = [(number, inputs[number], labels[number]) for number in range(SIZE)]
    sampler = ElasticLoader(numbered, global_batch_size=int(os.environ["BATCH"]), micro_batch_size=2, num_workers=1)
rest = {"sampler": sampler, "state": {"seen": seen}, "before_step": before_step}
if BLOWS or SHARDED:
    rest["checkpointer"] = Checkpointer(STORAGE, store_every=STORE_EVERY, keep_last=0)
if SHARDED:
    elastic = Elastic(build=build, **rest)
else:
    optimizer.register_step_post_hook(lambda *_: strike("commit"))
    elastic = Elastic(model, optimizer, scheduler=scheduler, **rest)


def passes(dealt):
    '''What this rank has of a step: weight, numbers, inputs and labels of each pass; and what the world has.'''
    if DATA == "loader":
        return [(share.weight, ids.tolist(), *batch) for share, (ids, *batch) in dealt], dealt.total
    share, batch = dealt
    half = len(batch) // 2 if DATA == "halves" else 0
    parts = [part for part in (batch[:half], batch[half:]) if part]
    return [(share.weight * len(part) / len(batch), part, inputs[part], labels[part]) for part in parts], share.total


def numbers():
    '''All that training has made, as numbers that JSON keeps exactly: model, then optimizer, each by its names.
    Of shards: by all ranks together.'''
    tensors = [tensor for _, tensor in sorted(elastic.model.state_dict().items())]
    of_optimizer = {
        f"{name}.{key}": tensor
        for name, parameter in elastic.model.named_parameters()
        for key, tensor in elastic.optimizer.state[parameter].items()
    }
    tensors += [tensor for _, tensor in sorted(of_optimizer.items())]
    tensors = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in tensors]
    return [number for tensor in tensors for number in tensor.double().flatten().tolist()]


note("ready")
for dealt in elastic.epochs(EPOCHS, sampler):
    own, total = passes(dealt)
    with elastic.step(backwards=len(own)):
        stepping = True
        if elastic.round != begun:
            begun = elastic.round
            note("round", round=begun, step=elastic.completed)
        while elastic.world < WORLD and not elastic.lost and (elastic.completed == LAST - 1 or is_due()):
            time.sleep(0.01)
        if elastic.completed == LAST - 1 and elastic.world < WORLD:  # alone it could take even the last step
            raise RuntimeError("the round is over: all are to be there at the end")
        note("gave", step=elastic.completed, round=elastic.round, world=elastic.world,
             samples=[sampler.epoch, [number for weight, part, *_ in own if weight for number in part]])
        strike("forward")
        for weight, _, pictures, names in own:
            loss = torch.nn.functional.cross_entropy(elastic.model(pictures), names)
            (loss * weight).backward()
    stepping = False
    if elastic.stepped:
        stepped = elastic.round
        begin()
        strike("after")
        if BLOWS and elastic.completed % STORE_EVERY == 0:
            strike("storing")
        if not BLOWS and (SHARDED or elastic.rank == 0):
            made = numbers()
            if elastic.rank == 0:
                note("state", step=elastic.completed, numbers=made)
note("end", numbers=numbers(), seen=seen.steps, steps=elastic.completed)
"""
)

SHARDED = "import torch._dynamo.config  # once in a standby, and not again in every process\n" + TRAIN
"""The same for shards, which ask for torch's compiler."""

UNDISTURBED = """
import os, runpy, sys
import torch, torch._dynamo.config
import resile.torch  # what takes long is imported once, and every rank is a fork of it
from resile.agent.workers.ports import free_port

world = int(os.environ["WHOLE"])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world))
os.environ.update(TORCHELASTIC_RESTART_COUNT="0")
ranks = []
for rank in range(world):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ["RANK"] = str(rank)
        runpy.run_path("train.py", run_name="__main__")
        sys.exit(0)
sys.exit(any([os.waitpid(pid, 0)[1] for pid in ranks]))
"""
"""The same script without agents and without blows."""
