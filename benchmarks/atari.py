"""Atari Pong, 84x84x4 uint8, acting with the Nature CNN: the sampler on one core, and its fragments
on the wire.

The sampler's baseline is a minimal loop: ale-py's emulator, grey frames, four frames per step with
the maximum of the last two, OpenCV's resize, the same network in ONNX Runtime, and the same
recorded columns. It has no GAE and no framework.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.config.worker import WorkerConfig
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.env.base_env import LockstepEnv
from aiorl.env.wrapping import Wrapping
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode
from aiorl.net.wire.encoding import encode
from aiorl.sampling.lockstep import Lockstep
from benchmarks.measure import alternate, pin_to_one_core, run_fresh
from benchmarks.result import Figure
from benchmarks.sampler import PPO_COLUMNS, make_lockstep_env

__all__ = ["atari_sampler_1", "atari_sampler_8", "atari_vector_8", "atari_wire"]

ENV_ID = "ALE/Pong-v5"
TARGET_RATIO = 0.7
TARGET_VECTOR = 1.3
TARGET_WIRE = 0.1
ROUND_S = 2.0
ROUNDS = 5
FRAGMENT = 64
RANDOM_STEPS = 300
NUM_ACTIONS = 6
SIDE = 84
STACK = 4
SKIP = 4
STICKY = 0.25  # probability that the emulator of a v5 game repeats the last action

Advance = Callable[[], int]
Pixels = NDArray[np.uint8]


def atari_sampler_1() -> list[Figure]:
    """Measure one game."""
    return _measured(1)


def atari_sampler_8() -> list[Figure]:
    """Measure eight games, stepped in turn and evaluated together."""
    return _measured(8)


def _measured(num_envs: int) -> list[Figure]:
    with TemporaryDirectory() as directory:
        run_fresh("benchmarks.atari", "export", directory)
        value, baseline = run_fresh("benchmarks.atari", "sample", directory, str(num_envs))
    return [
        Figure(
            f"sampler, Pong x {num_envs}, Nature CNN",
            value,
            "steps/s",
            baseline,
            target_ratio=TARGET_RATIO,
        )
    ]


def atari_vector_8() -> list[Figure]:
    """Measure eight games in ale-py's vector environment against Gymnasium's wrappers, on all
    cores.
    """
    with TemporaryDirectory() as directory:
        run_fresh("benchmarks.atari", "export", directory)
        value, baseline = run_fresh("benchmarks.atari", "vector", directory, "8")
    return [
        Figure(
            "sampler, Pong x 8, ale-py's vector env",
            value,
            "steps/s",
            baseline,
            target_ratio=TARGET_VECTOR,
        )
    ]


def atari_wire() -> list[Figure]:
    """Measure fragments of eight games after some hundred random steps: size on the wire, and the
    codec's rates.
    """
    ratio, encode_rate, decode_rate = run_fresh("benchmarks.atari", "wire")
    return [
        Figure(
            "wire, Pong fragments",
            ratio,
            "of raw bytes",
            target=TARGET_WIRE,
            smaller_is_better=True,
        ),
        Figure("wire, Pong fragments, encode", encode_rate, "MB/s"),
        Figure("wire, Pong fragments, decode", decode_rate, "MB/s"),
    ]


# The network
# --------------------------------------------------------------------------------------------------


def export_nature_cnn(directory: Path) -> None:
    """Write the acting graph, spec and weights of the built-in network for images."""
    from aiorl.acting.distributions import make_distribution
    from aiorl.learning.models.catalog import build_model
    from aiorl.learning.models.export import export_acting_graph

    distribution = make_distribution(spaces.Discrete(NUM_ACTIONS))
    model = build_model(
        (SIDE, SIDE, STACK), "uint8", distribution, {"vf_share_layers": True}, seed=0
    )
    save_policy(directory, *export_acting_graph(model), model.get_weights())


def save_policy(
    directory: Path, graph: bytes, spec: ActingSpec, weights: Mapping[str, NDArray[Any]]
) -> None:
    """Write an acting graph with its spec and weights."""
    (directory / "graph.onnx").write_bytes(graph)
    (directory / "spec.json").write_text(json.dumps(spec.to_dict()), encoding="utf-8")
    np.savez(directory / "weights.npz", *[weights[weight.name] for weight in spec.weights])


def load_policy(directory: Path) -> OnnxPolicy:
    """Return the policy that `save_policy` wrote."""
    spec = ActingSpec.from_dict(json.loads((directory / "spec.json").read_text(encoding="utf-8")))
    policy = OnnxPolicy((directory / "graph.onnx").read_bytes(), spec)
    with np.load(directory / "weights.npz") as saved:
        policy.set_weights(
            {weight.name: saved[f"arr_{index}"] for index, weight in enumerate(spec.weights)}
        )
    return policy


# The sampler
# --------------------------------------------------------------------------------------------------


def make_subject(
    policy: OnnxPolicy, num_envs: int, steps: int, vectorize: str = "serial"
) -> Advance:
    """Return a sampler of Pong with the DeepMind preprocessing, in lockstep."""
    plan = SamplePlan("gae", {"gamma": 0.99, "lam": 0.95}, PPO_COLUMNS)
    settings = WorkerConfig(rollout_fragment_length=steps, clip_rewards=1.0, seed=0)
    sampler = Lockstep(make_env(num_envs, vectorize), policy, plan, settings)
    return lambda: sampler.sample().env_steps


def make_env(num_envs: int, vectorize: str = "serial") -> LockstepEnv:
    """Return Pong as a worker builds it."""
    return make_lockstep_env(ENV_ID, {}, num_envs, vectorize, wrapping=Wrapping(deepmind=True))


class Emulator:
    """One game, run by ale-py alone."""

    def __init__(self, seed: int) -> None:
        """Load the game."""
        import ale_py
        import cv2

        cv2.setNumThreads(1)
        self._resize = functools.partial(
            cv2.resize, dsize=(SIDE, SIDE), interpolation=cv2.INTER_AREA
        )
        self._ale = ale = ale_py.ALEInterface()
        ale.setLoggerMode(ale_py.LoggerMode.Error)
        ale.setInt("random_seed", seed)
        ale.setFloat("repeat_action_probability", STICKY)
        rom = ale_py.roms.get_rom_path("pong")
        assert rom is not None, "ale-py ships Pong"
        ale.loadROM(rom)
        self._actions = ale.getMinimalActionSet()
        height, width = ale.getScreenDims()
        self._last = np.empty((height, width), np.uint8)
        self._before = np.empty((height, width), np.uint8)
        self._rng = np.random.default_rng(seed)

    def reset(self, obs: Pixels) -> None:
        """Start a game and write its first stack."""
        self._ale.reset_game()
        for _ in range(int(self._rng.integers(1, 31))):
            self._ale.act(self._actions[0])
        self._ale.getScreenGrayscale(self._last)
        obs[...] = self._resize(self._last)[..., None]

    def step(self, action: int, before: Pixels, obs: Pixels) -> tuple[float, bool]:
        """Play four frames and write the stack that follows ``before``."""
        ale, act = self._ale, self._actions[action]
        reward, over = 0.0, False
        for frame in range(SKIP):
            reward += ale.act(act)
            over = ale.game_over()
            if over:
                break
            if frame == SKIP - 2:
                ale.getScreenGrayscale(self._before)
            elif frame == SKIP - 1:
                ale.getScreenGrayscale(self._last)
        np.maximum(self._last, self._before, out=self._last)
        obs.reshape(-1)[:-1] = before.reshape(-1)[1:]  # a pixel's next frame is its next byte
        obs[..., -1] = self._resize(self._last)
        return reward, over


def make_baseline(policy: OnnxPolicy, num_envs: int, steps: int) -> Advance:
    """Return a minimal loop over emulators that uses the policy's ONNX Runtime session."""
    graph: Any = policy.graph
    run = graph._session._session.run  # the bare session
    games = [Emulator(seed) for seed in range(num_envs)]
    last = np.empty((num_envs, SIDE, SIDE, STACK), np.uint8)
    for game, stack in zip(games, last, strict=True):
        game.reset(stack)
    rng = np.random.default_rng(0)
    shape = (steps, num_envs)

    def advance() -> int:
        obs = np.empty((steps + 1, *last.shape), np.uint8)
        actions, logp = np.empty(shape, np.int64), np.empty(shape, np.float32)
        logits_column, values = (
            np.empty((*shape, NUM_ACTIONS), np.float32),
            np.empty(shape, np.float32),
        )
        rewards, dones = np.empty(shape, np.float32), np.empty(shape, np.bool_)
        obs[0] = last
        for t in range(steps):
            logits, values[t] = run(["dist_inputs", "vf"], {"obs": obs[t]}, None)
            actions[t] = (logits - np.log(-np.log(rng.random(logits.shape)))).argmax(axis=1)
            shifted = logits - logits.max(axis=1, keepdims=True)
            logp[t] = shifted[np.arange(num_envs), actions[t]] - np.log(np.exp(shifted).sum(axis=1))
            logits_column[t] = logits
            for n, game in enumerate(games):
                rewards[t, n], dones[t, n] = game.step(actions[t, n], obs[t, n], obs[t + 1, n])
                if dones[t, n]:
                    game.reset(obs[t + 1, n])
        np.clip(rewards, -1.0, 1.0, out=rewards)
        last[:] = obs[-1]
        return steps * num_envs

    return advance


def rate_of(advance: Advance, clock: Callable[[], float]) -> float:
    """Return a sampler's steps per second by the given clock."""
    steps, began = 0, clock()
    while (elapsed := clock() - began) < ROUND_S:
        steps += advance()
    return steps / elapsed


def _sample(directory: Path, num_envs: int) -> tuple[float, float]:
    pin_to_one_core()
    policy = load_policy(directory)
    subject = make_subject(policy, num_envs, FRAGMENT)
    baseline = make_baseline(policy, num_envs, FRAGMENT)
    subject(), baseline()
    own_time = time.process_time  # one thread: other work on the machine is not counted
    return alternate(
        lambda: rate_of(subject, own_time), lambda: rate_of(baseline, own_time), ROUNDS
    )


def _vector(directory: Path, num_envs: int) -> tuple[float, float]:
    policy = load_policy(directory)
    subject = make_subject(policy, num_envs, FRAGMENT, "native")
    baseline = make_subject(policy, num_envs, FRAGMENT, "serial")
    subject(), baseline()
    wall_time = time.perf_counter
    return alternate(
        lambda: rate_of(subject, wall_time), lambda: rate_of(baseline, wall_time), ROUNDS
    )


# The wire
# --------------------------------------------------------------------------------------------------


def make_fragment(num_envs: int, steps: int, random_steps: int) -> dict[str, NDArray[Any]]:
    """Return the columns that IMPALA sends for a fragment, with random actions."""
    env = make_env(num_envs)
    rng = np.random.default_rng(0)
    obs = np.empty((steps + 1, num_envs, SIDE, SIDE, STACK), np.uint8)
    actions = rng.integers(0, NUM_ACTIONS, (random_steps + steps, num_envs))
    rewards, dones = np.empty((steps, num_envs), np.float32), np.empty((steps, num_envs), np.bool_)
    env.reset(list(range(num_envs)))
    for t, chosen in enumerate(actions):
        step = env.step(chosen)
        at = t - random_steps
        if at >= -1:
            obs[at + 1] = step.obs
        if at >= 0:
            rewards[at], dones[at] = step.rewards, step.terminateds
    env.close()
    return {
        c.ACTIONS: actions[random_steps:],
        c.TERMINATEDS: dones,
        c.TRUNCATEDS: np.zeros_like(dones),
        c.ACTION_DIST_INPUTS: rng.standard_normal((steps, num_envs, NUM_ACTIONS), np.float32),
        c.ACTION_LOGP: rng.standard_normal((steps, num_envs), np.float32),
        c.REWARDS: rewards,
        c.OBS: obs[:-1],
        c.LAST_OBS: obs[-1],
    }


def measure_wire(columns: dict[str, NDArray[Any]], rounds: int = 15) -> tuple[float, float, float]:
    """Return medians: bytes on the wire over raw bytes, and MB/s of raw bytes encoded and
    decoded.
    """
    steps, num_envs = columns[c.REWARDS].shape
    samples = m.Samples(
        seq=1,
        lease_id=1,
        env_steps=steps * num_envs,
        agent_steps=steps * num_envs,
        first_version=0,
        last_version=0,
        num_envs=num_envs,
        length=steps,
        batches={DEFAULT_POLICY_ID: columns},
        episodes={},
        filter_deltas={},
        perf={},
        sampled_total=steps * num_envs,
    )
    raw = sum(column.nbytes for column in columns.values())
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        frames = encode(samples)
        encoded = time.perf_counter()
        decode(frames)
        times.append((encoded - began, time.perf_counter() - encoded))
    encode_s, decode_s = np.median(times, axis=0).tolist()
    sent = sum(memoryview(frame).nbytes for frame in frames)
    return sent / raw, raw / encode_s / 1e6, raw / decode_s / 1e6


def main(role: str, *arguments: str) -> None:
    """Measure one part in this process and print its numbers as JSON."""
    result: Any = None
    if role == "export":
        export_nature_cnn(Path(arguments[0]))
    elif role == "sample":
        result = _sample(Path(arguments[0]), int(arguments[1]))
    elif role == "vector":
        result = _vector(Path(arguments[0]), int(arguments[1]))
    else:
        pin_to_one_core()
        result = measure_wire(make_fragment(8, FRAGMENT, RANDOM_STEPS))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
