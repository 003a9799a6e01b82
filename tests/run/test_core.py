"""The learner's core without sockets, threads, clock and files: messages, losses of workers and ends
of updates in any order (Hypothesis).

After each step the ledger balances, no more than two updates are begun, and each train batch has the
versions and the size that the algorithm's plan allows. In the end, every worker is served and training
continues.
"""

from __future__ import annotations

import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aiorl.acting.filters import MeanStdFilter
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import BatchError
from aiorl.learning.algorithm import AlgorithmState, LeasePlan, UpdateResult
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import BROADCAST, LearnerSession, LearnerSettings
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.wire.messages import DownMessage, Samples
from aiorl.run.core import (
    MAX_BEGUN,
    BeginUpdate,
    Disconnect,
    FragmentRefused,
    LearnerCore,
    Report,
    Send,
    UpdateSkipped,
)
from aiorl.run.counters import Counters
from aiorl.run.ingest import AssembledBatch
from aiorl.run.policy_group import UpdateDone
from aiorl.run.report.results import Results

NUM_WORKERS = 3
LENGTH = 5
WEIGHTS = {DEFAULT_POLICY_ID: {"w": np.zeros(1, np.float32)}}
ON_POLICY = LeasePlan("on_policy", 4, max_policy_lag=0)
WHOLE_EPISODES = LeasePlan("on_policy", 9, max_policy_lag=0, env_steps_per_batch=4 * LENGTH)
STREAMING = LeasePlan("streaming", 2, outstanding_per_worker=3, max_policy_lag=2)
REPLAY = LeasePlan("streaming", 1, outstanding_per_worker=2, max_under_way=5)
PLANS = [ON_POLICY, WHOLE_EPISODES, STREAMING, REPLAY]
IDS = ["on-policy", "whole episodes", "streaming", "replay"]


def check_fragment(batches: Any) -> None:
    if "spoilt" in batches[DEFAULT_POLICY_ID]:
        raise BatchError("spoilt", "nothing", "something")


def learning_of(plan: LeasePlan) -> Any:
    group = SimpleNamespace(check_fragment=check_fragment, get_weights=lambda: WEIGHTS)
    filters = {DEFAULT_POLICY_ID: MeanStdFilter((1,))}
    return SimpleNamespace(lease_plan=plan, group=group, filters=filters)


def make_core(plan: LeasePlan) -> LearnerCore:
    session = LearnerSession("run", "learner", LearnerSettings(num_workers=NUM_WORKERS), Ledger())
    core = LearnerCore(session, Counters(), Results(100, 0.0))
    snapshot = core.begin(learning_of(plan), max_queued_bytes=1 << 30)
    core.admit({}, {}, snapshot, 0.0)
    core.go_on()
    return core


def fragment(version: int, lease_id: int, *, is_spoilt: bool = False) -> Samples:
    columns = {"obs": np.zeros((LENGTH, 1, 1), np.float32)}
    if is_spoilt:
        columns["spoilt"] = np.zeros((LENGTH, 1), np.float32)
    seen = MeanStdFilter((1,))
    seen(np.arange(LENGTH, dtype=np.float32)[:, None])
    return Samples(
        seq=0,
        lease_id=lease_id,
        env_steps=LENGTH,
        agent_steps=LENGTH,
        first_version=version,
        last_version=version,
        num_envs=1,
        length=LENGTH,
        batches={DEFAULT_POLICY_ID: columns},
        episodes={"lengths": np.zeros(0, np.int32), "rewards": np.zeros(0)},
        filter_deltas={DEFAULT_POLICY_ID: seen.take_delta(1)},
        perf={},
    )


def done(batch: AssembledBatch, *, publishes: bool = True, skipped: bool = False) -> UpdateDone:
    return UpdateDone(
        batch=batch,
        result=UpdateResult({"loss": 1.0}, skipped),
        weights=WEIGHTS if publishes else None,
        wait_s=0.0,
        make_batch_s=0.0,
        update_s=0.0,
        state=lambda: AlgorithmState({}),
    )


class Worker:
    """Worker process: its session, and messages on their way from and to it."""

    def __init__(self, number: int, life: int) -> None:
        self.session = WorkerSession(
            WorkerSettings(f"w{number}.{life}", slot_hint=number),
            make_incarnation=(f"i{number}.{life}.{n}" for n in itertools.count()).__next__,
        )
        self.peer = b"%d.%d" % (number, life)
        self.down: deque[tuple[bool, DownMessage]] = deque()
        self.up: deque[Any] = deque()
        self.open: deque[tuple[int, int]] = deque()  # lease and version of fragments begun

    def take_messages(self) -> None:
        self.up.extend(self.session.messages_to_send())
        for event in self.session.events():
            if isinstance(event, ev.Reincarnated):
                self.open.clear()

    def hear(self, now: float) -> None:
        is_broadcast, message = self.down.popleft()
        if is_broadcast:
            self.session.broadcast(message, now)
        else:
            self.session.receive(message, now)
        self.take_messages()

    def begin(self) -> bool:
        lease_id = self.session.start_fragment(self.session.version)
        if lease_id is not None:
            self.open.append((lease_id, self.session.version))
        return lease_id is not None

    def finish(self, now: float, *, is_spoilt: bool = False) -> None:
        lease_id, version = self.open.popleft()
        self.session.fragment_done(fragment(version, lease_id, is_spoilt=is_spoilt), now)
        self.take_messages()


class Learner:
    """A core and its workers, on a network that delivers one message at a time."""

    def __init__(self, plan: LeasePlan, num_workers: int = NUM_WORKERS) -> None:
        self.plan = plan
        self.now = 0.0
        self.core = make_core(plan)
        self.begun: deque[AssembledBatch] = deque()
        self.news: list[Any] = []
        self.workers = [Worker(number, 0) for number in range(1, num_workers + 1)]
        self.lives = itertools.count(1)
        for worker in self.workers:
            worker.session.connected(self.now)
            worker.take_messages()

    def carry_out(self) -> None:
        by_peer = {worker.peer: worker for worker in self.workers}
        for effect in self.core.effects(self.now):
            match effect:
                case Send(target, message) if target is BROADCAST:
                    for worker in self.workers:
                        worker.down.append((True, message))
                case Send(target, message):
                    if target in by_peer:
                        by_peer[target].down.append((False, message))
                case BeginUpdate(batch):
                    self.check(batch)
                    self.begun.append(batch)
                case Report(news):
                    self.news.append(news)
                case Disconnect(_, reason):
                    raise AssertionError(f"an honest worker was dropped: it {reason}")

    def check(self, batch: AssembledBatch) -> None:
        """Check that a train batch has the size and the versions of the plan."""
        lags = [
            self.core.publisher.version + len(self.begun) - fragment.message.first_version
            for fragment in batch.fragments
        ]
        if self.plan.mode == "on_policy":
            assert not any(lags)
        if self.plan.max_policy_lag is not None:
            assert max(lags) <= self.plan.max_policy_lag
        if self.plan.env_steps_per_batch is None:
            assert len(batch.fragments) == self.plan.fragments_per_batch
        else:
            assert batch.env_steps >= self.plan.env_steps_per_batch

    def deliver_up(self, worker: Worker) -> None:
        self.core.receive(worker.peer, worker.up.popleft(), self.now)
        self.carry_out()

    def deliver_all(self) -> None:
        self.carry_out()
        while any(worker.up or worker.down for worker in self.workers):
            for worker in self.workers:
                while worker.down:
                    worker.hear(self.now)
                while worker.up:
                    self.deliver_up(worker)

    def sample(self, worker: Worker) -> None:
        """Let a worker use up its leases."""
        while worker.open or worker.begin():
            worker.finish(self.now)

    def end_update(self, **options: Any) -> None:
        self.core.update_ended(done(self.begun.popleft(), **options), self.now)
        self.carry_out()

    def replace(self, index: int) -> None:
        """End a worker's process and start another."""
        former = self.workers[index]
        self.core.session.peer_gone(former.peer, self.now)
        self.core.session.mark_process_lost(
            former.session.settings.worker_id, "its process ended", self.now
        )
        worker = self.workers[index] = Worker(index + 1, next(self.lives))
        worker.session.connected(self.now)
        worker.take_messages()
        self.carry_out()

    def train(self, updates: int) -> None:
        """Train with a perfect network, at the pace of the sampling."""
        goal = self.core.counters.updates + updates
        for _ in range(200 * updates):
            if self.core.counters.updates >= goal:
                return
            self.now += 1.0
            for worker in self.workers:
                worker.session.tick(self.now)
                worker.take_messages()
                self.sample(worker)
            self.core.tick(self.now)
            self.deliver_all()
            while self.begun:
                self.end_update()
            self.deliver_all()
        raise AssertionError("training does not continue")


class AnyOrder(RuleBasedStateMachine):
    """Possible events of a learner, one rule for each."""

    plan = ON_POLICY
    num_workers = st.integers(0, NUM_WORKERS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.learner = Learner(self.plan)
        self.num_failed = 0

    @rule(index=num_workers)
    def deliver_up(self, index: int) -> None:
        if self.learner.workers[index].up:
            self.learner.deliver_up(self.learner.workers[index])

    @rule(index=num_workers, count=st.integers(1, 5))
    def deliver_down(self, index: int, count: int) -> None:
        worker = self.learner.workers[index]
        for _ in range(min(count, len(worker.down))):
            worker.hear(self.learner.now)

    @rule()
    def deliver_all(self) -> None:
        self.learner.deliver_all()

    @rule(index=num_workers)
    def begin_fragment(self, index: int) -> None:
        self.learner.workers[index].begin()

    @rule(index=num_workers, is_spoilt=st.integers(0, 9).map(lambda number: number == 0))
    def finish_fragment(self, index: int, is_spoilt: bool) -> None:
        worker = self.learner.workers[index]
        if worker.open:
            worker.finish(self.learner.now, is_spoilt=is_spoilt)

    @rule(index=num_workers)
    def sample(self, index: int) -> None:
        self.learner.sample(self.learner.workers[index])

    @rule()
    def work(self) -> None:
        """Let all workers use up their leases, while the learner is busy."""
        for worker in self.learner.workers:
            self.learner.sample(worker)
        self.learner.deliver_all()

    @rule(index=num_workers)
    def lose(self, index: int) -> None:
        self.learner.replace(index)

    @rule(seconds=st.floats(0.1, 3.0))
    def let_time_pass(self, seconds: float) -> None:
        learner = self.learner
        learner.now += seconds
        learner.core.tick(learner.now)
        learner.carry_out()
        for worker in learner.workers:
            worker.session.tick(learner.now)
            worker.take_messages()

    @precondition(lambda self: self.learner.begun)
    @rule(publishes=st.booleans(), skipped=st.booleans())
    def end_update(self, publishes: bool, skipped: bool) -> None:
        # each on-policy update publishes its weights
        publishes = publishes or self.plan.mode == "on_policy"
        self.learner.end_update(publishes=publishes, skipped=skipped)

    @precondition(lambda self: self.learner.begun)
    @rule()
    def fail_update(self) -> None:
        learner = self.learner
        batch = learner.begun.popleft()
        learner.core.update_failed(batch)
        learner.core.stand_still()
        self.num_failed += batch.env_steps

    @rule()
    def pause(self) -> None:
        self.learner.core.stand_still()
        self.learner.carry_out()

    @rule()
    def go_on(self) -> None:
        self.learner.core.go_on()
        self.learner.carry_out()

    @precondition(lambda self: self.learner.core.is_idle)
    @rule()
    def set_weights(self) -> None:
        self.learner.core.set_weights(WEIGHTS, self.learner.now)
        self.learner.carry_out()

    @invariant()
    def the_ledger_balances(self) -> None:
        core = self.learner.core
        ledger = core.session.ledger
        ledger.check()
        assert ledger.trained == core.counters.env_steps_trained
        assert ledger.discarded["the update failed"] == self.num_failed
        waiting = sum(batch.env_steps for batch in self.learner.begun)
        waiting += core.queued_fragments * LENGTH
        assert ledger.queued >= waiting
        if core.is_granting:  # otherwise discarded fragments are accounted for later
            assert ledger.queued == waiting

    @invariant()
    def few_updates_are_begun(self) -> None:
        core = self.learner.core
        assert len(self.learner.begun) <= MAX_BEGUN
        assert core.is_idle == (not self.learner.begun)

    @invariant()
    def skipped_updates_are_reported(self) -> None:
        reported = [news for news in self.learner.news if isinstance(news, UpdateSkipped)]
        assert len(reported) <= self.learner.core.counters.updates_skipped

    def teardown(self) -> None:
        learner = self.learner
        learner.deliver_all()
        while learner.begun:
            learner.end_update()
        learner.core.go_on()
        learner.deliver_all()
        learner.train(3)
        learner.core.session.ledger.check()
        assert len(learner.core.session.slots) == NUM_WORKERS


@pytest.mark.parametrize("plan", PLANS, ids=IDS)
def test_the_ledger_balances_in_any_order_of_events(plan: LeasePlan) -> None:
    machine = type("Machine", (AnyOrder,), {"plan": plan})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


# Grants of both kinds
# --------------------------------------------------------------------------------------------------


def granted(learner: Learner) -> int:
    return learner.core.session.leases.outstanding()


@pytest.fixture(params=PLANS, ids=IDS)
def learner(request: pytest.FixtureRequest) -> Learner:
    made = Learner(request.param)
    made.deliver_all()
    return made


def test_what_the_next_train_batch_needs_is_granted_to_whoever_has_joined(
    learner: Learner,
) -> None:
    assert granted(learner) >= min(learner.plan.fragments_per_batch, NUM_WORKERS)
    learner.train(4)
    assert all(worker.session.sampled_total for worker in learner.workers)


def test_fragments_of_a_lost_worker_are_granted_to_others(learner: Learner) -> None:
    before = granted(learner)
    learner.core.session.mark_lost(1, "it is gone", learner.now)
    learner.carry_out()
    assert granted(learner) >= min(before, learner.plan.fragments_per_batch, NUM_WORKERS - 1)
    assert not learner.core.session.leases.outstanding(1)
    assert learner.core.session.slots == [2, 3]


def test_a_refused_fragment_is_granted_again(learner: Learner) -> None:
    worker = learner.workers[0]
    assert worker.begin()
    worker.finish(learner.now, is_spoilt=True)
    learner.deliver_up(worker)
    learner.carry_out()
    assert any(isinstance(news, FragmentRefused) for news in learner.news)
    assert learner.core.session.ledger.discarded["malformed"] == LENGTH
    learner.workers.remove(worker)
    learner.train(2)


def test_nothing_is_granted_during_a_pause_and_training_goes_on_afterwards(
    learner: Learner,
) -> None:
    learner.train(1)
    learner.core.is_enough = lambda: True
    learner.train(1)
    before = granted(learner)
    learner.replace(0)
    learner.deliver_all()
    assert granted(learner) <= before
    assert learner.core.is_still
    learner.core.is_enough = lambda: False
    learner.core.go_on()
    learner.train(2)


def test_filter_deltas_count_once_however_their_fragments_are_used(learner: Learner) -> None:
    learner.train(5)
    for worker in learner.workers:
        learner.sample(worker)
    learner.deliver_all()
    learner.core.set_weights(WEIGHTS, learner.now)
    learner.core.go_on()
    learner.deliver_all()
    merged = learner.core.publisher.filters[DEFAULT_POLICY_ID].state()
    waiting = learner.core.queued_fragments
    if learner.plan.mode == "on_policy":
        assert waiting == 0, "they are of a former version"
    assert merged["n"] == learner.core.counters.env_steps_sampled


def test_a_fragment_that_arrives_after_the_end_is_counted_but_in_no_result(
    learner: Learner,
) -> None:
    worker = learner.workers[0]
    assert worker.begin()
    learner.core.stop()
    lease_id, version = worker.open.popleft()
    sent = fragment(version, lease_id)
    episodes = {"lengths": np.array([3], np.int32), "rewards": np.array([1.0])}
    worker.session.fragment_done(sent._replace(episodes=episodes), learner.now)
    worker.take_messages()
    learner.deliver_all()
    assert learner.core.counters.env_steps_sampled == LENGTH
    assert learner.core.results.episodes_total == 0
    assert not learner.begun
