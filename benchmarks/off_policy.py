"""Updates of DQN, SAC and TD3 against hand-written loops: rows are drawn, and K minibatches
compiled as one.

Networks are 256x256 relu. DQN has LunarLander's shapes, minibatches of 128 and double dueling
Q-learning; SAC and TD3 have HalfCheetah's shapes and minibatches of 256. The subject stores a
fragment and trains on the minibatches that are due, as the learner does. The baseline writes the
same rows to arrays, draws as many with NumPy, and runs a bare XLA scan that carries weights and
Adam's moments, without checks or reports. Both run on one core.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks.measure import alternate, pin_to_one_core, run_fresh
from benchmarks.result import Figure

__all__ = ["off_policy_dqn", "off_policy_sac", "off_policy_td3"]

TARGET_RATIO = 0.8
ROUNDS = 9
MINIBATCHES = 16  # per call
STORED = 20_000
HIDDEN = 256
GAMMA, TAU, LR = 0.99, 0.005, 3e-4
COLUMNS = ("obs", "actions", "n_step_returns", "discounts", "new_obs")

Array = NDArray[Any]
Rows = dict[str, Array]
Tensors = Any
Step = Callable[[Any, Tensors, Any], Any]
"""Optimiser step: (carry, minibatch, number) -> carry."""


def off_policy_dqn() -> list[Figure]:
    """Measure DQN with minibatches of 128."""
    return _measured("dqn")


def off_policy_sac() -> list[Figure]:
    """Measure SAC with minibatches of 256, two critics, actor and temperature."""
    return _measured("sac")


def off_policy_td3() -> list[Figure]:
    """Measure TD3 with minibatches of 256, two critics, and the actor at every other one."""
    return _measured("td3")


def _measured(algo: str) -> list[Figure]:
    value, baseline = run_fresh("benchmarks.off_policy", algo)
    return [
        Figure(
            f"off-policy update/{algo}", value, "minibatches/s", baseline, target_ratio=TARGET_RATIO
        )
    ]


def main(algo: str) -> None:
    """Measure one algorithm in this process and print value and baseline as JSON."""
    pin_to_one_core()  # TensorFlow uses one thread per core it finds
    batch, obs_size = (128, 8) if algo == "dqn" else (256, 17)
    actions: spaces.Space[Any] = (
        spaces.Discrete(4) if algo == "dqn" else spaces.Box(-1.0, 1.0, (6,), np.float32)
    )
    subject = _subject(algo, batch, obs_size, actions)
    step, carry = {"dqn": _dqn, "sac": _sac, "td3": _td3}[algo](obs_size)
    baseline = _baseline(step, carry, batch, _rows(STORED, obs_size, actions))
    for run in (subject, baseline):
        run()  # compiles
    sys.stdout.write(json.dumps(alternate(lambda: _rate(subject), lambda: _rate(baseline), ROUNDS)))


def _rate(run: Callable[[], None], calls: int = 5) -> float:
    started = time.process_time()
    for _ in range(calls):
        run()
    return calls * MINIBATCHES / (time.process_time() - started)


def _rows(count: int, obs_size: int, action_space: spaces.Space[Any]) -> Rows:
    rng = np.random.default_rng(0)
    is_choice = isinstance(action_space, spaces.Discrete)
    return {
        "obs": rng.standard_normal((count, obs_size), np.float32),
        "actions": (
            rng.integers(0, 4, count).astype(np.int32)
            if is_choice
            else rng.random((count, 6), np.float32)
        ),
        "n_step_returns": rng.standard_normal(count, np.float32),
        "discounts": np.where(rng.random(count) < 0.01, 0.0, GAMMA).astype(np.float32),
        "new_obs": rng.standard_normal((count, obs_size), np.float32),
    }


def _subject(
    algo: str, batch: int, obs_size: int, action_space: spaces.Space[Any]
) -> Callable[[], None]:
    from aiorl.data.obs_layout import ObsLayout
    from aiorl.learning.algorithm import Observations
    from aiorl.learning.algorithms.registry import algorithm_class, config_class
    from aiorl.learning.learner import Learner

    new = MINIBATCHES * batch // 256
    config = config_class(algo).from_mapping(
        {
            "env": "CartPole-v1",
            "seed": 0,
            "train_batch_size": batch,
            "replay_capacity": STORED,
            "lr": LR,
            "learning_starts": 1,
            "training_intensity": 256.0,
            "rollout_fragment_length": new,
            "num_envs_per_worker": 1,
            "grad_clip": None,
            "gamma": GAMMA,
            "xla": "on",
            "model": {"fcnet_hiddens": [HIDDEN, HIDDEN], "fcnet_activation": "relu"},
        }
    )
    kind = algorithm_class(algo)
    observations = Observations((obs_size,), "float32", ObsLayout((obs_size,)))
    model = kind.build_model(config, observations, action_space, 0)
    learner = Learner(kind, config, model)
    whole = {
        name: column[:, None] for name, column in _rows(STORED, obs_size, action_space).items()
    }
    learner.make_batch([whole])
    fragment = {name: column[:new] for name, column in whole.items()}

    def run() -> None:
        made = learner.update(learner.make_batch([fragment]), 0).metrics["num_sgd_steps"]
        assert made == MINIBATCHES, f"{made} minibatches, not {MINIBATCHES}"

    return run


def _baseline(step: Step, carry: Any, batch: int, rows: Rows) -> Callable[[], None]:
    """Return a scan of a step over minibatches of rows drawn by NumPy."""
    import tensorflow as tf

    rng = np.random.default_rng(1)
    new = {name: column[: MINIBATCHES * batch // 256].copy() for name, column in rows.items()}
    structure = tf.nest.map_structure(lambda _: 0, carry)

    @tf.function(jit_compile=True, autograph=False)  # type: ignore[untyped-decorator]
    def scan(flat: list[Any], minibatches: Mapping[str, Any], seed: Any) -> list[Any]:
        def body(number: Any, *flat: Any) -> tuple[Any, ...]:
            minibatch = {name: column[number] for name, column in minibatches.items()}
            after = step(tf.nest.pack_sequence_as(structure, flat), minibatch, seed + number)
            return number + 1, *tf.nest.flatten(after)

        return list(
            tf.while_loop(
                lambda number, *flat: number < MINIBATCHES, body, (tf.constant(0), *flat)
            )[1:]
        )

    flat = [[tf.constant(array) for array in tf.nest.flatten(carry)]]
    made = [0]

    def run() -> None:
        for name, column in rows.items():
            column[: len(new[name])] = new[name]
        drawn = rng.integers(0, STORED, (MINIBATCHES, batch))
        minibatches = {name: tf.constant(column[drawn]) for name, column in rows.items()}
        flat[0] = scan(flat[0], minibatches, tf.constant(made[0]))
        made[0] += MINIBATCHES
        flat[0][0].numpy()

    return run


# The steps
# --------------------------------------------------------------------------------------------------


def _mlp(rng: np.random.Generator, *sizes: int) -> list[Array]:
    pairs = itertools.pairwise(sizes)
    return [
        array
        for fan_in, fan_out in pairs
        for array in (
            rng.standard_normal((fan_in, fan_out), np.float32) * 0.05,
            np.zeros(fan_out, np.float32),
        )
    ]


def _forward(weights: Sequence[Any], x: Any) -> Any:
    import tensorflow as tf

    for index in range(0, len(weights) - 2, 2):
        x = tf.nn.relu(x @ weights[index] + weights[index + 1])
    return x @ weights[-2] + weights[-1]


def _with_moments(weights: list[Array]) -> dict[str, Any]:
    return {
        "weights": weights,
        "first": [np.zeros_like(array) for array in weights],
        "second": [np.zeros_like(array) for array in weights],
        "count": np.float32(0.0),
    }


def _adam(net: dict[str, Any], gradients: Sequence[Any]) -> dict[str, Any]:
    import tensorflow as tf

    count = net["count"] + 1.0
    rate = LR * tf.sqrt(1.0 - tf.pow(0.999, count)) / (1.0 - tf.pow(0.9, count))
    first = [0.9 * m + 0.1 * g for m, g in zip(net["first"], gradients, strict=True)]
    second = [0.999 * v + 0.001 * g * g for v, g in zip(net["second"], gradients, strict=True)]
    weights = [
        w - rate * m / (tf.sqrt(v) + 1e-8)
        for w, m, v in zip(net["weights"], first, second, strict=True)
    ]
    return {"weights": weights, "first": first, "second": second, "count": count}


def _descend(net: dict[str, Any], loss: Callable[[list[Any]], Any]) -> tuple[dict[str, Any], Any]:
    """Take one step of Adam; `loss` returns the loss and a value to pass on."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(net["weights"])
        value, given = loss(net["weights"])
    return _adam(net, tape.gradient(value, net["weights"])), given


def _nearer(target: list[Any], weights: list[Any]) -> list[Any]:
    return [old + TAU * (new - old) for old, new in zip(target, weights, strict=True)]


def _dqn(obs_size: int) -> tuple[Step, Any]:
    import tensorflow as tf

    rng = np.random.default_rng(0)
    weights = [*_mlp(rng, obs_size, HIDDEN, HIDDEN), *_mlp(rng, HIDDEN, 4), *_mlp(rng, HIDDEN, 1)]

    def values(weights: Sequence[Any], obs: Any) -> Any:
        features = tf.nn.relu(_forward(weights[:4], obs))
        advantages = _forward(weights[4:6], features)
        return (
            _forward(weights[6:], features)
            + advantages
            - tf.reduce_mean(advantages, axis=-1, keepdims=True)
        )

    def step(carry: Any, rows: Tensors, number: Any) -> Any:
        net, target = carry
        best = tf.one_hot(tf.argmax(values(net["weights"], rows["new_obs"]), axis=-1), 4)
        following = tf.reduce_sum(best * values(target, rows["new_obs"]), axis=-1)
        wanted = rows["n_step_returns"] + rows["discounts"] * following

        def loss(weights: list[Any]) -> tuple[Any, None]:
            taken = tf.reduce_sum(
                tf.one_hot(rows["actions"], 4) * values(weights, rows["obs"]), axis=-1
            )
            error = tf.abs(taken - wanted)
            return tf.reduce_mean(tf.where(error < 1.0, 0.5 * error * error, error - 0.5)), None

        net, _ = _descend(net, loss)
        is_due = tf.equal((number + 1) % 500, 0)
        return net, [
            tf.where(is_due, new, old) for old, new in zip(target, net["weights"], strict=True)
        ]

    return step, (_with_moments(weights), weights)


def _critics(rng: np.random.Generator, obs_size: int) -> list[Array]:
    return [array for _ in range(2) for array in _mlp(rng, obs_size + 6, HIDDEN, HIDDEN, 1)]


def _q(weights: Sequence[Any], obs: Any, actions: Any) -> Any:
    import tensorflow as tf

    x = tf.concat([obs, actions], axis=-1)
    return tf.stack([_forward(weights[:6], x)[:, 0], _forward(weights[6:], x)[:, 0]])


def _learn_values(critics: dict[str, Any], rows: Tensors, following: Any) -> dict[str, Any]:
    import tensorflow as tf

    wanted = rows["n_step_returns"] + rows["discounts"] * following

    def loss(weights: list[Any]) -> tuple[Any, None]:
        return (
            tf.reduce_mean(0.5 * tf.square(_q(weights, rows["obs"], rows["actions"]) - wanted))
            * 2.0,
            None,
        )

    return _descend(critics, loss)[0]


def _sac(obs_size: int) -> tuple[Step, Any]:
    import tensorflow as tf

    rng = np.random.default_rng(0)
    actor, critics = _mlp(rng, obs_size, HIDDEN, HIDDEN, 12), _critics(rng, obs_size)

    def drawn(weights: Sequence[Any], obs: Any, seed: Any) -> tuple[Any, Any]:
        mean, log_std = tf.split(_forward(weights, obs), 2, axis=-1)
        log_std = tf.clip_by_value(log_std, -20.0, 2.0)
        noise = tf.random.stateless_normal(tf.shape(mean), seed)
        pre = mean + tf.exp(log_std) * noise
        logp = (
            -0.5 * tf.square(noise)
            - log_std
            - 0.9189385
            - 2.0 * (0.6931472 - pre - tf.nn.softplus(-2.0 * pre))
        )
        return tf.tanh(pre), tf.reduce_sum(logp, axis=-1)

    def step(carry: Any, rows: Tensors, number: Any) -> Any:
        actor, critics, target, temperature = carry
        alpha = tf.exp(temperature["weights"][0])
        actions, logp = drawn(actor["weights"], rows["new_obs"], [number, 0])
        following = tf.reduce_min(_q(target, rows["new_obs"], actions), axis=0) - alpha * logp
        critics = _learn_values(critics, rows, following)

        def actor_loss(weights: list[Any]) -> tuple[Any, Any]:
            actions, logp = drawn(weights, rows["obs"], [number, 1])
            q = tf.reduce_min(_q(critics["weights"], rows["obs"], actions), axis=0)
            return tf.reduce_mean(alpha * logp - q), logp

        actor, logp = _descend(actor, actor_loss)
        temperature, _ = _descend(
            temperature,
            lambda weights: (-tf.reduce_mean(weights[0] * tf.stop_gradient(logp - 6.0)), None),
        )
        return actor, critics, _nearer(target, critics["weights"]), temperature

    return step, (
        _with_moments(actor),
        _with_moments(critics),
        critics,
        _with_moments([np.zeros((), np.float32)]),
    )


def _td3(obs_size: int) -> tuple[Step, Any]:
    import tensorflow as tf

    rng = np.random.default_rng(0)
    actor, critics = _mlp(rng, obs_size, HIDDEN, HIDDEN, 6), _critics(rng, obs_size)

    def step(carry: Any, rows: Tensors, number: Any) -> Any:
        actor, critics, target_actor, target = carry
        means = tf.tanh(_forward(target_actor, rows["new_obs"]))
        noise = tf.clip_by_value(
            0.2 * tf.random.stateless_normal(tf.shape(means), [number, 0]), -0.5, 0.5
        )
        actions = tf.clip_by_value(means + noise, -1.0, 1.0)
        following = tf.reduce_min(_q(target, rows["new_obs"], actions), axis=0)
        critics = _learn_values(critics, rows, following)

        def learn_actor() -> list[Any]:
            def loss(weights: list[Any]) -> tuple[Any, None]:
                actions = tf.tanh(_forward(weights, rows["obs"]))
                return -tf.reduce_mean(_q(critics["weights"], rows["obs"], actions)[0]), None

            return list(tf.nest.flatten(_descend(actor, loss)[0]))

        is_due = tf.equal(number % 2, 1)
        flat = tf.cond(is_due, learn_actor, lambda: list(tf.nest.flatten(actor)))
        actor = tf.nest.pack_sequence_as(actor, flat)
        return (
            actor,
            critics,
            _nearer(target_actor, actor["weights"]),
            _nearer(target, critics["weights"]),
        )

    return step, (_with_moments(actor), _with_moments(critics), actor, critics)


if __name__ == "__main__":
    main(*sys.argv[1:])
