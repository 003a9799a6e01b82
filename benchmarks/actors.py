"""Actors on this host against Ray and a bare pair of sockets: calls, batches, a broadcast, start
and memory; and sampling by actors against a run.

All three systems do `benchmarks.actor_work`, in new processes in each round. Ray has its own virtual
environment, which is made at first use (0.4 GB, in the user's cache directory).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

import aiorl
from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.fragment import Fragment, SamplePlan
from aiorl.sampling.lockstep import Lockstep
from benchmarks.acting_mlp import make_onnx_policy, mlp_weights
from benchmarks.actor_work import KINDS
from benchmarks.measure import alternate, learner_rate, middle_of
from benchmarks.result import Figure
from benchmarks.sampler import ENV_ID, make_lockstep_env
from benchmarks.virtual_environment import virtual_environment

__all__ = ["Sampler", "actors_calls", "actors_sampling", "sampled_by_handle"]

PACKAGES = ("ray>=2.60,<3", "numpy")
ROUNDS = 5
NUM_ENVS = 64
LENGTH = 64
SAMPLING_S = 4.0
WARM_S = 1.0
_IMPALA_COLUMNS = (
    c.OBS,
    c.ACTIONS,
    c.ACTION_LOGP,
    c.REWARDS,
    c.TERMINATEDS,
    c.TRUNCATEDS,
    c.BOOTSTRAP_VALUES,
    c.LAST_OBS,
)
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class _Target:
    """Figure of all systems, with its bounds.

    Attributes:
        key: its name in the report of a system.
        name: its name for people.
        unit: its unit.
        of_ray: bound of aiorl's value over Ray's.
        of_bare: the same over that of the bare pair; None for none.
        smaller_is_better: the bounds are upper ones.
    """

    key: str
    name: str
    unit: str
    of_ray: float
    of_bare: float | None = None
    smaller_is_better: bool = True

    @property
    def is_of_calls(self) -> bool:
        """Return whether it depends on the kind of the methods that are called."""
        return self.of_bare is not None


_TARGETS = (
    _Target("round_trip_ms", "round trip", "ms", 0.3, 1.8),
    _Target("batch_ms", "round trip with a batch of 7 kB", "ms", 0.3, 1.8),
    _Target(
        "batches_per_s",
        "batches of 7 kB, 8 calls in flight",
        "1/s",
        4.0,
        0.6,
        smaller_is_better=False,
    ),
    _Target("broadcast_ms", "6.7 MB to two actors", "ms", 0.7),
    _Target("start_s", "process start to the first answer", "s", 0.1),
    _Target("memory_mib", "memory with two actors (PSS)", "MiB", 0.25),
)


def actors_calls() -> list[Figure]:
    """Measure calls of two actors with plain and with asynchronous methods, against Ray and the bare
    pair.
    """
    ray = str(virtual_environment("ray", PACKAGES) / "bin" / "python")
    commands = {
        "aiorl": [sys.executable, "-m", "benchmarks.actors_aiorl"],
        "Ray": [ray, "-m", "benchmarks.actors_ray"],
        "the bare pair": [sys.executable, "-m", "benchmarks.actors_bare"],
    }
    figures = []
    for kind in KINDS:
        rounds = [
            {name: _figures_of([*command, kind]) for name, command in commands.items()}
            for _ in range(ROUNDS)
        ]
        for target in _TARGETS:
            if kind == "plain" or target.is_of_calls:
                figures += _against_others(target, kind, rounds)
    return figures


def _against_others(
    target: _Target, kind: str, rounds: Sequence[Mapping[str, Mapping[str, float]]]
) -> list[Figure]:
    figures = []
    for name, bound in (("Ray", target.of_ray), ("the bare pair", target.of_bare)):
        if bound is None:
            continue
        value, baseline = middle_of(
            [(each["aiorl"][target.key], each[name][target.key]) for each in rounds]
        )
        figures.append(
            Figure(
                f"actors/{target.name}, {kind} methods, against {name}",
                value,
                target.unit,
                baseline,
                target_ratio=bound,
                smaller_is_better=target.smaller_is_better,
            )
        )
    return figures


def actors_sampling() -> list[Figure]:
    """Measure 64 CartPoles that an actor samples, two calls in flight, against the worker of a run
    of IMPALA with the same sampler, which sends the same columns.
    """
    return [_sampling(vectorize) for vectorize in ("serial", "native")]


def _sampling(vectorize: str) -> Figure:
    value, baseline = alternate(
        lambda: float(uvloop.run(sampled_by_handle(vectorize))),
        lambda: _sampled_by_run(vectorize),
        ROUNDS,
    )
    name = f"actors/sampling, {vectorize} CartPole x {NUM_ENVS}"
    return Figure(name, value, "env steps/s", baseline, target_ratio=0.9)


class Sampler:
    """The sampler of a run's worker, in an actor."""

    def __init__(self, vectorize: str) -> None:
        """Make the environments and a policy.

        Args:
            vectorize: "serial" for Python environments, "native" for Gymnasium's vectorised one.
        """
        env = make_lockstep_env(ENV_ID, {}, NUM_ENVS, vectorize)
        policy = make_onnx_policy(4, env.action_space, 2, mlp_weights(4, 2))
        plan = SamplePlan("none", {}, _IMPALA_COLUMNS)
        config = WorkerConfig(rollout_fragment_length=LENGTH, seed=0)
        self._sampler = Lockstep(env, policy, plan, config)

    def sample(self) -> Fragment:
        """Return the next fragment, [64, 64] steps."""
        return self._sampler.sample()


async def sampled_by_handle(vectorize: str) -> float:
    """Return env steps per second that one actor samples, once it is warm."""
    steps = 0
    began = None
    async with aiorl.Actors() as actors:
        sampler = await actors.start(Sampler, vectorize)
        is_warm_at = time.perf_counter() + WARM_S
        async for _, fragment in actors.as_ready([sampler], "sample", in_flight=2):
            now = time.perf_counter()
            if began is not None:
                steps += fragment.env_steps
                if now >= began + SAMPLING_S:
                    return float(steps / (now - began))
            elif now >= is_warm_at:
                began = now
    raise RuntimeError("the actor was lost")


def _sampled_by_run(vectorize: str) -> float:
    options = {
        "env": ENV_ID,
        "algo": "impala",
        "num-workers": 1,
        "num-envs-per-worker": NUM_ENVS,
        "vectorize": vectorize,
        "rollout-fragment-length": LENGTH,
        "train-batch-size": 2 * NUM_ENVS * LENGTH,
        "threads": 1,
    }
    return learner_rate(options, SAMPLING_S)


def _figures_of(command: Sequence[str]) -> dict[str, float]:
    """Run a system's program; return what it reports, how long it took to start, and its memory.

    Raises:
        RuntimeError: it failed.
    """
    began = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
    ) as program:
        assert program.stdout is not None
        try:
            is_ready = program.stdout.readline() == "ready\n"
            start_s = time.monotonic() - began
            line = program.stdout.readline()
            if not is_ready or not line:
                raise RuntimeError(f"{' '.join(command)} failed; its errors are above")
            figures: dict[str, float] = json.loads(line)
            return {**figures, "start_s": start_s, "memory_mib": _memory_mib(program.pid)}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.communicate(timeout=30)  # closes its standard input, which ends it
            program.kill()


def _memory_mib(pid: int) -> float:
    """Return the proportional set size of a process and of all that it has started."""
    program = psutil.Process(pid)
    total = 0
    for process in [program, *program.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total / 2**20
