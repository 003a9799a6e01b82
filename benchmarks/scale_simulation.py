"""The learner's cost for each of many workers: sessions, leases, ledger and heartbeats of the real
parts, no sockets.

The peers only say what workers would say, in simulated time; only the learner's work is timed. Its
ten checks a second are part of it, updates take no time.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass

from aiorl.config.schema import CommonConfig
from aiorl.learning.algorithm import AlgorithmState, UpdateResult
from aiorl.net.protocol.learner_session import LearnerSession, LearnerSettings
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.wire import messages as m
from aiorl.run.core import BeginUpdate, LearnerCore, Send
from aiorl.run.policy_group import UpdateDone
from benchmarks.scale_parts import LENGTH, NUM_ENVS, NoTraining, idle_learning, make_samples

__all__ = ["Costs", "Crowd", "costs_of"]

ROUNDS_OF = 4000
"""Fewest events of a kind to time: few workers are measured over many rounds."""
_TICKS_PER_S = 10
_JOINS_PER_S = 64


@dataclass(frozen=True, slots=True)
class Costs:
    """Work of the learner, in microseconds, and its memory.

    Attributes:
        join_us: for each worker that joins.
        fragment_us: for each fragment: accept, queue and acknowledge it, train on it, lease the
            next one.
        idle_us: for each worker and second in which nothing happens: its heartbeat and ours, ten
            checks.
        return_us: for each worker whose process ends, and whose successor joins.
        reconnect_us: for each worker that comes back over another connection.
        update_us: for each broadcast, whatever the number of workers.
        session_bytes: memory for each worker.
    """

    join_us: float
    fragment_us: float
    idle_us: float
    return_us: float
    reconnect_us: float
    update_us: float
    session_bytes: float


class Crowd:
    """A learner and its workers, numbered from 0, in simulated time.

    Attributes:
        core: the learner's core.
        session: its session.
        spent_s: time that the learner has worked.
        now: simulated seconds.
    """

    def __init__(self, peers: int) -> None:
        """Begin a run that no worker has joined."""
        config = CommonConfig(env="CartPole-v1", train_batch_size=max(1, peers // 4))
        training = NoTraining(config)
        learning = idle_learning(config)
        settings = LearnerSettings(max_workers=peers)
        self.session = LearnerSession("run", "life", settings, Ledger())
        self.core = LearnerCore(self.session, training.counters, training.results)
        self.spent_s = self.now = 0.0
        self._looked: object = None
        self._lives, self._connections, self._sent = [0] * peers, [0] * peers, [0] * peers
        self._granted: dict[int, m.Lease] = {}
        self._taken: dict[int, int] = {}
        self._weights = learning.group.get_weights()
        snapshot = self.core.begin(learning, max_queued_bytes=1 << 40)
        self.core.admit(learning.worker_part.to_dict(), {}, snapshot, self.now)
        self.core.go_on()

    @property
    def _peers(self) -> range:
        return range(len(self._lives))

    def join(self, number: int) -> None:
        """Say hello as a new incarnation over a new connection."""
        self._lives[number] += 1
        self._connections[number] += 1
        self._sent[number] = 0
        self._forget(number)
        self._hello(number)

    def reconnect(self, number: int) -> None:
        """Lose the connection, and say hello over another one."""
        self._gone(number)
        self._connections[number] += 1
        self._hello(number)

    def lose(self, number: int) -> None:
        """End the process of a worker."""
        self._gone(number)
        self._act(
            lambda: self.session.mark_process_lost(f"w{number}", "its process ended", self.now)
        )

    def bring(self, number: int) -> bool:
        """Send a fragment if the worker has a lease for it."""
        lease, taken = self._granted.get(number), self._taken.get(number, 0)
        if lease is None or taken >= lease.fragments:
            return False
        self._taken[number] = taken + 1
        self._sent[number] += 1
        sent = self._sent[number]
        samples = make_samples(self.session.version, lease.lease_id, sent, sent * LENGTH * NUM_ENVS)
        self._receive(number, samples)
        return True

    def beat(self, number: int) -> None:
        """Send a heartbeat."""
        self._receive(number, m.Beat(self._sent[number] * LENGTH * NUM_ENVS, "sampling", 0.0))

    def second(self) -> None:
        """Let a second pass in which all workers are alive."""
        for _ in range(_TICKS_PER_S):
            self.now += 1 / _TICKS_PER_S
            self._act(self._tick)
        for number in self._peers:
            self.beat(number)

    def publish(self) -> None:
        """Publish a version."""
        self._act(lambda: self.core.set_weights(self._weights, self.now))

    # The learner, as `RemoteSource` does it
    # ---------------------------------------------------------------------

    def _tick(self) -> None:
        self.core.tick(self.now)
        pacing = self.session.leases.pacing
        assert pacing is not None
        self._looked = (
            set(self.session.slots),
            pacing.slow_workers(self.now),
            [each.in_env_s for each in self.session.workers],
        )

    def _act(self, work: Callable[[], None]) -> None:
        """Let the learner work, and keep the leases that it grants."""
        began = time.thread_time()
        work()
        messages: list[Send] = []
        while effects := self.core.effects(self.now):
            for effect in effects:
                match effect:
                    case Send():
                        messages.append(effect)
                    case BeginUpdate(batch):
                        done = UpdateDone(
                            batch, UpdateResult({}), None, 0.0, 0.0, 0.0, lambda: AlgorithmState({})
                        )
                        self.core.update_ended(done, self.now)
        self.spent_s += time.thread_time() - began
        for sent in messages:
            if sent.target is not None and isinstance(sent.message, m.Lease):
                self._granted[int(sent.target.partition(b".")[0])] = sent.message

    def _receive(self, number: int, message: m.Message) -> None:
        peer = self._peer(number)
        self._act(lambda: self.core.receive(peer, message, self.now))

    def _hello(self, number: int) -> None:
        life = f"{number}.{self._lives[number]}"
        self._receive(
            number, m.Hello(m.PROTOCOL_VERSION, "", f"w{number}", life, number + 1, "host", 1)
        )

    def _gone(self, number: int) -> None:
        peer = self._peer(number)
        self._act(lambda: self.session.peer_gone(peer, self.now))

    def _forget(self, number: int) -> None:
        self._granted.pop(number, None)
        self._taken.pop(number, None)

    def _peer(self, number: int) -> bytes:
        return b"%d.%d" % (number, self._connections[number])


def costs_of(peers: int) -> Costs:
    """Measure the learner's costs with this number of workers."""
    tracemalloc.start()
    crowd = _joined(peers, Crowd(peers))
    session_bytes = tracemalloc.get_traced_memory()[0] / peers
    tracemalloc.stop()
    rounds = math.ceil(ROUNDS_OF / peers)
    gc.collect()
    join_s = 0.0
    for _ in range(min(rounds, 100)):
        crowd = Crowd(peers)
        before = crowd.spent_s
        _joined(peers, crowd)
        join_s += (crowd.spent_s - before) / min(rounds, 100)
    every = range(peers)
    _spent(crowd, lambda: [crowd.bring(number) for number in every])
    before, fragments = (
        crowd.spent_s,
        sum(crowd.bring(number) for _ in range(rounds) for number in every),
    )
    fragment_s = (crowd.spent_s - before) / fragments
    idle_s = sum(_spent(crowd, crowd.second) for _ in range(min(rounds, 20))) / min(rounds, 20)
    some = [every[place % peers] for place in range(0, 500 * 7, 7)]

    def come_again() -> None:
        for number in some:
            crowd.now += 1 / _JOINS_PER_S
            crowd.lose(number)
            crowd.join(number)

    def reconnect() -> None:
        for number in some:
            crowd.now += 1 / _JOINS_PER_S
            crowd.reconnect(number)

    return_s, reconnect_s = _spent(crowd, come_again), _spent(crowd, reconnect)
    update_s = sum(_spent(crowd, crowd.publish) for _ in range(100))
    crowd.session.ledger.check()
    return Costs(
        1e6 * join_s / peers,
        1e6 * fragment_s,
        1e6 * idle_s / peers,
        1e6 * return_s / len(some),
        1e6 * reconnect_s / len(some),
        1e6 * update_s / 100,
        session_bytes,
    )


def _joined(peers: int, crowd: Crowd) -> Crowd:
    """Let all workers join as fast as the learner admits them."""
    for number in range(peers):
        crowd.now += 1 / _JOINS_PER_S
        crowd.join(number)
    return crowd


def _spent(crowd: Crowd, act: Callable[[], object]) -> float:
    before = crowd.spent_s
    act()
    return crowd.spent_s - before


if __name__ == "__main__":
    print(json.dumps(asdict(costs_of(int(sys.argv[1])))))
