"""Bare learner and samplers that do the work of a training run with NumPy, pyzmq and TensorFlow
alone.

This is the baseline of the end-to-end figures: NumPy acting, columns over PUSH/PULL, one
XLA-compiled update of the same kind and size, weights back over PUB/SUB. It has no config,
recovery, accounting or metrics. Started as

    python -m benchmarks.bare_pair '{"kind": "vtrace", "workers": 1, ...}'

it prints {"steps_per_s": ...} after ``seconds`` of steady running.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["PairSpec"]

SHAPES = ((4, 64), (64, 64), (64, 2), (4, 64), (64, 64), (64, 1))


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Settings of one bare run.

    Attributes:
        kind: "ppo" alternates sampling and training; "vtrace" overlaps them.
        workers: sampling processes.
        num_envs: environments per process.
        vectorised: use the environment's own vectorised form instead of Python environments in
            turn.
        length: steps of each environment per fragment.
        batch: env steps per update.
        epochs: passes over each batch.
        minibatch: env steps per optimiser step.
        threads: threads of TensorFlow.
        seconds: measured time.
        port: first of two TCP ports; with 0 the learner picks them.
    """

    kind: str
    workers: int
    num_envs: int
    vectorised: bool
    length: int
    batch: int
    epochs: int = 1
    minibatch: int = 0
    threads: int = 2
    seconds: float = 4.0
    port: int = 0


def _sample(spec: PairSpec) -> None:
    import gymnasium
    import numpy as np
    import zmq

    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.sndhwm = 2
    push.connect(f"tcp://127.0.0.1:{spec.port}")
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    sub.connect(f"tcp://127.0.0.1:{spec.port + 1}")
    rng = np.random.default_rng(os.getpid())
    n, t_max = spec.num_envs, spec.length
    if spec.vectorised:
        vector = gymnasium.make_vec("CartPole-v1", n)
        current = vector.reset(seed=os.getpid())[0]
    else:
        singles = [gymnasium.make("CartPole-v1", disable_env_checker=True) for _ in range(n)]
        current = np.stack([env.reset(seed=os.getpid() + i)[0] for i, env in enumerate(singles)])

    def step(actions: Any) -> tuple[Any, Any, Any]:
        if spec.vectorised:
            obs, rewards, terminated, truncated, _ = vector.step(actions)
            return obs, rewards, terminated | truncated
        obs, rewards, dones = (
            np.empty((n, 4), np.float32),
            np.empty(n, np.float32),
            np.zeros(n, bool),
        )
        for i, (env, action) in enumerate(zip(singles, actions.tolist(), strict=True)):
            obs[i], rewards[i], terminated_i, truncated_i, _ = env.step(action)
            if terminated_i or truncated_i:
                dones[i] = True
                obs[i] = env.reset()[0]
        return obs, rewards, dones

    frames = sub.recv_multipart(copy=False)
    ended_before = np.zeros(n, bool)
    while True:
        weights = [np.frombuffer(frame.buffer, np.float32) for frame in frames]
        matrices = [w.reshape(shape) for w, shape in zip(weights[0::2], SHAPES, strict=True)]
        biases = weights[1::2]
        obs = np.empty((t_max + 1, n, 4), np.float32)
        actions = np.empty((t_max, n), np.int64)
        logp, rewards = np.empty((t_max, n), np.float32), np.empty((t_max, n), np.float32)
        values, dones = np.empty((t_max + 1, n), np.float32), np.empty((t_max, n), bool)
        noise = rng.random((t_max, n), np.float32)
        obs[0] = current
        for t in range(t_max):
            h = np.tanh(np.tanh(obs[t] @ matrices[0] + biases[0]) @ matrices[1] + biases[1])
            logits = h @ matrices[2] + biases[2]
            g = np.tanh(np.tanh(obs[t] @ matrices[3] + biases[3]) @ matrices[4] + biases[4])
            values[t] = (g @ matrices[5] + biases[5])[:, 0]
            difference = logits[:, 1] - logits[:, 0]
            p1 = 1.0 / (1.0 + np.exp(-difference))
            chosen = noise[t] < p1
            actions[t] = chosen
            logp[t] = np.log(np.where(chosen, p1, 1.0 - p1))
            obs[t + 1], rewards[t], dones[t] = step(actions[t])
        current = obs[t_max]
        columns = [obs, actions, logp, rewards, dones]
        if spec.kind == "ppo":
            g = np.tanh(np.tanh(current @ matrices[3] + biases[3]) @ matrices[4] + biases[4])
            values[t_max] = (g @ matrices[5] + biases[5])[:, 0]
            advantages, last = np.empty((t_max, n), np.float32), np.zeros(n, np.float32)
            for t in range(t_max - 1, -1, -1):
                live = 1.0 - dones[t]
                last = (
                    rewards[t] + 0.99 * values[t + 1] * live - values[t] + 0.99 * 0.95 * live * last
                )
                advantages[t] = last
            columns = [obs[:-1], actions, logp, advantages, advantages + values[:-1]]
        resets = 0  # a vectorised environment's reset steps are no transitions
        if spec.vectorised:
            resets = int(ended_before.sum()) + int(dones[:-1].sum())
            ended_before = dones[-1].copy()
        push.send_multipart(
            [
                *(np.ascontiguousarray(column).data for column in columns),
                np.int64(dones.size - resets).tobytes(),
            ],
            copy=False,
        )
        if spec.kind == "ppo":
            frames = sub.recv_multipart(copy=False)
        else:
            while sub.poll(0):
                frames = sub.recv_multipart(copy=False)


def _learn(spec: PairSpec) -> float:
    import numpy as np
    import zmq

    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.rcvhwm = 4
    port = pull.bind_to_random_port("tcp://127.0.0.1", 20000, 50000)
    pub = context.socket(zmq.PUB)
    pub.bind(f"tcp://127.0.0.1:{port + 1}")
    child = json.dumps({**asdict(spec), "port": port})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.bare_pair", child], env=environment)
        for _ in range(spec.workers)
    ]
    try:
        return _train(spec, np, pull, pub)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _train(spec: PairSpec, np: Any, pull: Any, pub: Any) -> float:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(spec.threads)
    rng = np.random.default_rng(0)
    variables = [
        tf.Variable(array)
        for shape in SHAPES
        for array in (
            (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32),
            np.zeros(shape[1], np.float32),
        )
    ]
    moments = [(tf.Variable(tf.zeros_like(v)), tf.Variable(tf.zeros_like(v))) for v in variables]

    def heads(obs: Any) -> tuple[Any, Any]:
        w = variables
        h = tf.tanh(tf.tanh(obs @ w[0] + w[1]) @ w[2] + w[3])
        g = tf.tanh(tf.tanh(obs @ w[6] + w[7]) @ w[8] + w[9])
        return h @ w[4] + w[5], (g @ w[10] + w[11])[..., 0]

    def log_prob(logits: Any, actions: Any) -> Any:
        return tf.reduce_sum(tf.nn.log_softmax(logits) * tf.one_hot(actions, 2), -1)

    def descend(loss: Any, tape: Any) -> None:
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.5)
        for v, g, (m1, m2) in zip(variables, gradients, moments, strict=True):
            m1.assign(0.9 * m1 + 0.1 * g)
            m2.assign(0.999 * m2 + 0.001 * g * g)
            v.assign_sub(1e-3 * m1 / (tf.sqrt(m2) + 1e-5))

    def entropy(logits: Any) -> Any:
        return -tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), -1)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def ppo(obs: Any, actions: Any, logp: Any, advantages: Any, targets: Any, order: Any) -> None:
        for i in tf.range(tf.shape(order)[0]):
            rows = order[i]
            o, a, lp = tf.gather(obs, rows), tf.gather(actions, rows), tf.gather(logp, rows)
            adv, target = tf.gather(advantages, rows), tf.gather(targets, rows)
            adv = (adv - tf.reduce_mean(adv)) / (tf.math.reduce_std(adv) + 1e-8)
            with tf.GradientTape() as tape:
                logits, value = heads(o)
                ratio = tf.exp(log_prob(logits, a) - lp)
                surrogate = tf.minimum(ratio * adv, tf.clip_by_value(ratio, 0.8, 1.2) * adv)
                loss = tf.reduce_mean(
                    -surrogate + 0.5 * tf.square(value - target) - 0.01 * entropy(logits)
                )
            descend(loss, tape)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def vtrace(obs: Any, actions: Any, logp: Any, rewards: Any, dones: Any) -> None:
        discounts = 0.99 * (1.0 - tf.cast(dones, tf.float32))
        with tf.GradientTape() as tape:
            logits, all_values = heads(obs)
            new_logp = log_prob(logits[:-1], actions)
            rho = tf.minimum(1.0, tf.exp(tf.stop_gradient(new_logp) - logp))
            values = tf.stop_gradient(all_values)
            deltas = rho * (rewards + discounts * values[1:] - values[:-1])
            acc = tf.zeros_like(values[0])
            out = tf.TensorArray(tf.float32, spec.length)
            for t in tf.range(spec.length - 1, -1, -1):
                acc = deltas[t] + discounts[t] * rho[t] * acc
                out = out.write(t, acc)
            targets = out.stack() + values[:-1]
            following = tf.concat([targets[1:], values[-1:]], 0)
            advantages = rho * (rewards + discounts * following - values[:-1])
            loss = tf.reduce_mean(
                -new_logp * advantages
                + 0.5 * tf.square(all_values[:-1] - targets)
                - 0.01 * entropy(logits[:-1])
            )
        descend(loss, tape)

    per_batch = spec.batch // (spec.length * spec.num_envs)
    n, t_max = spec.num_envs, spec.length
    shapes = ((t_max + (spec.kind == "vtrace"), n, 4), *[(t_max, n)] * 4)
    kinds = (
        np.float32,
        np.int64,
        np.float32,
        np.float32,
        np.bool_ if spec.kind == "vtrace" else np.float32,
    )
    # Compile before there are weights to sample with. Otherwise fragments sampled during
    # compilation would wait in the sockets and count as sampled while the clock runs.
    blank = [
        np.zeros((s[0], s[1] * per_batch, *s[2:]), k) for s, k in zip(shapes, kinds, strict=True)
    ]
    if spec.kind == "ppo":
        blank_order = np.zeros(
            (spec.epochs * spec.batch // spec.minibatch, spec.minibatch), np.int32
        )
        ppo(*[column.reshape(spec.batch, *column.shape[2:]) for column in blank], blank_order)
    else:
        vtrace(*blank)
    trained, measured_from, steps_from = 0, 0.0, 0
    updates = 0
    pub.send_multipart([v.numpy() for v in variables])
    waiting_since = time.monotonic()
    while True:
        fragments: list[list[Any]] = []
        steps = 0
        while len(fragments) < per_batch:
            while not pull.poll(200):
                if not updates:  # late subscribers missed the first weights
                    pub.send_multipart([v.numpy() for v in variables])
                if time.monotonic() - waiting_since > 60:
                    raise TimeoutError("the samplers sent nothing for 60 s")
            waiting_since = time.monotonic()
            *f, transitions = pull.recv_multipart(copy=False)
            steps += int(np.frombuffer(transitions.buffer, np.int64)[0])
            fragments.append(
                [
                    np.frombuffer(x.buffer, k).reshape(s)
                    for x, k, s in zip(f, kinds, shapes, strict=True)
                ]
            )
        columns = [np.concatenate(parts, axis=1) for parts in zip(*fragments, strict=True)]
        if spec.kind == "ppo":
            order = np.stack([rng.permutation(spec.batch) for _ in range(spec.epochs)]).astype(
                np.int32
            )
            flat = [column.reshape(spec.batch, *column.shape[2:]) for column in columns]
            ppo(*flat, order.reshape(-1, spec.minibatch))
        else:
            vtrace(*columns)
        pub.send_multipart([v.numpy() for v in variables])
        updates += 1
        trained += steps
        now = time.monotonic()
        if updates == 5:
            measured_from, steps_from = now, trained
        elif updates > 5 and now - measured_from >= spec.seconds:
            return (trained - steps_from) / (now - measured_from)


def main() -> None:
    spec = PairSpec(**json.loads(sys.argv[1]))
    if spec.port:
        _sample(spec)
    else:
        sys.stdout.write(json.dumps({"steps_per_s": _learn(spec)}))


if __name__ == "__main__":
    main()
