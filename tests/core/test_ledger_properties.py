"""The shard ledger under any order of events: every record of every epoch is counted exactly once."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resile.api.ids import NodeId, NodeKey
from resile.core import shard_ledger
from resile.core.shard_ledger import Lease, Ledger, ShardRequest

NODES = [NodeKey("worker", NodeId(number)) for number in range(3)]
WORKERS = [(node, f"{node}/{slot}") for node in NODES for slot in range(2)]


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        size=st.integers(0, 30),
        shard_size=st.integers(1, 10),
        epochs=st.integers(1, 3),
        seed=st.none() | st.integers(0, 5),
    )
    def open(self, size, shard_size, epochs, seed):
        self.ledger = Ledger()
        assert shard_ledger.open_dataset(self.ledger, "d", size, shard_size, epochs, seed) == ""
        self.dataset = self.ledger.datasets["d"]
        self.counted: dict[tuple[int, int], int] = {}
        self.held: dict[int, tuple[NodeKey, str, int, int, int]] = {}
        self.taken_back: list[tuple[NodeKey, str, int, int]] = []
        self.reports: list[tuple[NodeKey, str, int, int]] = []
        self.requests = 0
        self.asked: list[ShardRequest] = []
        self.names = dict.fromkeys(range(len(WORKERS)), 0)

    def worker(self, slot: int) -> tuple[NodeKey, str]:
        node, name = WORKERS[slot]
        return node, f"{name}/{self.names[slot]}"

    def granted(self, wish: ShardRequest, number: int, lease: Lease) -> None:
        if wish in self.asked:
            self.asked.remove(wish)
        if number == 0:
            assert self.dataset.complete
        else:
            self.held.setdefault(number, (wish.node, wish.worker, lease.epoch, lease.start, lease.end))

    def serve(self) -> None:
        for wish, number, lease in shard_ledger.grantable(self.ledger):
            self.granted(wish, number, lease)

    @rule(slot=st.integers(0, len(WORKERS) - 1), again=st.booleans())
    def take(self, slot, again):
        node, worker = self.worker(slot)
        self.requests += 1
        wish = ShardRequest(node, worker, self.requests)
        self.asked.append(wish)
        for _ in range(1 + again):
            answer = shard_ledger.request_shard(self.dataset, wish)
            if answer is not None:
                self.granted(wish, *answer)
        self.serve()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def advance(self, data):
        number = data.draw(st.sampled_from(sorted(self.held)))
        node, worker, epoch, start, end = self.held[number]
        upto = data.draw(st.integers(start, end))
        assert shard_ledger.advance(self.dataset, node, worker, number, upto)
        for index in range(start, upto):
            self.counted[epoch, index] = self.counted.get((epoch, index), 0) + 1
        self.reports.append((node, worker, number, upto))
        if upto == end:
            del self.held[number]
        else:
            self.held[number] = (node, worker, epoch, upto, end)
        self.serve()

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def repeat(self, data):
        node, worker, number, upto = data.draw(st.sampled_from(self.reports))
        done = self.dataset.done
        shard_ledger.advance(self.dataset, node, worker, number, upto)
        assert self.dataset.done == done

    @precondition(lambda self: self.taken_back)
    @rule(data=st.data())
    def report_late(self, data):
        node, worker, number, upto = data.draw(st.sampled_from(self.taken_back))
        done = self.dataset.done
        assert not shard_ledger.advance(self.dataset, node, worker, number, upto)
        assert self.dataset.done == done

    @rule(slot=st.integers(0, len(WORKERS) - 1))
    def worker_goes(self, slot):
        node, worker = self.worker(slot)
        shard_ledger.release_worker(self.ledger, node, worker)
        self.forget(lambda n, w: (n, w) == (node, worker))
        self.names[slot] += 1
        self.serve()

    @rule(node=st.sampled_from(NODES))
    def node_goes(self, node):
        shard_ledger.release_node(self.ledger, node)
        self.forget(lambda n, _: n == node)
        for slot, (other, _) in enumerate(WORKERS):
            self.names[slot] += other == node
        self.serve()

    def forget(self, lost) -> None:
        for number in [n for n, (node, worker, *_) in self.held.items() if lost(node, worker)]:
            node, worker, _, _, end = self.held.pop(number)
            self.taken_back.append((node, worker, number, end))
        self.reports = [r for r in self.reports if not lost(r[0], r[1])]
        self.asked = [wish for wish in self.asked if not lost(wish.node, wish.worker)]

    @invariant()
    def nothing_is_counted_twice(self):
        assert all(times == 1 for times in self.counted.values())
        assert self.dataset.done == len(self.counted)

    @invariant()
    def no_two_hold_the_same_record_and_nobody_holds_what_is_done(self):
        parts = [(p.epoch, p.start, p.end) for p in (*self.dataset.leases.values(), *self.dataset.returned)]
        records = [(epoch, index) for epoch, start, end in parts for index in range(start, end)]
        assert len(records) == len(set(records))
        assert not set(records) & self.counted.keys()

    @invariant()
    def the_ledger_and_its_model_agree_on_who_holds_what(self):
        leases = {n: (x.node, x.worker, x.epoch, x.start, x.end) for n, x in self.dataset.leases.items()}
        assert leases == self.held
        held = {n for workers in self.dataset.held.values() for numbers in workers.values() for n in numbers}
        assert held == self.held.keys()

    @invariant()
    def a_wish_waits_only_while_nothing_can_be_granted(self):
        assert list(self.dataset.waiting) == self.asked
        if self.asked:
            assert self.dataset.exhausted
            assert self.dataset.leases

    def teardown(self):
        """Whoever is left does the rest, and then every record of every epoch is done."""
        if not hasattr(self, "dataset"):
            return
        for node in NODES:
            self.node_goes(node)
        wish = ShardRequest(NODES[0], "last", 0)
        for request in range(1000):
            number, lease = shard_ledger.request_shard(self.dataset, ShardRequest(wish.node, wish.worker, request)) or (
                0,
                None,
            )
            if number == 0:
                break
            for index in range(lease.start, lease.end):
                self.counted[lease.epoch, index] = self.counted.get((lease.epoch, index), 0) + 1
            assert shard_ledger.advance(self.dataset, wish.node, wish.worker, number, lease.end)
        assert self.dataset.complete
        wanted = {(epoch, index) for epoch in range(self.dataset.epochs) for index in range(self.dataset.size)}
        assert self.counted == dict.fromkeys(wanted, 1)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True)
