"""The exchange of filter statistics between real workers' filters and the learner's publisher (SPEC 6.4).

The network loses, doubles and reorders messages; workers die, come back as new incarnations and join late; the learner
restarts from a checkpoint. As in the protocol, the learner takes an incarnation's fragments in the order of their
numbers, each once, and nothing from an incarnation that has ended; what is not acknowledged is sent again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aiorl.acting.filters import MeanStdFilter, make_filter
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.run.flow import Publisher
from aiorl.run.worker.sampler_unit import SnapshotSlot

SHAPE = (2,)


def assert_saw(state, samples) -> None:
    """The state is that of one filter that saw exactly these samples, to 1e-9."""
    assert state["n"] == len(samples)
    if len(samples):
        data = np.asarray(samples, np.float64)
        np.testing.assert_allclose(state["mean"], data.mean(axis=0), rtol=1e-9)
        np.testing.assert_allclose(state["m2"], ((data - data.mean(axis=0)) ** 2).sum(axis=0), rtol=1e-9, atol=1e-9)


@dataclass
class Worker:
    """One incarnation: its filter, what it has sent, and what it saw."""

    incarnation: str
    filter: MeanStdFilter
    slot: SnapshotSlot
    sent: list = field(default_factory=list)  # (delta, samples) of fragment 1, 2, ...
    unsent: list = field(default_factory=list)  # samples since the last fragment

    def send(self):
        delta = self.filter.take_delta(len(self.sent) + 1)
        self.sent.append((delta, self.unsent))
        self.unsent = []
        return self.incarnation, len(self.sent)


class FilterExchange(RuleBasedStateMachine):
    """R139, R140, R142, R143 and R145, as far as filters, publisher and snapshot slots decide them.

    How fragments are taken in is only modelled here; with the real sessions, several samplers and policies, and deltas
    merged when they are used, see tests/protocol/test_faulty_network.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(0)
        self.num_incarnations = 0
        self.publisher = Publisher({DEFAULT_POLICY_ID: make_filter("ConcurrentMeanStdFilter", SHAPE)})
        self.accepted: list = []  # samples the learner's statistic holds
        self.accepted_numbers: dict[str, int] = {}  # incarnation -> fragments taken
        self.network: list = []  # (incarnation, number) on the way to the learner
        self.snapshots: dict = {}  # version -> (snapshot, samples in it)
        self.checkpoint = (self.publisher.filters[DEFAULT_POLICY_ID].state(), [])
        self.workers: list[Worker] = []
        self.by_incarnation: dict[str, Worker] = {}
        self.publish()
        self.join()

    def worker(self, pick: int) -> Worker:
        return self.workers[pick % len(self.workers)]

    @rule()
    def join(self) -> None:
        """A worker starts, perhaps long after the others, from the newest snapshot."""
        if len(self.workers) == 4:
            return
        self.num_incarnations += 1
        incarnation = f"{self.num_incarnations:032x}"
        own = make_filter("ConcurrentMeanStdFilter", SHAPE)
        slot = SnapshotSlot({}, {DEFAULT_POLICY_ID: own}, incarnation, synchronize_filters=True)
        worker = Worker(incarnation, own, slot)
        self.workers.append(worker)
        self.by_incarnation[incarnation] = worker
        self.accepted_numbers[incarnation] = 0
        self.publisher.join(incarnation)
        self.take_up(worker, max(self.snapshots))

    @rule(pick=st.integers(0, 3), size=st.integers(1, 5), offset=st.sampled_from([0.0, 100.0]))
    def observe(self, pick: int, size: int, offset: float) -> None:
        worker = self.worker(pick)
        samples = self.rng.normal(5.0 + offset, 2.0, (size, *SHAPE)).astype(np.float32)
        worker.filter(samples)
        worker.unsent.extend(samples)

    @rule(pick=st.integers(0, 3), size=st.integers(1, 3), is_published=st.booleans())
    def a_turn_in_which_nothing_goes_wrong(self, pick: int, size: int, is_published: bool) -> None:
        self.observe(pick, size, 0.0)
        self.arrive(*self.worker(pick).send())
        if is_published:
            self.publish()
            self.take_up(self.worker(pick), max(self.snapshots))

    @rule(pick=st.integers(0, 3))
    def send(self, pick: int) -> None:
        self.network.append(self.worker(pick).send())

    @rule(pick=st.integers(0, 3))
    def send_all_unacknowledged_again(self, pick: int) -> None:
        worker = self.worker(pick)
        acked = self.accepted_numbers[worker.incarnation]
        self.network += [(worker.incarnation, number) for number in range(acked + 1, len(worker.sent) + 1)]

    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "double", "lose"]))
    def network_does(self, data, fate: str) -> None:
        if self.network:
            index = data.draw(st.integers(0, len(self.network) - 1))
            message = self.network[index] if fate == "double" else self.network.pop(index)
            if fate != "lose":
                self.arrive(*message)

    def arrive(self, incarnation: str, number: int) -> None:
        if incarnation not in self.accepted_numbers:
            return  # of an incarnation that has ended
        delta, samples = self.by_incarnation[incarnation].sent[number - 1]
        if number > self.accepted_numbers[incarnation] + 1:
            return  # a gap: the fragments before it are sent again, and this one behind them
        self.publisher.merge_deltas(incarnation, number, {DEFAULT_POLICY_ID: delta})
        if number == self.accepted_numbers[incarnation] + 1:
            self.accepted = self.accepted + samples
            self.accepted_numbers[incarnation] = number

    @rule()
    def publish(self) -> None:
        snapshot = self.publisher.next_snapshot({}, {})
        self.snapshots[snapshot.version] = (snapshot, self.accepted)

    @rule(pick=st.integers(0, 3), data=st.data())
    def a_snapshot_arrives(self, pick: int, data) -> None:
        """Any snapshot still known: late, twice or out of order."""
        self.take_up(self.worker(pick), data.draw(st.sampled_from(sorted(self.snapshots))))

    def take_up(self, worker: Worker, version: int) -> None:
        worker.slot.offer(self.snapshots[version][0])
        worker.slot.between_steps()

    @rule(pick=st.integers(0, 3), happens=st.booleans())
    def a_worker_dies(self, pick: int, happens: bool) -> None:
        if happens and len(self.workers) > 1:
            worker = self.worker(pick)
            self.workers.remove(worker)
            self.publisher.forget(worker.incarnation)
            del self.accepted_numbers[worker.incarnation]

    @rule()
    def write_checkpoint(self) -> None:
        self.checkpoint = (self.publisher.filters[DEFAULT_POLICY_ID].state(), self.accepted)

    @rule(happens=st.sampled_from([True, False, False, False]))
    def the_learner_restarts_from_its_checkpoint(self, happens: bool) -> None:
        """Workers register anew, as new incarnations with new filters."""
        if not happens:
            return
        state, samples = self.checkpoint
        self.publisher = Publisher({DEFAULT_POLICY_ID: make_filter("ConcurrentMeanStdFilter", SHAPE)})
        self.publisher.filters[DEFAULT_POLICY_ID].restore(state)
        self.accepted = samples
        self.accepted_numbers, self.snapshots, self.network = {}, {}, []
        num_workers, self.workers = len(self.workers), []
        self.publish()
        for _ in range(num_workers):
            self.join()

    @invariant()
    def the_learner_saw_every_accepted_observation_once(self) -> None:
        """R139, R142."""
        assert_saw(self.publisher.filters[DEFAULT_POLICY_ID].state(), self.accepted)
        assert self.publisher.filters[DEFAULT_POLICY_ID].buffer_count == 0

    @invariant()
    def workers_hold_the_published_state_and_what_it_does_not_acknowledge(self) -> None:
        """R140, R143, R145."""
        for worker in self.workers:
            snapshot, samples = self.snapshots[worker.slot.version]
            acked = snapshot.filter_acks.get(worker.incarnation, 0)
            in_flight = [sample for _, part in worker.sent[acked:] for sample in part]
            assert_saw(worker.filter.state(), samples + in_flight + worker.unsent)
            assert_saw(worker.filter.delta(), worker.unsent)

    def teardown(self) -> None:
        """Once the network is good again, all agree, and nothing of a living worker is missing."""
        for worker in self.workers:
            self.network.append(worker.send())
            self.send_all_unacknowledged_again(self.workers.index(worker))
        for message in sorted(self.network, key=lambda message: message[1]):
            self.arrive(*message)
        self.publish()
        for worker in self.workers:
            assert self.accepted_numbers[worker.incarnation] == len(worker.sent)
            self.take_up(worker, max(self.snapshots))
            assert_saw(worker.filter.state(), self.accepted)
            assert not worker.filter._in_flight
        self.the_learner_saw_every_accepted_observation_once()


FilterExchange.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestFilterExchange = FilterExchange.TestCase


def test_r144_without_synchronisation_the_learner_learns_and_the_worker_keeps_its_own():
    publisher = Publisher({DEFAULT_POLICY_ID: MeanStdFilter(SHAPE)})
    publisher.join("a")
    publisher.join("b")
    publisher.filters[DEFAULT_POLICY_ID].restore({"n": np.array(2), "mean": np.zeros(2), "m2": np.ones(2)})
    own = MeanStdFilter(SHAPE)
    slot = SnapshotSlot({}, {DEFAULT_POLICY_ID: own}, "a", synchronize_filters=False)
    slot.offer(publisher.next_snapshot({}, {}))
    slot.between_steps()
    assert own.count == 2, "it starts from what is known"
    for number in (1, 2, 3):
        own(np.full((4, 2), float(number)))
        publisher.merge_deltas("a", number, {DEFAULT_POLICY_ID: own.take_delta(number)})
        publisher.merge_deltas("b", number, {DEFAULT_POLICY_ID: own.as_serializable().state()})
        slot.offer(publisher.next_snapshot({}, {}))
        slot.between_steps()
        assert own.count == 2 + 4 * number
    assert publisher.filters[DEFAULT_POLICY_ID].count > own.count


def test_r147_saving_loses_no_pending_delta():
    own, learner = MeanStdFilter(SHAPE), MeanStdFilter(SHAPE)
    data = np.arange(12.0).reshape(6, 2)
    own(data[:2])
    sent = own.take_delta(1)
    own(data[2:])
    saved = own.as_serializable()
    saved.clear_buffer()
    assert saved.count == 6
    learner.merge_delta(sent)
    learner.merge_delta(own.take_delta(2))
    assert_saw(learner.state(), data)


@pytest.mark.parametrize("name", ["NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter"])
def test_deltas_that_are_acknowledged_are_forgotten_without_a_new_state(name):
    own = make_filter(name, SHAPE)
    for number in (1, 2, 3):
        own(np.full((1, 2), float(number)))
        own.take_delta(number)
    own.acknowledge(2)
    if name == "NoFilter":
        assert own.state() == {}
        return
    assert list(own._in_flight) == [3]
    assert own.count == 3
    own.adopt({"n": np.array(0), "mean": np.zeros(2), "m2": np.zeros(2)}, 2)
    assert_saw(own.state(), [[3.0, 3.0]])


def test_r142_an_old_published_version_is_ignored():
    exchange = FilterExchange()
    (worker,) = exchange.workers
    exchange.observe(0, 3, 0.0)
    exchange.arrive(*worker.send())
    exchange.publish()
    newest = max(exchange.snapshots)
    exchange.take_up(worker, newest)
    for version in (newest, newest - 1):
        exchange.take_up(worker, version)
        assert worker.slot.version == newest
        exchange.workers_hold_the_published_state_and_what_it_does_not_acknowledge()
    exchange.teardown()
