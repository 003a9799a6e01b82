"""Streaming run in simulated time: the real sessions, lease book, budget and queue; no sockets,
processes or updates.

Workers take the given time for a fragment, within 10 %; messages take half a millisecond. On a
shared host, workers, updates and other work compete for its cores.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from aiorl.config.worker import TransportConfig
from aiorl.learning.algorithm import LeasePlan
from aiorl.net.protocol import events as ev
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.net.protocol.pacing import Pacing
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.wire import messages as m
from aiorl.run.ingest import STALE, BatchAssembler

__all__ = ["Host", "Simulated", "Simulation"]

_LATENCY_S = 0.0005
_TICK_S = 0.25
_STEPS = 100
_NO_BEATS = TransportConfig(heartbeat_interval_s=1e9, heartbeat_timeout_s=1e9)


@dataclass(frozen=True, slots=True)
class Host:
    """Host of a whole run, shared with other work: each job takes as long as the others allow.

    Attributes:
        cores: number of cores, each with its own queue of jobs.
        deviation: standard deviation of the logarithm of a job's work; the given work is the
            median.
        others_s: mean duration of a job of others, each time on another core.
        others_every_s: mean time between these jobs.
    """

    cores: int = 2
    deviation: float = 1.0
    others_s: float = 1.0
    others_every_s: float = 1.2


@dataclass(slots=True)
class Simulated:
    """Outcome of a run after the warm-up.

    Attributes:
        fragments_per_s: fragments trained on per second.
        discarded: share of sampled fragments that were not trained on.
        lags: policy versions between sampling and training, for each fragment.
        by_slot: number of fragments from each worker.
    """

    fragments_per_s: float = 0.0
    discarded: float = 0.0
    lags: list[int] = field(default_factory=list)
    by_slot: dict[int, int] = field(default_factory=dict)


class _Node:
    """Worker with one sampler that begins the next fragment when the previous one is done."""

    def __init__(self, number: int, fragment_s: float) -> None:
        self.peer = b"%d" % number
        self.session = WorkerSession(
            WorkerSettings(f"worker{number}", slot_hint=number, transport=_NO_BEATS),
            lambda: f"life{number}",
        )
        self.fragment_s = fragment_s
        self.busy = False


class _Core:
    """Core that shares its speed evenly among its jobs."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []
        self._done_s = 0.0  # work done for each job that was there all the time
        self._since = 0.0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, work_s: float, call: Callable[[], None]) -> None:
        """Begin a job; call when it is done."""
        self._go_on()
        heapq.heappush(self._jobs, (self._done_s + work_s, next(self._simulation.numbers), call))
        self._look_again()

    def _go_on(self) -> None:
        now = self._simulation.now
        if self._jobs:
            self._done_s += (now - self._since) / len(self._jobs)
        self._since = now

    def _look_again(self) -> None:
        self._turn += 1
        turn = self._turn
        if self._jobs:
            wait_s = (self._jobs[0][0] - self._done_s) * len(self._jobs)
            self._simulation.after(max(0.0, wait_s), lambda: self._end_first(turn))

    def _end_first(self, turn: int) -> None:
        if turn == self._turn:
            self._go_on()
            _, _, call = heapq.heappop(self._jobs)
            self._look_again()
            call()


class Simulation:
    """One run; it has no heartbeats because nothing fails.

    Attributes:
        now: seconds from its beginning.
        numbers: counter for everything that needs an order.
    """

    def __init__(
        self,
        fragment_s: Sequence[float],
        plan: LeasePlan,
        update_s: float,
        *,
        seed: int = 0,
        host: Host | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            fragment_s: seconds per fragment, for each worker.
            plan: streaming plan of the algorithm.
            update_s: seconds per update.
            seed: seed of the random variation of times.
            host: host shared by updates and workers, with times as core time; None gives each its
                own.
        """
        self._plan = plan
        self._update_s = update_s
        self._random = random.Random(seed)
        self._others_random = random.Random(seed)
        self.now = 0.0
        self._host = host
        self._cores = [_Core(self) for _ in range(host.cores)] if host is not None else []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self._learner = LearnerSession("run", "life0", LearnerSettings(_NO_BEATS))
        self._pacing = Pacing(
            plan.fragments_per_batch, plan.max_policy_lag, plan.outstanding_per_worker
        )
        self._learner.leases.begin_streaming(self._pacing)
        self._assembler = BatchAssembler(plan)
        self._thread: list[tuple[ev.SamplesAccepted, ...]] = []  # the running batch first
        self._idle_since = 0.0
        self._waited_s = 0.0
        self._is_warm = False
        self._sampled = self._trained = self._discarded = 0
        self._result = Simulated()
        self._nodes = {
            node.peer: node for node in map(_Node, range(1, len(fragment_s) + 1), fragment_s)
        }
        self._learner.begin({}, {}, 0.0)
        self._publish(0)
        for node in self._nodes.values():
            node.session.connected(0.0)
        for node in self._nodes.values():
            self._take_up(node)
        self.after(_TICK_S, self._tick)
        if host is not None:
            self._let_others_work(host)

    def run(self, seconds: float, warm_up_s: float) -> Simulated:
        """Simulate for the given time, and count from the end of the warm-up.

        Raises:
            InternalError: the ledger or the leases do not add up.
        """
        self.after(warm_up_s, self._begin_to_count)
        while self._due[0][0] <= seconds:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self._learner.ledger.check()
        if self._learner.leases.pacing is not None:
            self._learner.leases.pacing.check_valid()
        self._result.fragments_per_s = self._trained / (seconds - warm_up_s)
        self._result.discarded = self._discarded / max(1, self._sampled)
        return self._result

    def _begin_to_count(self) -> None:
        self._is_warm = True

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call after the given time."""
        heapq.heappush(self._due, (self.now + seconds, next(self.numbers), call))

    def _work(self, seconds: float, call: Callable[[], None]) -> None:
        """Call when the work is done."""
        if self._host is None:
            self.after(seconds * max(0.2, self._random.gauss(1.0, 0.1)), call)
        else:
            seconds *= self._random.lognormvariate(0.0, self._host.deviation)
            self._random.choice(self._cores).begin(seconds, call)

    def _let_others_work(self, host: Host) -> None:
        chance = self._others_random
        chance.choice(self._cores).begin(chance.expovariate(1.0 / host.others_s), lambda: None)
        self.after(
            chance.expovariate(1.0 / host.others_every_s), lambda: self._let_others_work(host)
        )

    # Workers
    # ----------------------------------------------------------------------------------------------

    def _take_up(self, node: _Node) -> None:
        """Send a worker's messages, and begin the fragments that it may sample."""
        session = node.session
        if not node.busy:
            lease_id = session.start_fragment(session.version)
            if lease_id is not None:
                node.busy = True
                version = session.version
                self._work(node.fragment_s, lambda: self._finish(node, lease_id, version))
        session.events()
        for message in session.messages_to_send():
            self.after(_LATENCY_S, lambda message=message: self._arrive(node, message))  # type: ignore[misc]

    def _finish(self, node: _Node, lease_id: int, version: int) -> None:
        node.busy = False
        samples = m.Samples(
            0,
            lease_id,
            _STEPS,
            _STEPS,
            version,
            node.session.version,
            1,
            _STEPS,
            {},
            {},
            {},
            {"iters": 1.0},
        )
        node.session.fragment_done(samples, self.now)
        self._take_up(node)

    # The learner, as in `RemoteSource`
    # ----------------------------------------------------------------------------

    def _arrive(self, node: _Node, message: m.Message) -> None:
        self._learner.receive(node.peer, message, self.now)
        self._pump()

    def _pump(self) -> None:
        for event in self._learner.events():
            if isinstance(event, ev.SamplesAccepted):
                self._sampled += self._is_warm
                self._result.by_slot[event.slot] = (
                    self._result.by_slot.get(event.slot, 0) + self._is_warm
                )
                self._assembler.add(event)
        self._feed()
        waiting = (
            self._assembler.queued_fragments + len(self._thread) * self._plan.fragments_per_batch
        )
        self._learner.stream(
            waiting, max(0, self._learner.version - (self._plan.max_policy_lag or _STEPS))
        )
        for target, message in self._learner.messages_to_send():
            if target is None:
                for node in self._nodes.values():
                    self.after(
                        _LATENCY_S,
                        partial(self._hear, node, message, True),
                    )
            else:
                node = self._nodes[target]
                self.after(_LATENCY_S, partial(self._hear, node, message, False))

    def _hear(self, node: _Node, message: m.DownMessage, is_broadcast: bool) -> None:
        if is_broadcast:
            node.session.broadcast(message, self.now)
        else:
            node.session.receive(message, self.now)
        self._take_up(node)

    def _feed(self) -> None:
        while len(self._thread) < 2:
            self._assembler.prune(ahead=len(self._thread))
            if not self._assembler.is_ready:
                break
            self._thread.append(self._assembler.take().fragments)
            if len(self._thread) == 1:
                self._waited_s = self.now - self._idle_since
                self._work(self._update_s, self._update)
        for reason, fragment in self._assembler.take_discarded():
            self._learner.ledger.discard(reason, fragment.message.env_steps)
            self._discarded += self._is_warm
            if reason == STALE:
                self._pacing.outdated(fragment.slot)

    def _update(self) -> None:
        fragments = self._thread.pop(0)
        waited_s, self._waited_s, self._idle_since = self._waited_s, 0.0, self.now
        if self._thread:
            self._work(self._update_s, self._update)
        version = self._learner.version
        if self._is_warm:
            self._trained += len(fragments)
            self._result.lags += [
                version - fragment.message.first_version for fragment in fragments
            ]
        self._learner.ledger.train(sum(fragment.message.env_steps for fragment in fragments))
        self._pacing.updated(waited_s, self._assembler.queued_fragments, self.now)
        self._publish(version + 1)
        self._assembler.set_version(version + 1)
        self._pump()

    def _publish(self, version: int) -> None:
        self._learner.publish(m.Snapshot(version, {"p": {"w": np.zeros(1)}}, {}, {}, {}), self.now)

    def _tick(self) -> None:
        self._learner.tick(self.now)
        self._pump()
        self.after(_TICK_S, self._tick)
