"""Ape-X on CartPole, end to end on this host: env steps sampled per second, each trained on four
times.

The subject is `python -m aiorl.learner`, started as a user starts it. It alternates with bare
processes that do the same work by hand (`python -m benchmarks.apex`): NumPy acting with vectorised
environments, n-step returns and first priorities over PUSH/PULL, a sum heap, and one XLA scan over
the due minibatches. They have no config, recovery, accounting, metrics, checks or checkpoints.
Networks are 64x64 tanh, dueling and double; minibatches have 512 rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import SINGLE_THREADED, alternate, learner_rate, run_command
from benchmarks.result import Figure

__all__ = ["apex_cartpole"]

TARGET_RATIO = 0.5
ROUNDS = 5
SECONDS = 4.0
WORKERS, ENVS, LENGTH = 2, 64, 32
ROWS = ENVS * LENGTH
INTENSITY, BATCH, CAPACITY = 4, 512, 1 << 17
MINIBATCHES = ROWS * INTENSITY // BATCH
GAMMA, N_STEP, LR, BETA = 0.99, 3, 1e-3, 0.4
TARGET_EVERY, BROADCAST_EVERY = 500, 10
SHAPES = ((4, 64), (64, 64), (64, 2), (64, 1))

Array = NDArray[Any]
Tensors = list[Any]

_COLUMNS = {
    "obs": ((ROWS, 4), np.float32),
    "actions": ((ROWS,), np.int32),
    "returns": ((ROWS,), np.float32),
    "discounts": ((ROWS,), np.float32),
    "new_obs": ((ROWS, 4), np.float32),
    "priorities": ((ROWS,), np.float32),
}


def apex_cartpole() -> list[Figure]:
    """Measure two workers with 64 vectorised CartPoles each."""
    value, baseline = alternate(_aiorl, _bare, ROUNDS)
    return [Figure("apex/cartpole", value, "env steps/s", baseline, target_ratio=TARGET_RATIO)]


def _aiorl() -> float:
    options: dict[str, Any] = {
        "env": "CartPole-v1",
        "algo": "apex",
        "num-workers": WORKERS,
        "num-envs-per-worker": ENVS,
        "vectorize": "native",
        "rollout-fragment-length": LENGTH,
        "train-batch-size": BATCH,
        "training-intensity": INTENSITY,
        "replay-capacity": CAPACITY,
        "learning-starts": BATCH,
        "lr": LR,
        "n-step": N_STEP,
        "gamma": GAMMA,
        "target-update-freq": TARGET_EVERY,
        "broadcast-updates": BROADCAST_EVERY,
        "max-env-steps-ahead": 8 * ROWS,
        "threads": 1,
    }
    return learner_rate(options, SECONDS)


def _bare() -> float:
    return float(json.loads(run_command([sys.executable, "-m", "benchmarks.apex"]))["steps_per_s"])


# The bare pair
# --------------------------------------------------------------------------------------------------


def _q(xp: Any, weights: Any, obs: Any) -> Any:
    """Return the values [B, 2] of both actions, from NumPy or TensorFlow."""
    features = xp.tanh(xp.tanh(obs @ weights[0] + weights[1]) @ weights[2] + weights[3])
    advantages, values = features @ weights[4] + weights[5], features @ weights[6] + weights[7]
    return values + advantages - (advantages[:, :1] + advantages[:, 1:]) / 2


def _sample(port: int, epsilon: float) -> None:
    import gymnasium
    import zmq

    context = zmq.Context()
    push, sub = context.socket(zmq.PUSH), context.socket(zmq.SUB)
    push.sndhwm = 2
    push.connect(f"tcp://127.0.0.1:{port}")
    sub.subscribe(b"")
    sub.connect(f"tcp://127.0.0.1:{port + 1}")
    rng = np.random.default_rng(os.getpid())
    envs = gymnasium.make_vec("CartPole-v1", ENVS)
    obs = np.empty((LENGTH + 1, ENVS, 4), np.float32)
    values = np.empty((LENGTH + 1, ENVS, 2), np.float32)
    actions = np.empty((LENGTH, ENVS), np.int32)
    rewards, goes_on = np.empty((2, LENGTH, ENVS), np.float32)
    obs[LENGTH] = envs.reset(seed=os.getpid())[0]
    frames = sub.recv_multipart(copy=False)
    while True:
        shapes = [shape for fan in SHAPES for shape in (fan, fan[1:])]
        weights = [
            np.frombuffer(f.buffer, np.float32).reshape(s)
            for f, s in zip(frames, shapes, strict=True)
        ]
        obs[0] = obs[LENGTH]
        for t in range(LENGTH):
            values[t] = _q(np, weights, obs[t])
            is_random = rng.random(ENVS) < epsilon
            actions[t] = np.where(is_random, rng.integers(0, 2, ENVS), values[t].argmax(axis=1))
            obs[t + 1], rewards[t], terminateds, truncateds, _ = envs.step(actions[t])
            goes_on[t] = ~(terminateds | truncateds)
        values[LENGTH] = _q(np, weights, obs[LENGTH])
        returns, discounts = rewards.copy(), GAMMA * goes_on
        behind = np.arange(1, LENGTH + 1)
        for ahead in range(1, N_STEP):
            last = LENGTH - ahead
            returns[:last] += discounts[:last] * rewards[ahead:]
            discounts[:last] *= GAMMA * goes_on[ahead:]
            behind[:last] += 1
        wanted = returns + discounts * values[behind].max(axis=2)
        errors = np.abs(
            wanted - np.take_along_axis(values[:-1], actions[..., None], axis=2)[..., 0]
        )
        columns = (obs[:-1], actions, returns, discounts, obs[behind], errors)
        push.send_multipart([np.array(column).data for column in columns], copy=False)
        while sub.poll(0):
            frames = sub.recv_multipart(copy=False)


class _Heap:
    """Heap of summed priorities."""

    def __init__(self) -> None:
        self._sums, self._rng = np.zeros(2 * CAPACITY), np.random.default_rng(0)

    def set(self, slots: Array, errors: Array) -> None:
        nodes = slots + CAPACITY
        self._sums[nodes] = (errors + 1e-6) ** 0.6
        nodes = np.unique(nodes >> 1)
        while nodes[0]:
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]
            nodes = np.unique(nodes >> 1)

    def draw(self) -> tuple[Array, Array]:
        """Return slots [K, B] and the weight of each."""
        places = np.arange(BATCH) + self._rng.random((MINIBATCHES, BATCH))
        rest = places.reshape(-1) * (self._sums[1] / BATCH)
        nodes = np.ones(rest.size, np.int64)
        while nodes[0] < CAPACITY:
            nodes *= 2
            left = self._sums[nodes]
            is_right = rest >= left
            rest -= np.where(is_right, left, 0.0)
            nodes += is_right
        found = self._sums[nodes].reshape(places.shape)
        weights = (found.min(axis=1, keepdims=True) / found) ** BETA
        return (nodes - CAPACITY).reshape(places.shape), weights.astype(np.float32)


def _compiled_scan() -> Any:
    """Return a function of (count, minibatches [K, B, ...], state), where the state is (weights,
    both moments, target).

    It returns the new state and the errors [K, B].
    """
    import tensorflow as tf

    def error(weights: Tensors, target: Tensors, rows: dict[str, Any]) -> Any:
        best = tf.one_hot(tf.argmax(_q(tf, weights, rows["new_obs"]), axis=1), 2)
        following = tf.reduce_sum(best * _q(tf, target, rows["new_obs"]), axis=1)
        return tf.stop_gradient(rows["returns"] + rows["discounts"] * following)

    def body(
        count: Any,
        errors: Any,
        minibatches: Any,
        weights: Any,
        first: Any,
        second: Any,
        target: Any,
    ) -> Any:
        rows = {name: column[count % MINIBATCHES] for name, column in minibatches.items()}
        with tf.GradientTape() as tape:
            tape.watch(weights)
            taken = tf.reduce_sum(
                tf.one_hot(rows["actions"], 2) * _q(tf, weights, rows["obs"]), axis=1
            )
            size = tf.abs(error(weights, target, rows) - taken)
            within = tf.minimum(size, 1.0)
            loss = tf.reduce_mean(within * (size - 0.5 * within) * rows["weights"])
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 40.0)
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, gradients, strict=True)]
        weights = [
            w - LR * m / (tf.sqrt(v) + 1e-8) for w, m, v in zip(weights, first, second, strict=True)
        ]
        is_due = tf.equal((count + 1) % TARGET_EVERY, 0)
        target = [tf.where(is_due, new, old) for old, new in zip(target, weights, strict=True)]
        errors = tf.tensor_scatter_nd_update(errors, [[count % MINIBATCHES]], [size])
        return count + 1, errors, minibatches, weights, first, second, target

    @tf.function(jit_compile=True, autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def scan(count: Any, minibatches: Any, nets: Any) -> Any:
        end = count + MINIBATCHES
        carry = (count, tf.zeros((MINIBATCHES, BATCH)), minibatches, *nets)
        return tf.while_loop(lambda number, *_: number < end, body, carry)

    return scan


def _learn(pull: Any, pub: Any) -> float:
    """Return env steps per second, measured after a warm-up of the same length."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    rng = np.random.default_rng(0)
    weights = [
        array
        for shape in SHAPES
        for array in (rng.standard_normal(shape, np.float32) / 8, np.zeros(shape[1], np.float32))
    ]
    nets: Any = [
        [tf.constant(scale * array) for array in weights] for scale in (1.0, 0.0, 0.0, 1.0)
    ]
    stored = {
        name: np.zeros((CAPACITY, *shape[1:]), dtype) for name, (shape, dtype) in _COLUMNS.items()
    }
    heap, scan, count, slot, sampled = _Heap(), _compiled_scan(), 0, 0, 0
    measured_from, already = 0.0, 0
    pub.send_multipart(weights)
    while True:
        while not pull.poll(200):
            pub.send_multipart([array.numpy() for array in nets[0]])  # for late subscribers
        frames = pull.recv_multipart(copy=False)
        slots = slice(slot, slot + ROWS)
        for (name, (shape, dtype)), frame in zip(_COLUMNS.items(), frames, strict=True):
            stored[name][slots] = np.frombuffer(frame.buffer, dtype).reshape(shape)
        heap.set(np.arange(slots.start, slots.stop), stored["priorities"][slots])
        slot = slots.stop % CAPACITY
        drawn, counts = heap.draw()
        minibatches = {
            name: tf.constant(column[drawn])
            for name, column in stored.items()
            if name != "priorities"
        }
        _, errors, _, *nets = scan(
            tf.constant(count), {**minibatches, "weights": tf.constant(counts)}, nets
        )
        heap.set(drawn.reshape(-1), errors.numpy().reshape(-1))
        count, sampled = count + MINIBATCHES, sampled + ROWS
        if count // MINIBATCHES % BROADCAST_EVERY == 0:
            pub.send_multipart([array.numpy() for array in nets[0]])
        now = time.monotonic()
        measured_from = measured_from or now
        if now - measured_from >= SECONDS:
            if already:
                return (sampled - already) / (now - measured_from)
            measured_from, already = now, sampled


def main() -> None:
    """Run the bare pair and print its rate as JSON."""
    import zmq

    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    context = zmq.Context()
    pull, pub = context.socket(zmq.PULL), context.socket(zmq.PUB)
    pull.rcvhwm = 4
    port = pull.bind_to_random_port("tcp://127.0.0.1", 20000, 50000)
    pub.bind(f"tcp://127.0.0.1:{port + 1}")
    command = [sys.executable, "-m", "benchmarks.apex", str(port)]
    environment = {**os.environ, **SINGLE_THREADED}
    workers = [
        subprocess.Popen([*command, str(0.4 ** (1 + 7 * i))], env=environment)
        for i in range(WORKERS)
    ]
    try:
        sys.stdout.write(json.dumps({"steps_per_s": _learn(pull, pub)}))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _sample(int(sys.argv[1]), float(sys.argv[2]))
    else:
        main()
