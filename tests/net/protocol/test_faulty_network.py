"""Worker sessions and a learner session on a network that delays, cuts and loses broadcasts
(Hypothesis).

After each step, the ledger balances, no fragment is accepted twice, the fragments of an incarnation
arrive in order, no lease is overdrawn, and no honest peer is dropped. Once the network heals, all
workers are registered again and a whole deal arrives.

In a second machine, fragments carry the deltas of real filters, which a real publisher merges. In
another one, policies change, join and leave between versions, and snapshots are partial: a sampler
acts with exactly the weights that the learner had at the sampler's version, and in the end every
worker has the newest ones. In the last one, the learner calls methods of workers.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fake_policy import RecordedWeights
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aiorl.acting.filters import MeanStdFilter
from aiorl.errors import BatchError
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import BROADCAST, LearnerSession, LearnerSettings
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings, WorkerState
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import Message, Samples, Snapshot, Welcome
from aiorl.run.added_policy import REMOVED, changes_to
from aiorl.run.core import Publisher
from aiorl.run.worker.sampler_unit import SnapshotSlot

NUM_WORKERS = 3
STEPS = 10


class Node:
    """Worker process: its session, its shell, and the two ends of its connection."""

    def __init__(self, index: int, life: int, ids: itertools.count) -> None:
        self.index = index
        self.ids = ids
        self.session = WorkerSession(
            WorkerSettings(f"w{index}.{life}", slot_hint=index),
            make_incarnation=lambda: f"i{next(ids)}",
        )
        self.peer = b""
        self.up: deque[list[bytes]] = deque()
        self.down: deque[list[bytes]] = deque()
        self.sub: deque[list[bytes]] = deque()
        self.version = -1
        self.open: list[
            tuple[int, int, str]
        ] = []  # lease, policy version and incarnation of each fragment begun

    @property
    def linked(self) -> bool:
        return bool(self.peer)

    def shell(self) -> None:
        for message in self.session.messages_to_send():
            if self.linked:
                self.up.append(freeze(message))
        for event in self.session.events():
            self.heard(event)
            if isinstance(event, ev.Registered):
                self.version = event.welcome.snapshot.version
                assert event.welcome.slot == self.session.slot
            elif isinstance(event, ev.SnapshotReceived):
                assert event.snapshot.version > self.version
                self.version = event.snapshot.version
            elif isinstance(event, ev.WasRefused):
                raise AssertionError(f"an honest worker was refused: {event}")

    def heard(self, event: ev.WorkerEvent) -> None:
        """Do nothing; subclasses override this."""

    def take_deltas(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the finished fragment's filter deltas."""
        return {}


def freeze(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


class FaultyNetwork(RuleBasedStateMachine):
    """Possible events of the system, one rule for each."""

    node_class = Node
    least_accepted = 100
    """Fragments that a long run of faults leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ids = itertools.count(1)
        self.tokens = itertools.count(1)
        self.accepted: dict[int, str] = {}
        self.order: dict[str, int] = {}
        self.zombies: list[tuple[bytes, list[bytes]]] = []
        self.nodes = [self.node_class(index, 0, self.ids) for index in range(NUM_WORKERS)]
        self.dealt = 0
        self.arrived = 0
        self.version = 0
        self.learner = self.make_learner(Ledger())
        self.publish()
        for node in self.nodes:
            self.connect(node)
        self.network_delivers_all()
        assert len(self.live) == NUM_WORKERS

    def make_learner(self, ledger: Ledger) -> LearnerSession:
        learner = LearnerSession(
            "run", f"L{next(self.ids)}", LearnerSettings(num_workers=NUM_WORKERS), ledger
        )
        learner.begin({"env": "x"}, {}, self.now)
        self.queue: list[ev.SamplesAccepted] = []
        self.dealt = self.arrived = 0
        self.live: dict[str, int] = {}
        return learner

    # The network
    # ----------------------------------------------------------------------------------------------

    def learner_shell(self) -> None:
        by_peer = {node.peer: node for node in self.nodes if node.linked}
        for target, message in self.learner.messages_to_send():
            if target is BROADCAST:
                for node in by_peer.values():
                    node.sub.append(freeze(message))
            elif target in by_peer:
                by_peer[target].down.append(freeze(message))
        for event in self.learner.events():
            self.learner_event(event)

    def learner_event(self, event: ev.LearnerEvent) -> None:
        if isinstance(event, ev.SamplesAccepted):
            token = int(event.message.batches["p"]["token"][0])
            assert token not in self.accepted, "a fragment was accepted twice"
            assert token > self.order.get(event.incarnation, 0), (
                "fragments of an incarnation out of order"
            )
            assert self.live[event.incarnation] == event.slot
            self.accepted[token] = event.incarnation
            self.order[event.incarnation] = token
            self.queue.append(event)
            self.arrived += 1
            assert self.arrived <= self.dealt, "more fragments than were leased"
        elif isinstance(event, ev.WorkerJoined):
            assert event.slot not in self.live.values(), "one slot, two workers"
            self.live[event.incarnation] = event.slot
        elif isinstance(event, ev.WorkerLost):
            assert self.live.pop(event.incarnation) == event.slot
        elif isinstance(event, ev.LeaseOverdue):
            self.dealt += event.fragments  # leased to others, but can still arrive
        elif isinstance(event, ev.PeerRejected):
            raise AssertionError(f"an honest peer was dropped: {event.reason}")

    def to_learner(self, peer: bytes, frames: list[bytes]) -> None:
        self.learner.receive(peer, decode(frames), self.now)
        self.learner_shell()

    def deliver(self, node: Node, channel: str) -> None:
        queue: deque = getattr(node, channel)
        if not queue:
            return
        frames = queue.popleft()
        if channel == "up":
            self.to_learner(node.peer, frames)
        elif channel == "down":
            node.session.receive(decode(frames), self.now)
        else:
            node.session.broadcast(decode(frames), self.now)
        node.shell()

    def connect(self, node: Node, peer: bytes = b"") -> None:
        node.peer = peer or b"peer%d" % next(self.ids)
        node.session.connected(self.now)
        node.shell()

    def disconnect(self, node: Node, *, told: bool, late: bool) -> None:
        if not node.linked:
            return
        peer, node.peer = node.peer, b""
        if late and not told:
            self.zombies += [(peer, frames) for frames in node.up]
        for queue in (node.up, node.down, node.sub):
            queue.clear()
        node.session.disconnected(self.now, "cut")
        node.shell()
        if told:
            self.zombies = [(old, frames) for old, frames in self.zombies if old != peer]
            self.learner.peer_gone(peer, self.now)
            self.learner_shell()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            node.session.tick(self.now)
            node.shell()
        self.learner.tick(self.now)
        self.learner_shell()

    # Rules
    # ----------------------------------------------------------------------------------------------

    nodes_index = st.integers(0, NUM_WORKERS - 1)

    @rule(
        index=nodes_index, channel=st.sampled_from(["up", "down", "sub"]), count=st.integers(1, 6)
    )
    def network_delivers(self, index: int, channel: str, count: int) -> None:
        for _ in range(count):
            self.deliver(self.nodes[index], channel)

    @rule()
    def network_delivers_all(self) -> None:
        for _ in range(50):
            for node, channel in itertools.product(self.nodes, ("up", "down", "sub")):
                self.deliver(node, channel)

    @rule(index=nodes_index)
    def network_loses_a_broadcast(self, index: int) -> None:
        if self.nodes[index].sub:
            self.nodes[index].sub.popleft()

    @rule(index=nodes_index, told=st.booleans(), late=st.booleans())
    def link_breaks(self, index: int, told: bool, late: bool) -> None:
        self.disconnect(self.nodes[index], told=told, late=late)

    @rule(turns=st.integers(1, 3), seconds=st.sampled_from([0.1, 0.6]))
    def work_goes_on(self, turns: int, seconds: float) -> None:
        self.learner_tops_up(3)
        for _ in range(turns):
            for node in self.nodes:
                for _ in range(3):
                    for channel in ("sub", "down", "up"):
                        self.deliver(node, channel)
                self.begin(node)
                if len(node.open) > 1:
                    self.end(node)
            self.tick(seconds)

    @rule(index=nodes_index)
    def link_comes_up(self, index: int) -> None:
        if not self.nodes[index].linked:
            self.connect(self.nodes[index])

    @rule(index=nodes_index)
    def link_resets_under_the_same_peer_id(self, index: int) -> None:
        node = self.nodes[index]
        if node.linked:
            peer = node.peer
            self.disconnect(node, told=False, late=False)
            self.connect(node, peer)

    @rule(number=st.integers(0, 10))
    def late_message_comes_in(self, number: int) -> None:
        if self.zombies:
            peer, _ = self.zombies[number % len(self.zombies)]
            # a connection keeps the order
            first = next(zombie for zombie in self.zombies if zombie[0] == peer)
            self.zombies.remove(first)
            self.to_learner(*first)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.5, 4.0]), count=st.integers(1, 4))
    def time_passes(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self.tick(seconds)

    @rule(index=nodes_index, told=st.booleans())
    def worker_is_killed(self, index: int, told: bool) -> None:
        old = self.nodes[index]
        self.disconnect(old, told=told, late=True)
        self.nodes[index] = self.node_class(index, next(self.ids), self.ids)

    @rule()
    def learner_is_restarted(self) -> None:
        for node in self.nodes:
            self.disconnect(node, told=False, late=False)
        self.zombies.clear()
        self.version += 1
        self.learner = self.make_learner(Ledger.from_dict(self.learner.ledger.as_dict()))
        self.publish()

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.learner.publish(self.make_snapshot(), self.now)
        self.learner_shell()

    def make_snapshot(self) -> Snapshot:
        return Snapshot(
            self.version, {"p": {"w": np.full(3, self.version, np.float32)}}, {}, {}, {}
        )

    @rule(fragments=st.integers(1, 7))
    def learner_deals(self, fragments: int) -> None:
        book = self.learner.leases
        is_dealt = any(
            lease.deal and lease.remaining
            for each in book._holders.values()
            for lease in each.leases.values()
        )
        if self.learner.version >= 0 and not is_dealt and not book.unassigned:
            self.dealt += fragments
            self.learner.deal(self.learner.version, fragments)
            self.learner_shell()

    @rule(wanted=st.integers(1, 4))
    def learner_tops_up(self, wanted: int) -> None:
        before = self.learner.leases.outstanding()
        if self.learner.leases.pacing is None:
            self.learner.leases.begin_streaming(Pacing(3, None, 4))
        self.learner.leases.pacing.budget = wanted * 3
        self.learner.stream(0, max(0, self.learner.version - 1))
        self.dealt += self.learner.leases.outstanding() - before
        self.learner_shell()

    @rule(discard=st.booleans())
    def learner_trains(self, discard: bool) -> None:
        for event in sorted(self.queue, key=lambda event: (event.slot, event.message.seq)):
            if discard:
                self.learner.ledger.discard("test", event.message.env_steps)
            else:
                self.learner.ledger.train(event.message.env_steps)
            self.used(event)
        self.queue.clear()

    def used(self, event: ev.SamplesAccepted) -> None:
        """Do nothing; subclasses override this."""

    @rule(index=nodes_index, begins=st.booleans(), abandon=st.booleans())
    def worker_works(self, index: int, begins: bool, abandon: bool) -> None:
        if begins:
            self.begin(self.nodes[index])
        else:
            self.end(self.nodes[index], abandon=abandon)

    def begin(self, node: Node) -> None:
        may = node.session.may_sample(node.version)
        lease_id = node.session.start_fragment(node.version)
        assert may == (lease_id is not None)
        if lease_id is not None:
            assert node.session.state is WorkerState.REGISTERED
            node.open.append((lease_id, node.version, node.session.incarnation))

    def end(self, node: Node, *, abandon: bool = False) -> None:
        if not node.open:
            return
        lease_id, version, incarnation = node.open.pop(0)
        if abandon:
            node.session.abandon_fragment(lease_id)
        else:
            last = max(version, node.version) if node.session.slot else version
            batches = {"p": {"token": np.array([next(self.tokens)])}}
            is_current = incarnation == node.session.incarnation
            deltas = node.take_deltas() if is_current else {}
            fragment = Samples(
                0, lease_id, STEPS, STEPS, version, last, 1, STEPS, batches, {}, deltas, {}
            )
            assert node.session.fragment_done(fragment, self.now) == is_current
        node.shell()

    # Invariants
    # ----------------------------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        learner = self.learner
        learner.ledger.check()
        if learner.leases.pacing is not None:
            learner.leases.pacing.check_valid()
        assert learner.ledger.queued == sum(event.message.env_steps for event in self.queue)
        assert set(learner.slots) == set(self.live.values())

    @invariant()
    def no_env_step_is_unaccounted_for(self) -> None:
        """Check that reports never exceed the steps taken, and that all steps of live incarnations
        get reported.
        """
        sessions = {node.session.incarnation: node.session for node in self.nodes}
        for incarnation, account in self.learner.ledger.accounts.items():
            if incarnation in sessions:
                assert account.reported <= sessions[incarnation].sampled_total

    def checks(self) -> list[Callable[[], None]]:
        return [self.the_books_balance, self.no_env_step_is_unaccounted_for]

    def teardown(self) -> None:
        """Heal the network: all workers come back and a whole deal arrives."""
        if self.learner.version < 0:
            self.publish()
        for node in self.nodes:
            if not node.linked:
                self.connect(node)
        for _ in range(120):
            self.tick(0.25)
            self.network_delivers_all()
            for node in self.nodes:
                while node.open:
                    self.end(node)
                self.begin(node)
            self.the_books_balance()
            self.network_delivers_all()
        assert all(node.session.state is WorkerState.REGISTERED for node in self.nodes)
        assert not self.learner.leases.outstanding()
        assert not self.learner.leases.unassigned
        before = self.arrived
        self.publish()
        self.dealt += 7
        self.learner.deal(self.learner.version, 7)
        self.learner_shell()
        for node in self.nodes:
            # every lease of the deal is lost in flight, a worker dies
            self.disconnect(node, told=False, late=False)
            self.connect(node)
        self.tick(0.25)
        self.worker_is_killed(index=0, told=True)
        self.connect(self.nodes[0])
        for _ in range(60):
            self.tick(0.25)
            self.network_delivers_all()
            for node in self.nodes:
                self.end(node)
                self.begin(node)
        assert self.arrived == before + 7, "sampling did not continue"
        self.tick(1.1)
        self.network_delivers_all()
        for node in self.nodes:
            account = self.learner.ledger.accounts[node.session.incarnation]
            assert account.reported == node.session.sampled_total
            assert account.received == account.reported
            assert not node.session.num_unacked
        assert self.learner.ledger.in_flight == 0


POLICIES = ("p", "q")
NUM_UNITS = 2


def assert_saw(state, samples) -> None:
    """Check that the state is that of one filter that saw exactly these samples, to 1e-9."""
    assert state["n"] == len(samples)
    if len(samples):
        data = np.asarray(samples, np.float64)
        mean = data.mean(axis=0)
        np.testing.assert_allclose(state["mean"], mean, rtol=1e-9)
        np.testing.assert_allclose(
            state["m2"], ((data - mean) ** 2).sum(axis=0), rtol=1e-9, atol=1e-9
        )


@dataclass
class Unit:
    """Sampler with a filter for each policy, and the samples they saw."""

    incarnation: str
    filters: dict[str, MeanStdFilter]
    slot: SnapshotSlot
    unsent: dict[str, list] = field(default_factory=lambda: {name: [] for name in POLICIES})
    # number, samples of each policy
    sent: list[tuple[int, dict[str, list]]] = field(default_factory=list)

    def observe(self, rng: np.random.Generator) -> None:
        self.slot.between_steps()
        for name, own in self.filters.items():
            samples = rng.normal(5.0, 2.0, (int(rng.integers(0, 3)), 1))
            own(samples)
            self.unsent[name].extend(samples)

    def take_deltas(self, number: int) -> dict[str, dict[str, np.ndarray]]:
        self.sent.append((number, self.unsent))
        self.unsent = {name: [] for name in POLICIES}
        return {name: own.take_delta(number) for name, own in self.filters.items()}


class FilterNode(Node):
    """Worker with several samplers, which are created again for each registration."""

    def __init__(self, index: int, life: int, ids: itertools.count) -> None:
        super().__init__(index, life, ids)
        self.units: list[Unit] = []
        self.turn = 0
        self.rng = np.random.default_rng(index)
        self.spoils = False
        self.fragments: dict[
            tuple[str, int], dict[str, list]
        ] = {}  # samples of each fragment, for the learner

    def heard(self, event: ev.WorkerEvent) -> None:
        if isinstance(event, ev.Registered):
            self.units = [self.make_unit(event.welcome.snapshot) for _ in range(NUM_UNITS)]
        elif isinstance(event, ev.SnapshotReceived):
            for unit in self.units:
                unit.slot.offer(event.snapshot)
        elif isinstance(event, ev.Reincarnated):
            self.units = []

    def make_unit(self, snapshot: Snapshot) -> Unit:
        filters = {name: MeanStdFilter((1,)) for name in POLICIES}
        slot = SnapshotSlot({}, filters, self.session.incarnation, synchronize_filters=True)
        slot.offer(snapshot)
        slot.between_steps()
        return Unit(self.session.incarnation, filters, slot)

    def take_deltas(self) -> dict[str, dict[str, np.ndarray]]:
        self.turn += 1
        unit = self.units[self.turn % NUM_UNITS]
        unit.observe(self.rng)
        number = self.session.next_seq
        samples = dict(unit.unsent)
        deltas = unit.take_deltas(number)
        if self.spoils:
            deltas["p"]["m2"] = np.array([-1.0])
            samples["p"] = []
        self.spoils = False
        self.fragments[self.session.incarnation, number] = samples
        return deltas


class FaultyNetworkWithFilters(FaultyNetwork):
    """The same with filters. R139, R142, R143: each accepted observation counts once, at learner
    and workers.

    As in on-policy runs, deltas are merged in worker order when their fragments are used, whether
    or not the worker is still alive.
    """

    node_class = FilterNode
    nodes: list[FilterNode]
    merges_on_arrival = False

    def __init__(self) -> None:
        self.snapshots: dict[int, tuple[Snapshot, dict[str, tuple]]] = {}
        self.fragments: dict[tuple[str, int], dict[str, list]] = {}
        self.num_taken_up_in_flight = 0
        self.checkpoint: tuple[dict, dict[str, tuple]] = ({}, dict.fromkeys(POLICIES, ()))
        super().__init__()

    def make_learner(self, ledger: Ledger) -> LearnerSession:
        self.publisher = Publisher({name: MeanStdFilter((1,)) for name in POLICIES})
        states, merged = self.checkpoint
        for name, state in states.items():
            self.publisher.filters[name].restore(state)
        self.merged = dict(merged)
        return super().make_learner(ledger)

    def learner_event(self, event: ev.LearnerEvent) -> None:
        super().learner_event(event)
        if isinstance(event, ev.WorkerJoined):
            self.publisher.join(event.incarnation)
        elif isinstance(event, ev.WorkerLost):
            self.publisher.forget(event.incarnation)
        elif isinstance(event, ev.SamplesAccepted) and self.merges_on_arrival:
            self.merge(event)

    def used(self, event: ev.SamplesAccepted) -> None:
        if not self.merges_on_arrival:
            self.merge(event)

    def merge(self, event: ev.SamplesAccepted) -> None:
        for node in self.nodes:
            self.fragments |= node.fragments
        samples = self.fragments[event.incarnation, event.message.seq]
        try:
            self.publisher.merge_deltas(
                event.incarnation, event.message.seq, event.message.filter_deltas
            )
        except BatchError:
            assert not samples["p"]
        for name in POLICIES:
            self.merged[name] = (*self.merged[name], *samples[name])

    def make_snapshot(self) -> Snapshot:
        self.publisher.version = self.version - 1
        snapshot = self.publisher.next_snapshot({}, {})
        assert set(snapshot.filter_acks) <= set(self.live), "an ended incarnation is acknowledged"
        self.snapshots[self.version] = snapshot, dict(self.merged)
        return snapshot

    @rule(index=FaultyNetwork.nodes_index, told=st.booleans())
    def worker_is_killed(self, index: int, told: bool) -> None:
        self.fragments |= self.nodes[index].fragments
        super().worker_is_killed(index, told)

    @rule(index=FaultyNetwork.nodes_index)
    def worker_observes(self, index: int) -> None:
        for unit in self.nodes[index].units:
            before = unit.slot.version
            unit.observe(self.nodes[index].rng)
            if unit.slot.version > before and any(own._in_flight for own in unit.filters.values()):
                self.num_taken_up_in_flight += 1

    @rule(index=FaultyNetwork.nodes_index)
    def a_delta_that_fits_no_filter_is_sent(self, index: int) -> None:
        self.nodes[index].spoils = True

    @rule()
    def checkpoint_is_written(self) -> None:
        self.checkpoint = self.publisher.filter_states(), dict(self.merged)

    @invariant()
    def the_learner_saw_every_observation_it_merged_once(self) -> None:
        for name, samples in self.merged.items():
            assert_saw(self.publisher.filters[name].state(), samples)

    @invariant()
    def workers_hold_the_published_state_and_what_it_does_not_acknowledge(self) -> None:
        for unit in itertools.chain.from_iterable(node.units for node in self.nodes):
            snapshot, merged = self.snapshots[unit.slot.version]
            acked = snapshot.filter_acks.get(unit.incarnation, 0)
            for name, own in unit.filters.items():
                in_flight = [
                    sample for number, part in unit.sent if number > acked for sample in part[name]
                ]
                assert_saw(own.state(), [*merged[name], *in_flight, *unit.unsent[name]])

    def checks(self) -> list[Callable[[], None]]:
        own = [
            self.the_learner_saw_every_observation_it_merged_once,
            self.workers_hold_the_published_state_and_what_it_does_not_acknowledge,
        ]
        return super().checks() + own

    def teardown(self) -> None:
        """Check that all statistics are equal once everything is delivered, used and published."""
        super().teardown()
        self.learner_trains(discard=False)
        self.publish()
        self.network_delivers_all()
        self.the_learner_saw_every_observation_it_merged_once()
        for unit in itertools.chain.from_iterable(node.units for node in self.nodes):
            unit.slot.between_steps()
            for name, own in unit.filters.items():
                assert not own._in_flight
                assert_saw(own.state(), [*self.merged[name], *unit.unsent[name]])


class StreamingWithFilters(FaultyNetworkWithFilters):
    """Deltas are merged on arrival. R139, R142, R143."""

    merges_on_arrival = True


AT_FIRST = ("learns", "too", "fixed")
NAMES = ("w", "b")
PACKED = np.ones(3, np.uint8)


class Sampler:
    """Sampler with the policies of a welcome, and those that snapshots bring."""

    def __init__(self, welcome: Welcome) -> None:
        self.policies: dict[str, Any] = {
            name: RecordedWeights() for name in welcome.config["policies"]
        }
        self.slot = SnapshotSlot(self.policies, {}, welcome.incarnation, synchronize_filters=True)
        self.slot.change_policies = self.change_policies
        self.slot.offer(welcome.snapshot)

    def change_policies(self, snapshot: Snapshot) -> None:
        added, removed = changes_to(snapshot, self.policies.keys())
        self.policies |= {name: RecordedWeights() for name in added}
        for name in removed:
            del self.policies[name]

    def step(self) -> None:
        self.slot.between_steps()

    @property
    def weights(self) -> dict[str, dict[str, int]]:
        return {name: policy.weights for name, policy in self.policies.items()}


class WorkerWithSamplers(Node):
    """Worker with two samplers, of which one takes snapshots up late."""

    def __init__(self, index: int, life: int, ids: itertools.count) -> None:
        super().__init__(index, life, ids)
        self.samplers: list[Sampler] = []

    def heard(self, event: ev.WorkerEvent) -> None:
        match event:
            case ev.Registered(welcome):
                self.samplers = [Sampler(welcome), Sampler(welcome)]
                self.samplers[0].step()
            case ev.SnapshotReceived(snapshot):
                for sampler in self.samplers:
                    sampler.slot.offer(snapshot)
                self.samplers[0].step()
            case ev.Reincarnated():
                self.samplers = []


class ChangingPolicies(FaultyNetwork):
    """The faulty network with policies that change, join and leave."""

    node_class = WorkerWithSamplers
    least_accepted = 30  # a lost version is not healed by the next one
    nodes: list[WorkerWithSamplers]

    def __init__(self) -> None:
        self.policies: dict[str, dict[str, int]] = {}
        self.changed: set[str] = set()
        self.packed: dict[str, Any] = {}
        self.states: dict[tuple[str, int], dict[str, dict[str, int]]] = {}
        self.num_broadcast = 0
        super().__init__()

    def make_learner(self, ledger: Ledger) -> LearnerSession:
        learner = super().make_learner(ledger)
        # like a resumed run, a new learner has all policies from the beginning
        self.policies = self.policies or dict.fromkeys(AT_FIRST, self.numbers())
        learner.begin({"policies": list(self.policies)}, {}, self.now)
        self.publisher = Publisher({})
        self.changed = set(self.policies)
        self.packed = {}
        self.version = 0
        return learner

    def numbers(self) -> dict[str, int]:
        number = next(self.tokens)
        return dict.fromkeys(NAMES, number)

    def make_snapshot(self) -> Snapshot:
        weights = {
            name: {key: np.array([number]) for key, number in self.policies[name].items()}
            for name in self.changed
        }
        snapshot = self.publisher.next_snapshot(weights, {}, self.packed)
        self.changed = set()
        self.packed = {}
        self.version = snapshot.version
        self.states[self.learner.learner_incarnation, snapshot.version] = dict(self.policies)
        return snapshot

    @rule(changed=st.sets(st.sampled_from(AT_FIRST)), count=st.integers(1, 3))
    def policies_learn(self, changed: set[str], count: int) -> None:
        for _ in range(count):
            for name in changed & self.policies.keys():
                self.policies[name] = self.numbers()
                self.changed.add(name)
            self.publish()

    @rule()
    def policy_joins(self) -> None:
        name = f"opponent_{next(self.tokens)}"
        self.policies[name] = self.numbers()
        self.changed.add(name)
        self.packed[name] = PACKED
        self.publish()

    @rule(number=st.integers(0, 5))
    def policy_leaves(self, number: int) -> None:
        others = sorted(self.policies.keys() - {"learns"})
        if others:
            name = others[number % len(others)]
            del self.policies[name]
            self.changed.discard(name)
            self.packed[name] = REMOVED
            self.publish()

    @rule(index=FaultyNetwork.nodes_index)
    def late_sampler_steps(self, index: int) -> None:
        for sampler in self.nodes[index].samplers:
            sampler.step()

    def checks(self) -> list[Callable[[], None]]:
        return [*super().checks(), self.samplers_act_with_the_learners_weights_of_their_version]

    @invariant()
    def samplers_act_with_the_learners_weights_of_their_version(self) -> None:
        for node in self.nodes:
            for sampler in node.samplers:
                if sampler.slot.version >= 0:
                    key = node.session.learner_incarnation, sampler.slot.version
                    assert sampler.weights == self.states[key]

    def teardown(self) -> None:
        super().teardown()
        for _ in range(40):  # lost versions are asked for again
            self.tick(0.25)
            self.network_delivers_all()
        for node in self.nodes:
            assert node.session.version == self.learner.version
            for sampler in node.samplers:
                sampler.step()
                assert sampler.weights == self.policies


class NodeWithCalls(Node):
    """Worker that runs calls later.

    Attributes:
        requests: calls to run.
        ran: tokens of all calls.
    """

    def __init__(self, index: int, life: int, ids: itertools.count) -> None:
        super().__init__(index, life, ids)
        self.requests: list[ev.CallRequested] = []
        self.ran: set[int] = set()

    def heard(self, event: ev.WorkerEvent) -> None:
        if isinstance(event, ev.CallRequested):
            token = event.args["token"]
            assert token not in self.ran, "a call was run twice"
            self.ran.add(token)
            self.requests.append(event)


class FaultyNetworkWithCalls(FaultyNetwork):
    """The learner calls workers: each call is run at most once, and answered or lost once."""

    node_class = NodeWithCalls

    def make_learner(self, ledger: Ledger) -> LearnerSession:
        self.pending: dict[int, int] = {}
        return super().make_learner(ledger)

    def learner_event(self, event: ev.LearnerEvent) -> None:
        super().learner_event(event)
        if isinstance(event, ev.CallReplied):
            token = self.pending.pop(event.call_id)
            assert event.result == token if event.ok else "lost" in event.result
        elif isinstance(event, ev.CallLost):
            del self.pending[event.call_id]

    @rule(index=FaultyNetwork.nodes_index, count=st.integers(1, 70))
    def learner_calls(self, index: int, count: int) -> None:
        for slot in self.learner.slots[index : index + 1]:
            for _ in range(count):
                token = next(self.tokens)
                number = self.learner.call(slot, "ping", {"token": token}, num_bytes=0)
                self.pending[number] = token
        self.learner_shell()

    @rule(index=FaultyNetwork.nodes_index, count=st.integers(1, 70))
    def worker_answers(self, index: int, count: int) -> None:
        node = self.nodes[index]
        for request in node.requests[:count]:
            node.session.reply(request, True, request.args["token"], self.now)
        del node.requests[:count]
        node.shell()

    def teardown(self) -> None:
        super().teardown()
        for index in range(NUM_WORKERS):
            self.learner_calls(index, 70)
        for _ in range(60):
            self.tick(0.25)
            self.network_delivers_all()
            for index in range(NUM_WORKERS):
                self.worker_answers(index, 70)
        assert not self.pending


MACHINES = pytest.mark.parametrize(
    "machine",
    [
        FaultyNetwork,
        FaultyNetworkWithFilters,
        StreamingWithFilters,
        ChangingPolicies,
        FaultyNetworkWithCalls,
    ],
)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "examples",
    [8, pytest.param(400, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
    ids=["", "long"],
)
@MACHINES
def test_r139_r142_r143_the_protocol_survives_a_faulty_network(
    machine: type[FaultyNetwork], examples: int
) -> None:
    """R7 and LESSONS 20: no fragment is lost silently, duplicated or reordered, whatever the
    network does.

    Each worker has several samplers and several policies. Some deltas fit no filter, and workers
    die in between.
    """
    limits = settings(
        max_examples=examples,
        stateful_step_count=60,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 3)),
    ],
)
@MACHINES
def test_r139_r142_r143_the_protocol_survives_a_long_run_of_faults(
    machine: type[FaultyNetwork], seed: int
) -> None:
    """R7: Hypothesis finds short ways to break things; this long history goes deep."""
    net, rng = machine(), random.Random(seed)
    index = lambda: rng.randrange(NUM_WORKERS)  # noqa: E731
    channel = lambda: rng.choice(["up", "down", "sub"])  # noqa: E731
    coin = lambda: rng.random() < 0.5  # noqa: E731
    moves: list[tuple[float, Callable[[], object]]] = [
        (30, lambda: net.work_goes_on(turns=rng.randint(1, 3), seconds=rng.choice([0.1, 0.6]))),
        (
            8,
            lambda: net.network_delivers(index=index(), channel=channel(), count=rng.randint(1, 6)),
        ),
        (3, net.network_delivers_all),
        (3, lambda: net.network_loses_a_broadcast(index=index())),
        (2, lambda: net.link_breaks(index=index(), told=coin(), late=coin())),
        (4, lambda: net.link_comes_up(index=index())),
        (1, lambda: net.link_resets_under_the_same_peer_id(index=index())),
        (3, lambda: net.late_message_comes_in(number=rng.randint(0, 10))),
        (
            3,
            lambda: net.time_passes(
                seconds=rng.choice([0.1, 0.5, 1.0, 2.5, 4.0]), count=rng.randint(1, 4)
            ),
        ),
        (0.5, lambda: net.worker_is_killed(index=index(), told=coin())),
        (0.2, net.learner_is_restarted),
        (3, net.publish),
        (3, lambda: net.learner_deals(fragments=rng.randint(1, 7))),
        (4, lambda: net.learner_trains(discard=coin())),
        (8, lambda: net.worker_works(index=index(), begins=coin(), abandon=rng.random() < 0.2)),
    ]
    if isinstance(net, FaultyNetworkWithFilters):
        moves += [
            (30, lambda: net.worker_observes(index=index())),
            (3, lambda: net.a_delta_that_fits_no_filter_is_sent(index=index())),
            (3, net.checkpoint_is_written),
        ]
    if isinstance(net, ChangingPolicies):
        learning = lambda: {name for name in AT_FIRST if coin()}  # noqa: E731
        moves += [
            (6, lambda: net.policies_learn(changed=learning(), count=rng.randint(1, 3))),
            (1, net.policy_joins),
            (1, lambda: net.policy_leaves(number=rng.randint(0, 5))),
            (10, lambda: net.late_sampler_steps(index=index())),
        ]
    if isinstance(net, FaultyNetworkWithCalls):
        moves += [
            (6, lambda: net.learner_calls(index=index(), count=rng.randint(1, 70))),
            (12, lambda: net.worker_answers(index=index(), count=rng.randint(1, 70))),
        ]
    for _ in range(300 if seed == 0 else 1500):
        rng.choices(moves, [weight for weight, _ in moves])[0][1]()
        for check in net.checks():
            check()
    assert len(net.accepted) > net.least_accepted
    if isinstance(net, FaultyNetworkWithFilters):
        assert net.num_taken_up_in_flight
        assert len(net.merged["q"]) > 100
    net.teardown()
