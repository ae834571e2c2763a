"""ScalePlans in the core: what is granted, what is refused, and how each of them ends."""

import msgspec
import pytest

from resile.api.ids import Bytes, GiB, NodeId, Rank, Round
from resile.api.job import JobSpec, Resources, RoleSpec, Strategy
from resile.api.kinds.elasticjob.roles import PS
from resile.api.plan import Migration, NewNode, NodeResources, Plan, RoleChange
from resile.core import decisions as de
from resile.core import events as ev
from resile.core.state import JobState
from resile.protocol.agent_to_master import CanRegroup, LastStepTaken
from resile.protocol.job_changes import Scale, Stop, Suspend
from resile.protocol.reports import NodeEnd, NodeStatus, RendezvousConfig
from tests.core.given import Job, joins_again, key, managed, running

BIG = NodeResources(memory=Bytes(8 * GiB))


def plan(job: Job, name: str = "plan", **wishes) -> str:
    """Bring a plan; what the core has against it."""
    job.wants(Plan(name=name, uid=f"uid-{name}", **wishes), request=9)
    (reply,) = job.said(de.Reply)
    assert reply.request == 9
    return reply.error


def end(job: Job, name: str = "plan"):
    """(reason, message) of a plan that has ended, or None."""
    found = job.state.plan_ends.get(f"uid-{name}")
    assert (found is None) != (f"uid-{name}" not in [change.uid for change in job.state.changes])
    return (found.reason, found.message) if found is not None else None


def replicas(number: int | None = None, resources: NodeResources | None = None) -> dict[str, RoleChange]:
    return {"worker": RoleChange(replicas=number, resources=resources or NodeResources())}


def node(role: str = "worker", rank: int | None = None, resources: NodeResources | None = None) -> NewNode:
    return NewNode(role=role, rank=None if rank is None else Rank(rank), resources=resources or NodeResources())


def move(number: int, resources: NodeResources | None = None) -> Migration:
    return Migration(node=key(number), resources=resources or NodeResources())


def come(job: Job, *numbers: int) -> None:
    """These new nodes start and ask to take part."""
    for number in numbers:
        job.comes(number)
        job.joins(number)


def ranks(job: Job) -> dict[int, int]:
    return {n.key.id: n.rank for n in job.state.nodes.values() if n.fills}


# numbers and resources ----------------------------------------------------------------------------------------------


def test_a_plan_for_more_nodes_is_done_when_they_take_part():
    job = running(2)
    assert plan(job, roles=replicas(3)) == ""
    assert job.launched == [2]
    come(job, 2)
    assert end(job) is None
    joins_again(job, 0, 1)
    assert job.members == [0, 1, 2]
    assert end(job) == ("Scaled", "")
    assert "PlanSucceeded" in job.notes()


def test_a_plan_for_fewer_nodes_is_done_when_they_are_gone_and_the_others_train():
    job = running(3)
    plan(job, roles=replicas(2))
    joins_again(job, 0, 1)
    assert (job.members, end(job)) == ([0, 1], None)
    job.seen(2, NodeStatus.DELETED)
    assert end(job) == ("Scaled", "")


def test_a_plan_that_changes_nothing_is_done_at_once():
    job = running(2)
    plan(job, roles=replicas(2))
    assert end(job) == ("Scaled", "")


def test_a_plan_waits_for_nodes_that_an_earlier_wish_has_launched():
    job = running(2)
    job.wants(Scale(role="worker", replicas=3))
    plan(job, roles=replicas(3))
    assert (job.launched, end(job)) == ([], None)
    come(job, 2)
    joins_again(job, 0, 1)
    assert end(job) == ("Scaled", "")


def test_nodes_without_agents_take_part_by_running():
    job = managed(1)
    job.seen(0, NodeStatus.RUNNING)
    plan(job, roles=replicas(2))
    job.seen(1, NodeStatus.STARTING)
    assert end(job) is None
    job.seen(1, NodeStatus.RUNNING)
    assert end(job) == ("Scaled", "")


def test_a_node_that_waits_for_its_unit_takes_part():
    job = running(2, node_unit=2)
    plan(job, roles=replicas(3))
    come(job, 2)
    assert (job.members, end(job)) == ([0, 1], ("Scaled", ""))


def test_new_nodes_get_the_resources_of_the_plan_and_old_ones_stay_as_they_are():
    job = running(1)
    plan(job, roles=replicas(2, BIG))
    (launch,) = job.said(de.LaunchNode)
    assert launch.resources == BIG
    assert job.node(0).resources == NodeResources()


def test_a_replacement_gets_what_a_plan_has_wanted_since_its_node_was_launched():
    job = running(2)
    plan(job, roles=replicas(None, BIG))
    assert end(job) == ("Scaled", "")
    job.seen(1, NodeStatus.DELETED)
    assert job.node(2).resources == BIG


def test_a_replacement_keeps_what_its_node_got_after_the_plan():
    job = running(1, limits=Resources(memory=Bytes(1 * GiB)))
    plan(job, roles=replicas(None, NodeResources(memory=Bytes(2 * GiB))))
    job.seen(0, NodeStatus.DELETED)
    job.seen(1, NodeStatus.FAILED, NodeEnd(reason="OOMKilled"))
    assert job.node(2).resources.memory == 4 * GiB
    job.seen(2, NodeStatus.DELETED)
    assert job.node(3).resources.memory == 4 * GiB


# certain nodes ------------------------------------------------------------------------------------------------------


def test_removing_a_node_removes_that_very_one_and_leaves_a_gap():
    job = running(3)
    assert plan(job, remove=(key(1),)) == ""
    assert (job.deleted, job.launched, job.state.targets) == ([1], [], {"worker": 2})
    joins_again(job, 0, 2)
    job.seen(1, NodeStatus.DELETED)
    assert (job.members, ranks(job), end(job)) == ([0, 2], {0: 0, 2: 2}, ("Scaled", ""))


def test_a_node_at_a_place_above_a_gap_is_replaced_when_it_is_lost():
    job = running(3)
    plan(job, remove=(key(0),))
    job.seen(2, NodeStatus.DELETED)
    assert (job.launched, ranks(job)) == ([3], {1: 1, 3: 2})


def test_a_removed_node_is_not_replaced_however_it_ends():
    job = running(3)
    plan(job, remove=(key(1),))
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=1))
    assert (job.launched, job.state.spent) == ([], {})


def test_growing_fills_gaps_first_and_shrinking_takes_the_highest_ranks():
    job = running(4)
    plan(job, remove=(key(0), key(2)))
    job.wants(Scale(role="worker", replicas=3))
    assert ranks(job) == {1: 1, 3: 3, 4: 0}
    job.wants(Scale(role="worker", replicas=1))
    assert ranks(job) == {4: 0}
    assert job.state.vacated == set()


def test_a_created_node_gets_the_lowest_free_rank_or_the_one_it_asks_for():
    job = running(2)
    assert plan(job, create=(node(rank=4, resources=BIG), node())) == ""
    assert [(d.node.id, d.rank, d.resources) for d in job.said(de.LaunchNode)] == [
        (2, 2, NodeResources()),
        (3, 4, BIG),
    ]
    assert job.state.targets == {"worker": 4}
    come(job, 2, 3)
    joins_again(job, 0, 1)
    assert (job.members, end(job)) == ([0, 1, 2, 3], ("Scaled", ""))


@pytest.mark.parametrize("rank", [None, 1])
def test_a_created_node_may_have_the_rank_of_a_node_that_the_same_plan_removes(rank):
    job = running(3)
    assert plan(job, remove=(key(1),), create=(node(rank=rank, resources=BIG),)) == ""
    (launch,) = job.said(de.LaunchNode)
    assert (launch.node.id, launch.rank, launch.resources) == (3, 1, BIG)
    assert (job.deleted, ranks(job), job.state.targets) == ([1], {0: 0, 2: 2, 3: 1}, {"worker": 3})
    come(job, 3)
    joins_again(job, 0, 2)
    assert (job.members, end(job)) == ([0, 3, 2], None)
    job.seen(1, NodeStatus.DELETED)
    assert (job.launched, end(job)) == ([], ("Scaled", ""))


def test_a_removed_node_takes_its_heir_along_when_its_rank_goes_to_a_created_node():
    job = running(2)
    plan(job, "move", migrate=(move(1),))
    assert plan(job, remove=(key(1),), create=(node(),)) == ""
    assert (job.deleted, job.launched, ranks(job)) == ([1, 2], [3], {0: 0, 3: 1})
    assert end(job, "move") == ("Superseded", "the plan plan came before it was done")


def test_a_lost_node_of_a_plan_is_awaited_in_its_replacement_with_the_same_resources():
    job = running(1)
    plan(job, create=(node(resources=BIG),))
    job.seen(1, NodeStatus.FAILED, NodeEnd(reason="Evicted"))
    assert (job.launched, job.node(2).resources) == ([2], BIG)
    come(job, 2)
    joins_again(job, 0)
    assert end(job) == ("Scaled", "")


# migration ----------------------------------------------------------------------------------------------------------


def test_a_migrated_node_stays_until_its_heir_is_ready_and_the_rank_is_inherited():
    job = running(2)
    assert plan(job, migrate=(move(1, BIG),)) == ""
    (launch,) = job.said(de.LaunchNode)
    assert (launch.node.id, launch.rank, launch.resources, launch.relaunch_count) == (2, 1, BIG, 0)
    job.seen(2, NodeStatus.RUNNING)
    job.comes(2)
    assert (job.members, job.deleted) == ([0, 1], [])
    job.joins(2)
    assert (job.deleted, ranks(job)) == ([1], {0: 0, 2: 1})
    joins_again(job, 0)
    assert (job.members, end(job)) == ([0, 2], None)
    job.seen(1, NodeStatus.DELETED)
    assert end(job) == ("Scaled", "")
    assert (job.state.spent, job.state.targets) == ({}, {"worker": 2})


def test_a_node_in_reserve_is_not_waited_for_by_rounds():
    job = running(2)
    plan(job, migrate=(move(1),))
    job.fails(0)
    joins_again(job, 0, 1)
    assert job.members == [0, 1]


def test_nodes_without_agents_are_relieved_when_their_heir_runs():
    job = managed(1)
    job.seen(0, NodeStatus.RUNNING)
    plan(job, migrate=(move(0),))
    job.seen(1, NodeStatus.RUNNING)
    assert job.deleted == [0]
    job.seen(0, NodeStatus.DELETED)
    assert end(job) == ("Scaled", "")


def test_a_node_that_is_lost_before_its_heir_is_ready_is_replaced_by_it():
    job = running(2)
    plan(job, migrate=(move(1),))
    job.seen(1, NodeStatus.DELETED)
    assert (job.launched, ranks(job)) == ([], {0: 0, 2: 1})
    come(job, 2)
    joins_again(job, 0)
    assert end(job) == ("Scaled", "")


def test_an_heir_that_fails_ends_the_plan_and_the_old_node_stays():
    job = running(2)
    plan(job, migrate=(move(1),))
    job.seen(2, NodeStatus.FAILED, NodeEnd(exit_code=3))
    reason, message = end(job)
    assert reason == "MigrationFailed"
    assert message == "worker-2, which was to take over from worker-1, failed: exit code 3; worker-1 stays"
    assert (job.launched, job.members, job.state.spent) == ([], [0, 1], {})


def test_an_heir_that_finds_no_room_ends_the_plan_and_leaves():
    job = running(2)
    plan(job, migrate=(move(1),))
    job.seen(2, NodeStatus.PENDING)
    for _ in range(int(job.timeouts.pend)):
        job.heartbeats()
        job.wait(1.0)
    assert end(job) == ("PendingTimeout", "worker-2 could not start for too long; worker-1 stays")
    assert (job.node(2).leaving, job.members) == ("could not start for too long", [0, 1])


def test_a_node_that_finishes_needs_no_heir():
    job = managed(2)
    job.seen(0, NodeStatus.RUNNING)
    job.seen(1, NodeStatus.RUNNING)
    plan(job, migrate=(move(0),))
    job.seen(0, NodeStatus.SUCCEEDED)
    assert job.deleted == [2]
    assert end(job) == ("MigrationFailed", "worker-0 took its last step before worker-2 was ready")


def test_nor_does_one_that_has_taken_the_last_step_and_evaluates():
    job = running(2)
    for number in (0, 1):
        job.says(number, CanRegroup())
    plan(job, migrate=(move(1),))
    job.says(0, LastStepTaken(round=Round(1)))
    job.seen(2, NodeStatus.RUNNING)
    job.comes(2)
    job.joins(2)
    assert (job.deleted, job.members) == ([2], [0, 1])
    assert end(job) == ("MigrationFailed", "worker-1 took its last step before worker-2 was ready")


def test_scaling_down_takes_a_node_and_its_heir():
    job = running(3)
    plan(job, migrate=(move(2),))
    job.wants(Scale(role="worker", replicas=2))
    assert job.deleted == [2, 3]
    assert end(job) == ("Superseded", "a request for worker=2 came before it was done")


# what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"roles": {"ps": RoleChange(replicas=1)}}, "the job has no role 'ps'; it has worker"),
        ({"create": (node("ps"),)}, "the job has no role 'ps'; it has worker"),
        ({"roles": replicas(1)}, "1 nodes are fewer than the 2 that the job needs (--nnodes)"),
        ({"remove": (key(0), key(1))}, "1 nodes are fewer than the 2 that the job needs (--nnodes)"),
        ({"remove": (key(7),)}, "the job has no node worker-7"),
        ({"migrate": (move(7),)}, "the job has no node worker-7"),
        ({"remove": (key(0),), "migrate": (move(0),)}, "worker-0 is named twice"),
        ({"create": (node(rank=1),)}, "rank 1 of worker is taken"),
        ({"create": (node(rank=10_000),)}, "ranks must be below 10000, not 10000"),
        (
            {"roles": replicas(4), "create": (node(),)},
            "replicas of worker is the number after the change; give it or createPods and removePods",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_and_changes_nothing(wishes, sentence):
    job = running(3, least=2)
    before = msgspec.msgpack.encode(job.state)
    assert plan(job, **wishes) == sentence
    assert (job.launched, job.deleted, job.notes()) == ([], [], ["PlanRefused"])
    assert msgspec.msgpack.encode(job.state) == before


def test_a_pod_that_was_replaced_is_refused_and_its_heir_is_named():
    job = running(2)
    job.seen(1, NodeStatus.DELETED)
    assert plan(job, remove=(key(1),)) == "worker-1 was deleted; worker-2 has its place"


def test_a_node_that_is_being_migrated_cannot_be_migrated_again():
    job = running(2)
    plan(job, "first", migrate=(move(1),))
    assert plan(job, "second", migrate=(move(1),)) == (
        "worker-1 is being migrated already: worker-2 is to take over from it"
    )
    assert "it is to take over from worker-1" in plan(job, "third", remove=(key(2),))


def test_parameter_servers_are_not_migrated_and_leave_no_gaps():
    roles = {"worker": RoleSpec(replicas=2), "ps": PS.declared(replicas=2)}
    job = Job(
        JobSpec(name="job", kind="elasticjob", roles=roles, strategy=Strategy.PARAMETER_SERVER),
        RendezvousConfig(),
    )
    job.does(ev.Started())
    assert "parameter server" in plan(job, "one", migrate=(Migration(node=key(0, "ps")),))
    assert "cannot have a gap" in plan(job, "two", remove=(key(0, "ps"),))
    assert plan(job, "three", remove=(key(1, "ps"),)) == ""


def test_a_suspended_job_takes_no_plans():
    job = running(2)
    job.wants(Suspend(on=True))
    assert plan(job, roles=replicas(3)) == "the job is suspended; resume it first"


def test_a_refused_scale_is_told_in_the_story():
    job = running(3, least=2)
    job.wants(Scale(role="worker", replicas=1), request=1)
    (note,) = job.said(de.Note)
    assert (note.reason, note.warning) == ("ScaleRefused", True)
    assert "fewer than the 2" in note.message


# what a job may use in all ------------------------------------------------------------------------------------------


def limited(nodes: int, memory: int = 0, cpu: float | None = None, gpu: int = 0) -> Job:
    one = Resources(memory=Bytes(2 * GiB), cpu=1.0, gpu=1 if gpu else 0)
    most = Resources(memory=Bytes(memory * GiB) if memory else None, cpu=cpu, gpu=gpu)
    spec = JobSpec(
        kind="elasticjob",
        name="job",
        roles={"worker": RoleSpec(replicas=nodes, requests=one, limits=one)},
        resource_limits=most,
    )
    job = Job(spec, RendezvousConfig(min_nodes=1, max_nodes=nodes))
    job.does(ev.Started())
    come(job, *range(nodes))
    return job


def test_a_plan_beyond_what_the_job_may_use_is_refused_and_one_within_is_not():
    job = limited(2, memory=6)
    assert plan(job, "more", roles=replicas(4)) == (
        "the nodes would take 8Gi memory together, and resourceLimits allows the job 6Gi"
    )
    assert "8Gi" in plan(job, "larger", migrate=(move(0, NodeResources(memory=Bytes(6 * GiB))),))
    assert "10Gi" in plan(job, "created", create=(node(resources=NodeResources(memory=Bytes(6 * GiB))),))
    assert plan(job, "within", roles=replicas(3)) == ""


def test_cpus_and_gpus_count_too():
    assert "3 cpu together, and resourceLimits allows the job 2500m" in plan(limited(2, cpu=2.5), roles=replicas(3))
    assert "3 gpu together, and resourceLimits allows the job 2" in plan(limited(2, gpu=2), roles=replicas(3))


def test_a_plan_counts_new_nodes_with_the_resources_that_it_gives_them():
    job = limited(1, memory=6)
    assert "10Gi" in plan(job, roles=replicas(2, BIG))


def test_a_job_that_is_beyond_its_limits_from_the_start_may_shrink():
    job = limited(4, memory=4)
    assert plan(job, roles=replicas(3)) == ""


def test_a_relaunch_with_more_memory_stays_within_what_the_job_may_use():
    job = limited(2, memory=5)
    job.seen(1, NodeStatus.FAILED, NodeEnd(reason="OOMKilled"))
    assert job.node(2).resources.memory == 3 * GiB
    job.seen(2, NodeStatus.FAILED, NodeEnd(reason="OOMKilled"))
    assert job.launched == [3]
    assert job.node(3).resources.memory == 3 * GiB


# how plans end ------------------------------------------------------------------------------------------------------


def test_a_plan_whose_number_another_plan_changes_is_told_by_which():
    job = running(2)
    plan(job, "first", roles=replicas(4))
    plan(job, "second", roles=replicas(3))
    assert end(job, "first") == ("Superseded", "the plan second came before it was done")
    assert end(job, "second") is None
    come(job, 2)
    joins_again(job, 0, 1)
    job.seen(3, NodeStatus.DELETED)
    assert end(job, "second") == ("Scaled", "")


def test_plans_that_do_not_contradict_each_other_go_on_side_by_side():
    job = running(2)
    plan(job, "first", create=(node(),))
    plan(job, "second", migrate=(move(0),))
    plan(job, "third", create=(node(),))
    come(job, 2, 3, 4)
    joins_again(job, 1)
    job.seen(0, NodeStatus.DELETED)
    assert [end(job, name) for name in ("first", "second", "third")] == [("Scaled", "")] * 3


def test_a_plan_ends_with_its_job():
    job = running(1)
    plan(job, roles=replicas(2))
    job.wants(Stop(because="enough"))
    assert end(job) == ("JobEnded", "the job is over (Failed)")


def test_a_plan_ends_when_its_job_is_suspended():
    job = running(1)
    plan(job, roles=replicas(2))
    job.wants(Suspend(on=True))
    assert end(job) == ("JobSuspended", "the job was suspended before it was done")


def test_a_plan_that_is_deleted_is_told_of_and_what_it_began_goes_on():
    job = running(1)
    plan(job, migrate=(move(0),))
    job.does(ev.PlanDeleted(uid="uid-plan"))
    assert end(job)[0] == "PlanDeleted"
    come(job, 1)
    assert ranks(job) == {1: 0}
    job.seen(0, NodeStatus.DELETED)
    assert (job.members, job.state.changes) == ([1], [])


def test_a_plan_fails_when_one_of_its_nodes_is_given_up():
    job = running(1, crash_budget=0)
    plan(job, roles=replicas(2))
    job.seen(1, NodeStatus.FAILED, NodeEnd(exit_code=1))
    assert end(job) == (
        "NodeGivenUp",
        "worker-1 is not replaced: it crashed 1 times and restartCount is 0",
    )


def test_a_plan_whose_node_finds_no_room_ends_and_the_node_may_still_come():
    job = running(1)
    plan(job, roles=replicas(2))
    job.seen(1, NodeStatus.PENDING)
    for _ in range(int(job.timeouts.pend)):
        job.heartbeats()
        job.wait(1.0)
    assert end(job) == ("PendingTimeout", "worker-1 could not start for too long; it will join when there is room")
    come(job, 1)
    joins_again(job, 0)
    assert job.members == [0, 1]


def test_a_plan_that_is_known_is_not_executed_again():
    job = running(1)
    plan(job, create=(node(),))
    assert plan(job, create=(node(),)) == ""
    assert (job.launched, job.state.targets) == ([], {"worker": 2})
    job.wants(Stop(because="enough"))
    assert plan(job, create=(node(),)) == ""


def test_the_journal_keeps_the_plans_under_way():
    job = running(2)
    plan(job, "first", migrate=(move(1, BIG),))
    plan(job, "second", remove=(key(0),))
    plan(job, "third", roles=replicas(None, BIG))
    again = job.replayed()
    assert again.state == job.state
    assert again.consistent()
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(job.state), type=JobState)
    assert snapshot == job.state
    job.engine = again
    job.does(ev.MasterReturned())
    job.comes(0, round=1, running=True)
    come(job, 2)
    assert ranks(job) == {2: 1}


def test_a_state_that_knows_nothing_of_plans_is_read():
    job = running(2)
    plain = msgspec.to_builtins(job.state, str_keys=False)
    for field in ("vacated", "resources", "changes", "plan_ends"):
        del plain[field]
    for one in plain["nodes"].values():
        del one["replaces"]
    plain["rendezvous"]["current"].pop("lost", None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=JobState) == job.state


def test_ends_of_plans_are_kept_in_a_bounded_number():
    job = running(1)
    for number in range(150):
        plan(job, str(number), roles=replicas(1))
    assert len(job.state.plan_ends) == 100
    assert end(job, "149") == ("Scaled", "")


def test_ids_of_nodes_that_plans_create_only_grow():
    job = running(2)
    plan(job, "one", remove=(key(1),))
    plan(job, "two", create=(node(),))
    assert (job.launched, job.state.next_id) == ([2], {"worker": NodeId(3)})
    assert ranks(job) == {0: 0, 2: 1}
