"""Record what updates do: weights, optimiser state, targets, metrics and priorities of every
algorithm, after a few updates with made-up fragments.

    python tests/frozen/updates.py record FOLDER [--compiled] [NAME ...]
    python tests/frozen/updates.py compare FOLDER OTHER
    python tests/frozen/updates.py digest

`record` writes one file per variant; `compare` lists the arrays that differ between two folders.
Run it on two revisions to see whether a change leaves the updates as they were, bit for bit.
`digest` writes updates.json, which test_updates.py compares with: a hash of each variant, and some
of its numbers for machines whose arithmetic rounds otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from gymnasium import spaces
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
DIGESTS = Path(__file__).with_name("updates.json")
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from algorithm_cases import gradients_of, make_fragment  # noqa: E402

from aiorl.acting.filters import MeanStdFilter  # noqa: E402
from aiorl.data import columns as c  # noqa: E402
from aiorl.data.obs_layout import ObsLayout  # noqa: E402
from aiorl.learning.algorithm import Observations, experience_of  # noqa: E402
from aiorl.learning.algorithms.registry import algorithm_class  # noqa: E402
from aiorl.learning.learner import Learner  # noqa: E402

Arrays = dict[str, NDArray[Any]]

BOX = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
CHOICES = spaces.Discrete(3, start=5)
NUM_OBS = 4
NUM_UPDATES = 3
ENV_STEPS = 40
"""Env steps between two updates, for schedules."""

_LSTM = {"use_lstm": True, "lstm_cell_size": 5}
_GRU = {"use_gru": True, "lstm_cell_size": 5, "vf_share_layers": True}
_SIZES = {"rollout_fragment_length": 6, "num_envs_per_worker": 4, "train_batch_size": 48}
_WHOLE = {**_SIZES, "sgd_minibatch_size": 48}
_EPOCHS = {**_SIZES, "sgd_minibatch_size": 18, "num_sgd_iter": 3}
_SEQUENCES = {**_SIZES, "sgd_minibatch_size": 18, "num_sgd_iter": 2}
_SCHEDULES = {
    "lr_schedule": [[0, 1e-2], [100, 1e-3]],
    "entropy_coeff_schedule": [[0, 0.1], [100, 0.0]],
}
_REPLAY = {
    "rollout_fragment_length": 8,
    "num_envs_per_worker": 2,
    "train_batch_size": 8,
    "training_intensity": 2.5,
    "learning_starts": 16,
    "replay_capacity": 64,
    "target_update_freq": 3,
    "lr_schedule": [[0, 1e-2], [100, 1e-3]],
}
_STORED = {**_REPLAY, "input": "data", "training_intensity": 4.0}
_FILES = {**_EPOCHS, "input": "data"}
_OF_STEPS = {**_REPLAY, "rollout_fragment_length": 12, "train_batch_size": 24}

VARIANTS: dict[str, tuple[str, spaces.Space[Any], dict[str, Any]]] = {
    "a2c": ("a2c", CHOICES, {**_WHOLE, **_SCHEDULES}),
    "a2c-lstm": ("a2c", BOX, {**_WHOLE, "model": _LSTM, "normalize_advantages": True}),
    "a3c": ("a3c", CHOICES, {**_WHOLE, "gradients": "learner"}),
    "a3c-gradients": ("a3c", CHOICES, {**_WHOLE, **_SCHEDULES}),
    "appo": ("appo", CHOICES, {**_EPOCHS, "kl_coeff": 0.3, "kl_target": 1e-4, **_SCHEDULES}),
    "appo-gru": ("appo", BOX, {**_SEQUENCES, "model": _GRU, "target_update_freq": 2}),
    "bc": ("bc", CHOICES, _FILES),
    "bc-lstm": ("bc", BOX, {**_FILES, "model": _LSTM, "postprocess_inputs": True}),
    "cql-box": ("cql", BOX, {**_STORED, "cql_actions": 3, "target_gap": 1.0}),
    "cql-discrete": ("cql", CHOICES, {**_STORED, "learning_starts": None}),
    "dqn": ("dqn", CHOICES, {**_REPLAY, "double_q": False, "dueling": False}),
    "dqn-rainbow": (
        "dqn",
        CHOICES,
        {
            **_REPLAY,
            "prioritized_replay": True,
            "noisy": True,
            "num_atoms": 11,
            "dueling_hiddens": [6],
            "n_step": 2,
            "tau": 0.1,
        },
    ),
    "dqn-filter": ("dqn", CHOICES, {**_REPLAY, "observation_filter": "MeanStdFilter"}),
    "dqn-lstm": (
        "dqn",
        CHOICES,
        {
            **_OF_STEPS,
            "model": _LSTM,
            "replay_sequence_length": 6,
            "burn_in": 2,
            "prioritized_replay": True,
            "value_rescaling": True,
            "n_step": 2,
        },
    ),
    "apex": ("apex", CHOICES, {**_REPLAY, "num_workers": 2, "n_step": 3}),
    "impala": ("impala", CHOICES, {**_SEQUENCES, **_SCHEDULES}),
    "impala-lstm": (
        "impala",
        BOX,
        {
            **_SEQUENCES,
            "model": {**_LSTM, "lstm_use_prev_action_reward": True},
            "normalize_rewards": True,
            "opt_type": "rmsprop",
            "momentum": 0.5,
            "kl_stop": 0.01,
        },
    ),
    "iql-box": ("iql", BOX, _STORED),
    "iql-discrete": ("iql", CHOICES, {**_STORED, "observation_filter": "MeanStdFilter"}),
    "marwil": ("marwil", CHOICES, {**_FILES, "observation_filter": "MeanStdFilter"}),
    "pg": ("pg", CHOICES, {**_WHOLE, "normalize_advantages": True}),
    "ppo": ("ppo", CHOICES, {**_EPOCHS, **_SCHEDULES}),
    "ppo-box": ("ppo", BOX, {**_EPOCHS, "clip_actions": True, "grad_clip": None}),
    "ppo-penalty": (
        "ppo",
        BOX,
        {**_EPOCHS, "kl_coeff": 0.5, "kl_target": 1e-3, "vf_clip_param": 0.5},
    ),
    "ppo-stop": ("ppo", CHOICES, {**_EPOCHS, "kl_stop": 1e-4, "kl_coeff": 0.5}),
    "ppo-lstm": ("ppo", CHOICES, {**_SEQUENCES, "model": _LSTM, "shuffle_sequences": False}),
    "ppo-episodes": (
        "ppo",
        CHOICES,
        {**_SEQUENCES, "model": _GRU, "batch_mode": "complete_episodes"},
    ),
    "ppo-noise": ("ppo", BOX, {**_EPOCHS, "use_sde": True}),
    "sac-box": ("sac", BOX, {**_REPLAY, "prioritized_replay": True}),
    "sac-discrete": ("sac", CHOICES, {**_REPLAY, "alpha_lr": 0.003, "actor_lr": 0.002}),
    "sac-noise": ("sac", BOX, {**_REPLAY, "use_sde": True, "twin_q": False, "n_step": 2}),
    "td3": ("td3", BOX, {**_REPLAY, "policy_delay": 2, "tau": 0.1}),
}
"""Algorithm, action space and settings of each variant."""


class Subject:
    """An algorithm with a network of 8 units.

    This is all that has to follow when the parts below are called otherwise.
    """

    def __init__(self, name: str, space: spaces.Space[Any], settings: Mapping[str, Any]) -> None:
        """Build the network and its learner."""
        kind = algorithm_class(name)
        self.config: Any = kind.config_class.from_mapping(dict(settings))
        layout = ObsLayout((NUM_OBS,))
        seen = Observations(layout.array_shape, "float32", layout)
        self.model: Any = kind.build_model(self.config, seen, space, 1)
        experience = experience_of(kind, self.config)
        self.plan = experience.sample_plan
        self.count = experience.lease_plan().fragments_per_batch
        self.learner = Learner(kind, self.config, self.model)

    def filter_by(self, merged_filter: MeanStdFilter) -> None:
        """Filter unfiltered observations."""
        self.learner.feed.merged_filter = merged_filter

    def update(self, fragments: Sequence[Arrays], env_steps: int) -> dict[str, float]:
        """Train on fragments; return the metrics."""
        result = self.learner.update(self.learner.make_batch(fragments), env_steps)
        assert not result.skipped
        return dict(result.metrics)

    def gradient(self, fragment: Arrays, env_steps: int) -> Arrays:
        """Return the columns that a worker sends in place of a fragment."""
        gradients = gradients_of(self.learner, xla=self.config.update_mode)
        return dict(gradients.compute(fragment, env_steps))


def run(name: str, *, compiled: bool) -> Arrays:
    """Return everything that a variant's updates changed, by name."""
    algo, space, own = VARIANTS[name]
    model = {"fcnet_hiddens": [8], "fcnet_activation": "tanh", **own.get("model", {})}
    settings = {"env": "x", "seed": 3, "lr": 0.01, "eager": not compiled, **own, "model": model}
    subject = Subject(algo, space, settings)
    if "observation_filter" in own:
        seen = MeanStdFilter((NUM_OBS,))
        seen.learn(np.random.default_rng(0).normal(2.0, 3.0, (50, NUM_OBS)).astype(np.float32))
        subject.filter_by(seen)
    found: Arrays = {}
    for number in range(NUM_UPDATES):
        fragments = [_fragment(subject, 10 * number + i, i) for i in range(subject.count)]
        if name.endswith("gradients"):
            fragments = [subject.gradient(fragment, ENV_STEPS * number) for fragment in fragments]
        if algo in ("cql", "iql") and number == NUM_UPDATES - 1:
            fragments = [_fragment(subject, 0, 0)]  # read again, so that minibatches are due
        metrics = subject.update(fragments, ENV_STEPS * number)
        found |= {f"{number}/metrics/{key}": np.array(value) for key, value in metrics.items()}
        found |= {
            f"{number}/{key}": tensor for key, tensor in subject.learner.get_state().tensors.items()
        }
    values = json.dumps(subject.learner.get_state().values, sort_keys=True)
    found["values"] = np.frombuffer(values.encode(), np.uint8)
    stored = subject.learner.hold_experience()
    if stored is not None:
        found |= {f"replay/{key}/{first}": np.array(part) for key, first, part in stored.pieces()}
    return found


def _fragment(subject: Subject, seed: int, index: int) -> Arrays:
    config = subject.config
    length, num_envs = config.rollout_fragment_length, config.num_envs_per_worker
    if config.batch_mode == "complete_episodes":
        length, num_envs = length * num_envs + 5 * index, 1
    is_partly_valid = config.algo in ("ppo", "appo", "impala", "a2c", "dqn") and seed % 2 == 1
    columns = tuple(name for name in subject.plan.columns if name != c.SCALED_REWARDS)
    plan = dataclasses.replace(subject.plan, columns=columns)
    fragment = make_fragment(plan, subject.model, length, num_envs, seed, invalid=is_partly_valid)
    if c.SCALED_REWARDS in subject.plan.columns:
        fragment[c.SCALED_REWARDS] = fragment[c.REWARDS] / 2
    if c.N_STEPS in fragment:
        left = np.arange(length, 0, -1, dtype=np.int32)[:, None]
        fragment[c.N_STEPS] = np.broadcast_to(np.minimum(config.n_step, left), (length, num_envs))
    return fragment


def machine() -> str:
    """Return what the last bits of a result depend on: TensorFlow, the processor and its cores."""
    flags = [
        line.partition(":")[2].split()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("flags", "model name"))
    ]
    known = sorted({flag for line in flags for flag in line})
    versions = [tf.__version__, keras.__version__, np.__version__]
    text = json.dumps([*versions, known, os.cpu_count()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of(arrays: Arrays) -> dict[str, Any]:
    """Return a hash of all arrays; and, after the last update, the metrics and the norm of each
    kind of tensor.
    """
    text = hashlib.sha256()
    last = f"{NUM_UPDATES - 1}/"
    figures: dict[str, float] = {}
    squares: dict[str, float] = {}
    for name in sorted(arrays):
        text.update(name.encode())
        text.update(np.ascontiguousarray(arrays[name]).tobytes())
        _, _, rest = name.partition(last)
        if rest.startswith("metrics/"):
            figures[rest] = float(arrays[name])
        elif rest:
            kind = rest.partition("/")[0]
            square = float(np.square(arrays[name], dtype=np.float64).sum())
            squares[kind] = squares.get(kind, 0.0) + square
    norms = {f"norm of {kind}": square**0.5 for kind, square in squares.items()}
    return {"sha256": text.hexdigest(), "figures": {**figures, **norms}}


def digest() -> None:
    """Write `DIGESTS`."""
    variants = {name: digest_of(run(name, compiled=False)) for name in VARIANTS}
    found = {"machine": machine(), "variants": variants}
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def record(folder: Path, names: Sequence[str], *, compiled: bool) -> None:
    """Write one file for each variant into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or VARIANTS:
        arrays = run(name, compiled=compiled)
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        print(name, len(arrays), flush=True)


def compare(folder: Path, other: Path) -> int:
    """Print the arrays that differ; return the number of variants with any."""
    num_differing = 0
    for path in sorted(folder.glob("*.npz")):
        if not (other / path.name).exists():
            print(f"{path.stem}: not recorded in {other}")
            num_differing += 1
            continue
        before, after = (dict(np.load(where / path.name)) for where in (folder, other))
        names = [
            key
            for key in sorted(before.keys() | after.keys())
            if key not in before
            or key not in after
            or before[key].tobytes() != after[key].tobytes()
        ]
        num_differing += bool(names)
        print(f"{path.stem}: {'bit-equal' if not names else ''}")
        for key in names[:8]:
            print(f"    {key}: {_difference(before.get(key), after.get(key))}")
    return num_differing


def _difference(one: NDArray[Any] | None, other: NDArray[Any] | None) -> str:
    if one is None or other is None:
        return "only before" if other is None else "only after"
    if one.dtype == np.uint8:
        return f"{one.tobytes().decode()} {other.tobytes().decode()}"
    if one.shape != other.shape or one.dtype.names:
        return f"{one.dtype} {one.shape} {other.dtype} {other.shape}"
    return f"up to {np.abs(one.astype(float) - other.astype(float)).max()}"


def main(arguments: Sequence[str]) -> int:
    """Run a command of the module's docstring."""
    command, *words = arguments
    if command == "digest":
        digest()
        return 0
    folder, *more = words
    if command == "record":
        names = [name for name in more if not name.startswith("--")]
        record(Path(folder), names, compiled="--compiled" in more)
        return 0
    return compare(Path(folder), Path(more[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
