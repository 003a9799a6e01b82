"""Compiled update alone: train batch in, new weights out, with 64x64 tanh networks and CartPole's
shapes.

The baseline of PPO is the usual way: one compiled call per minibatch, with rows picked by NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.measure import alternate, run_fresh
from benchmarks.result import Figure

__all__ = ["update_impala", "update_ppo", "update_ppo_large"]


def update_ppo() -> list[Figure]:
    """Measure PPO: 4,096 steps, 10 epochs, minibatches of 256, one core."""
    value, baseline = run_fresh("benchmarks.update", "ppo", "1", "4096", "10", "256")
    return [
        Figure(
            "update/ppo 4096 x 10 epochs, 1 core", value, "env steps/s", baseline, target_ratio=1.5
        )
    ]


def update_ppo_large() -> list[Figure]:
    """Measure PPO: 65,536 steps, one epoch, the config's minibatches, two cores."""
    value, baseline = run_fresh("benchmarks.update", "ppo", "2", "65536", "1", "4096")
    return [
        Figure(
            "update/ppo 65536 x 1 epoch, 2 cores", value, "env steps/s", baseline, target_ratio=1.2
        )
    ]


def update_impala() -> list[Figure]:
    """Measure V-trace over 32,768 steps in sequences of 64, one core."""
    value, _ = run_fresh("benchmarks.update", "impala", "1", "32768", "1", "4096")
    return [Figure("update/impala 32768, 1 core", value, "env steps/s")]


def main(algo: str, cores: str, batch: str, epochs: str, minibatch: str) -> None:
    """Measure in this process and print value and baseline as JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-int(cores) :])
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(int(cores))
    subject = _subject(algo, int(batch), int(epochs), int(minibatch))
    baseline = _per_minibatch(int(batch), int(epochs), int(minibatch)) if algo == "ppo" else subject
    for run in (subject, baseline):
        run()  # compiles
    value, beside = alternate(
        lambda: _rate(subject, int(batch)), lambda: _rate(baseline, int(batch)), rounds=7
    )
    sys.stdout.write(json.dumps([value, beside if algo == "ppo" else None]))


def _rate(run: Callable[[], None], env_steps: int) -> float:
    started = time.perf_counter()
    run()
    return env_steps / (time.perf_counter() - started)


def _subject(algo: str, batch: int, epochs: int, minibatch: int) -> Callable[[], None]:
    """Return the update thread's work: lay out the batch, learn, copy the weights."""
    from aiorl.learning.algorithms.registry import algorithm_class, config_class
    from aiorl.learning.learner import Learner

    config = config_class(algo).from_mapping(
        {
            "env": "CartPole-v1",
            "seed": 0,
            "train_batch_size": batch,
            "num_sgd_iter": epochs,
            "sgd_minibatch_size": minibatch,
            "rollout_fragment_length": 64,
            "num_envs_per_worker": batch // 256,
        }
    )
    kind = algorithm_class(algo)
    learner = Learner(kind, config, _model())
    count = kind.experience(config).lease_plan().fragments_per_batch
    fragments = [_fragment(64, batch // 256, seed) for seed in range(count)]

    def run() -> None:
        learner.update(learner.make_batch(fragments), 0)
        learner.get_weights()

    return run


def _per_minibatch(batch: int, epochs: int, minibatch: int) -> Callable[[], None]:
    """Return an update with one compiled call per minibatch."""
    import keras
    import tensorflow as tf

    from aiorl.data import columns as c

    model = _model()
    optimizer = keras.optimizers.Adam(3e-4, epsilon=1e-5)
    optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    rows = {
        name: column.reshape(-1, *column.shape[2:])
        for name, column in _fragment(64, batch // 64, 0).items()
        if name in (c.OBS, c.ACTIONS, c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS)
    }

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def step(obs: Any, actions: Any, old_logp: Any, advantages: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            logits, values = model.forward(obs)
            log_probabilities = tf.nn.log_softmax(logits)
            chosen = tf.reduce_sum(log_probabilities * tf.one_hot(actions, 2), axis=-1)
            ratio = tf.exp(chosen - old_logp)
            scaled = (advantages - tf.reduce_mean(advantages)) / (
                tf.math.reduce_std(advantages) + 1e-8
            )
            gain = tf.minimum(ratio * scaled, tf.clip_by_value(ratio, 0.8, 1.2) * scaled)
            loss = 0.5 * tf.reduce_mean(tf.square(values - targets)) - tf.reduce_mean(gain)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        optimizer.apply(gradients, model.trainable_variables)

    def run() -> None:
        for _ in range(epochs):
            order = rng.permutation(batch)
            for start in range(0, batch, minibatch):
                chosen = order[start : start + minibatch]
                step(*(tf.constant(column[chosen]) for column in rows.values()))
        model.get_weights()

    return run


def _model() -> Any:
    from aiorl.acting.distributions import make_distribution
    from aiorl.learning.models.catalog import build_model

    return build_model((4,), "float32", make_distribution(spaces.Discrete(2)), seed=0)


def _fragment(length: int, num_envs: int, seed: int) -> dict[str, Any]:
    from aiorl.data import columns as c

    rng = np.random.default_rng(seed)
    shape = (length, num_envs)
    return {
        c.OBS: rng.normal(size=(*shape, 4)).astype(np.float32),
        c.ACTIONS: rng.integers(0, 2, shape),
        c.ACTION_LOGP: np.full(shape, -0.69, np.float32),
        c.ADVANTAGES: rng.normal(size=shape).astype(np.float32),
        c.VALUE_TARGETS: rng.normal(size=shape).astype(np.float32),
        c.REWARDS: np.ones(shape, np.float32),
        c.TERMINATEDS: rng.random(shape) < 0.02,
        c.TRUNCATEDS: np.zeros(shape, np.bool_),
        c.BOOTSTRAP_VALUES: np.zeros(shape, np.float32),
        c.LAST_OBS: rng.normal(size=(num_envs, 4)).astype(np.float32),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
