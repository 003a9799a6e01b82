"""A source of fragments and its workers in one process, over the memory network, with a fake
algorithm.

Environments, sampler, policy, codec, sessions and ledger are real, without TensorFlow. Workers can
also be real processes that connect over TCP.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from memory_endpoint import MemoryNetwork

from aiorl.acting.filters import ReturnFilter, make_filter, returns_of
from aiorl.config.parts import RunParts
from aiorl.config.schema import CommonConfig
from aiorl.config.worker import PolicyPart, TransportConfig, WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.errors import BatchError
from aiorl.learning.algorithm import AlgorithmState, Batch, LeasePlan, UpdateResult
from aiorl.net.protocol.ledger import Ledger
from aiorl.net.protocol.worker_session import WorkerSession, WorkerSettings
from aiorl.net.transport.endpoint import LearnerEndpoint, WorkerEndpoint
from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from aiorl.net.wire.encoding import encode
from aiorl.net.wire.messages import DownMessage
from aiorl.run.build import Learning
from aiorl.run.core import LearnerCore
from aiorl.run.counters import Counters
from aiorl.run.end import End
from aiorl.run.policy_group import PolicyGroup
from aiorl.run.remote_source import RemoteSource
from aiorl.run.report.results import Results
from aiorl.run.update_thread import UpdateDone, UpdateThread
from aiorl.run.worker.service import WorkerOutcome, WorkerService
from benchmarks.acting_mlp import make_acting_graph, mlp_weights

LENGTH, NUM_ENVS = 8, 2
QUICK = TransportConfig(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0, build_timeout_s=1.0)


class FakeAlgorithm:
    """Learner, with its leases and its plan, that records its inputs; its weights change with each
    update.
    """

    stores_experience = False
    mode: Literal["on_policy", "streaming"] = "on_policy"
    fragments_per_batch = 4
    max_policy_lag: int | None = None
    update_s = 0.0

    def __init__(self, config: CommonConfig, model: Any = None) -> None:
        self.batches: list[list[Mapping[str, Any]]] = []
        self.weights = mlp_weights(4, 2)
        self.fail_at = -1

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        return LeasePlan(cls.mode, cls.fragments_per_batch, 2, cls.max_policy_lag)

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        return SamplePlan("none", {}, (c.OBS, c.ACTIONS, c.REWARDS, c.LAST_OBS))

    def check_fragment(self, fragment: Mapping[str, Any]) -> None:
        if c.OBS not in fragment or fragment[c.OBS].shape != (LENGTH, NUM_ENVS, 4):
            raise BatchError(c.OBS, (LENGTH, NUM_ENVS, 4), "something else")

    def make_batch(self, fragments: Sequence[Mapping[str, Any]]) -> Batch:
        self.batches.append([dict(fragment) for fragment in fragments])
        return {}

    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        if len(self.batches) == self.fail_at:
            raise RuntimeError("the update fails on purpose")
        time.sleep(self.update_s)
        return UpdateResult({"loss": float(len(self.batches))})

    def warm_up(self) -> None:
        pass

    def get_weights(self) -> dict[str, Any]:
        return {
            name: array + np.float32(0.01 * len(self.batches))
            for name, array in self.weights.items()
        }

    def hold_state(self) -> Callable[[], AlgorithmState]:
        return lambda: AlgorithmState({})

    def set_state(self, state: AlgorithmState) -> None:
        pass

    def hurry(self) -> None:
        pass

    def weights_replaced(self) -> None:
        pass

    def hold_experience(self) -> None:
        return None


def fake_learning(
    config: CommonConfig, algorithm: FakeAlgorithm, num_envs: int = NUM_ENVS
) -> Learning:
    """Return the result of building a learner, without TensorFlow, for observations of four numbers
    and two actions.
    """
    graph, spec = make_acting_graph(4, spaces.Discrete(2), 2, algorithm.weights)
    part = WorkerPart.of(
        config.updated(
            {
                "rollout_fragment_length": LENGTH,
                "num_envs_per_worker": num_envs,
                "vectorize": "serial",
            }
        ),
        policies={DEFAULT_POLICY_ID: PolicyPart(sample_plan=algorithm.sample_plan(config))},
    )
    filters = {DEFAULT_POLICY_ID: make_filter(config.observation_filter, (4,))}
    if algorithm.sample_plan(config).return_discount is not None:
        filters[returns_of(DEFAULT_POLICY_ID)] = ReturnFilter()
    learner: Any = algorithm
    return Learning(
        PolicyGroup({DEFAULT_POLICY_ID: learner}),
        algorithm.lease_plan(config),
        part,
        {DEFAULT_POLICY_ID: {"graph": graph, "spec": spec.to_dict()}},
        filters,
        {},
    )


class MemorySource(RemoteSource):
    """Source that listens in memory, or at an address chosen by a test."""

    def endpoint_at(self, bind: str) -> LearnerEndpoint:
        training: Any = self._training
        endpoint: LearnerEndpoint = training.network.learner()
        return endpoint


class InProcess:
    """One learner and its workers, to use within a running loop.

    It is also the training of its source: a `TrainingView`, which keeps nothing.
    """

    def __init__(
        self,
        algorithm: type[FakeAlgorithm] = FakeAlgorithm,
        network: MemoryNetwork | None = None,
        **settings: Any,
    ) -> None:
        defaults = {
            "env": "CartPole-v1",
            "seed": 3,
            "num_workers": 2,
            "transport": QUICK.model_dump(),
        }
        self.config = CommonConfig.from_mapping({**defaults, **settings})
        self.network = network or MemoryNetwork()
        self.num_envs = NUM_ENVS
        self.algorithm = algorithm(self.config)
        self.events: list[str] = []
        self.worst_level = 0
        self.failure: BaseException | None = None
        self.updates: list[UpdateDone] = []
        self._updated = asyncio.Event()
        self.out_of_data = asyncio.Event()
        self._numbers = itertools.count(1)
        self.workers: list[WorkerService] = []
        self.sessions: list[WorkerSession] = []
        self._endpoints: list[WorkerEndpoint] = []
        self.outcomes: list[asyncio.Task[WorkerOutcome]] = []
        self.counters = Counters()
        self.results = Results(100, time.monotonic())
        self.ledger = Ledger()
        self.parts = RunParts.of(self.config)
        self.core = LearnerCore.of(
            "run",
            self.parts.transport.limits,
            self.parts.sample,
            counters=self.counters,
            results=self.results,
            ledger=self.ledger,
        )
        self.directory = SimpleNamespace(
            run_id="run", last_port=0, worker_log=lambda slot: Path("/dev/null")
        )
        self.end = End()
        self.saver: Any = None
        self.play = None
        self.status = ""
        self.silent_s = 0.0

    def start(self, num_workers: int = 2) -> None:
        training: Any = self
        self.source = MemorySource(
            training, self.core, transport=self.parts.transport, sample=self.parts.sample
        )
        for _ in range(num_workers):
            self.add_worker()
        self.source.admit(fake_learning(self.config, self.algorithm, self.num_envs))

    def go_on(self) -> None:
        self.core.go_on()
        self.source.pump()

    @property
    def thread(self) -> UpdateThread:
        thread = self.source.updates
        assert isinstance(thread, UpdateThread)
        return thread

    def add_worker(self) -> WorkerService:
        number = next(self._numbers)
        settings = WorkerSettings(
            f"worker{number}",
            "here",
            number,
            slot_hint=number,
            transport=QUICK.model_copy(update={"reconnect_max_s": 0.1}),
        )
        self.sessions.append(WorkerSession(settings))
        self._endpoints.append(self.network.worker())
        service = WorkerService(self._endpoints[-1], self.sessions[-1])
        self.workers.append(service)
        self.outcomes.append(asyncio.create_task(service.run()))
        return service

    def deliver(self, message: DownMessage) -> None:
        """Deliver a message to the first worker in this turn of the loop."""
        self._endpoints[0].on_message([memoryview(frame) for frame in encode(message)])

    async def updates_done(self, count: int, timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.updates) < count and self.failure is None:
                self._updated.clear()
                await self._updated.wait()

    async def close(self) -> list[WorkerOutcome]:
        self.network.fault = lambda direction, number: (0.0,)
        self.source.stop()
        await self.source.close("the test is over", final=True)
        outcomes = await asyncio.wait_for(asyncio.gather(*self.outcomes), 10)
        self.source.join(5)
        self.ledger.check()
        return outcomes

    # As a training
    # ----------------------------------------------------------------------------------------------

    def tell(self, text: str, level: int) -> None:
        self.events.append(text)
        self.worst_level = max(self.worst_level, level)

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.end.fail(error)
        self._updated.set()

    def stop(self, reason: str, *, hurry: bool = False, final: bool = True) -> None:
        self.end.set(reason, hurry=hurry, final=final)
        self.out_of_data.set()

    async def compiled(self) -> None:
        await self.source.compiled()

    def before_checkpoint(self) -> None: ...

    def begin_saving(self, learning: Learning) -> None: ...

    def compiled_in(self, took_s: float) -> None: ...

    def update_ended(self, done: UpdateDone) -> None:
        self.updates.append(done)
        self._updated.set()


@asynccontextmanager
async def running(
    num_workers: int = 2, algorithm: type[FakeAlgorithm] = FakeAlgorithm, **options: Any
) -> AsyncIterator[InProcess]:
    """Start a learner that trains with registered workers; it is closed at the end."""
    both = InProcess(algorithm, **options)
    both.start(num_workers)
    assert await both.source.wait_for_workers(num_workers, 20)
    both.go_on()
    yield both
    await both.close()


def learner_over_tcp(*, insecure: bool = False, **settings: Any) -> InProcess:
    """Start a learner without workers that listens for this user's workers, or on loopback, within
    a running loop.
    """
    network: Any = SimpleNamespace(
        learner=lambda: ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=insecure)
    )
    both = InProcess(network=network, **settings)
    both.start(0)
    both.go_on()
    return both


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for a condition that has no signal."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def with_settings(**fields: Any) -> type[FakeAlgorithm]:
    """Return a FakeAlgorithm class with other class attributes."""
    return type("ChangedAlgorithm", (FakeAlgorithm,), fields)


class BlockingEnv(gymnasium.Env[Any, Any]):
    """Environment with steps of ``step_s`` seconds that block their thread."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, step_s: float = 0.5) -> None:
        self._step_s = step_s

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._step_s)
        return np.zeros(4, np.float32), 1.0, False, False, {}


class SlowlyBuilt(BlockingEnv):
    """Environment that blocks its process, while it is built, for longer than the heartbeat
    timeout.
    """

    def __init__(self) -> None:
        super().__init__(step_s=0.0)
        ctypes.PyDLL(None).usleep(1_500_000)  # holds Python's lock meanwhile


class ExitingEnv(BlockingEnv):
    """Environment that ends its process at its first step, if it can."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise SystemExit(0)
