"""A Markov decision process that is small enough to sum over all trajectories, and episodes of it.

Its states are layered, so no trajectory has more than three steps; the length depends on chance and
actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction as F

import numpy as np
from gymnasium import spaces

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.data.sample_batch import SampleBatch
from aiorl.data.spaces import space_to_dict

NUM_STATES = 5
FIRST = ((0, F(2, 3)), (1, F(1, 3)))
STEPS: dict[tuple[int, int], list[tuple[F, int | None, int]]] = {
    (0, 0): [(F(1, 2), 2, 1), (F(1, 2), 3, 0)],
    (0, 1): [(F(1, 4), None, 3), (F(3, 4), 3, 1)],
    (1, 0): [(F(1), 2, -1)],
    (1, 1): [(F(1, 3), None, 0), (F(2, 3), 2, 2)],
    (2, 0): [(F(3, 4), 4, 1), (F(1, 4), None, 2)],
    (2, 1): [(F(1), None, -2)],
    (3, 0): [(F(1), 4, 0)],
    (3, 1): [(F(1, 2), 4, 3), (F(1, 2), None, 1)],
    (4, 0): [(F(1), None, 4)],
    (4, 1): [(F(1, 5), None, 10), (F(4, 5), None, 0)],
}
"""Transitions by state and action: probability, next state (None: the end) and reward."""

OLD = [F(1, 2), F(1, 3), F(3, 4), F(1, 2), F(2, 5)]
NEW = [F(1, 4), F(2, 3), F(9, 10), F(1, 5), F(3, 5)]
"""Probability of action 0 in each state."""


def chance(policy: list[F], state: int, action: int) -> F:
    return policy[state] if action == 0 else 1 - policy[state]


def trajectories(policy: list[F]) -> Iterator[tuple[F, list[int]]]:
    """Return each trajectory's probability and rewards."""

    def onward(
        state: int | None, probability: F, rewards: list[int]
    ) -> Iterator[tuple[F, list[int]]]:
        if state is None:
            yield probability, rewards
            return
        for action in (0, 1):
            for share, after, reward in STEPS[state, action]:
                yield from onward(
                    after, probability * chance(policy, state, action) * share, [*rewards, reward]
                )

    for state, share in FIRST:
        yield from onward(state, share, [])


def true_value(policy: list[F], gamma: F) -> F:
    """Return the exact expected discounted return."""
    return sum(
        (
            p * sum(gamma**t * r for t, r in enumerate(rewards))
            for p, rewards in trajectories(policy)
        ),
        F(0),
    )


def true_q(policy: list[F], gamma: F) -> dict[tuple[int, int], F]:
    """Return the exact value of each state and action."""
    q: dict[tuple[int, int], F] = {}
    for state in reversed(range(NUM_STATES)):
        for action in (0, 1):
            q[state, action] = sum(
                (
                    share * (reward + (0 if after is None else gamma * value_of(policy, q, after)))
                    for share, after, reward in STEPS[state, action]
                ),
                F(0),
            )
    return q


def value_of(policy: list[F], q: dict[tuple[int, int], F], state: int) -> F:
    return sum((chance(policy, state, action) * q[state, action] for action in (0, 1)), F(0))


def play(policy: list[F], num_episodes: int, rng: np.random.Generator) -> list[SampleBatch]:
    """Return episodes in the form that a sampler records, with one-hot observations."""
    return [_episode(policy, number, rng) for number in range(num_episodes)]


def _episode(policy: list[F], number: int, rng: np.random.Generator) -> SampleBatch:
    state: int | None = FIRST[int(rng.random() >= FIRST[0][1])][0]
    states, actions, rewards = [], [], []
    while state is not None:
        action = int(rng.random() >= policy[state])
        states.append(state)
        actions.append(action)
        ways = STEPS[state, action]
        way = 0 if len(ways) == 1 or rng.random() < ways[0][0] else 1
        _, state, reward = ways[way]
        rewards.append(reward)
    seen = np.eye(NUM_STATES, dtype=np.float32)[states]
    dones = np.arange(len(states)) == len(states) - 1
    logp = [np.log(float(chance(policy, *pair))) for pair in zip(states, actions, strict=True)]
    return SampleBatch(
        obs=seen,
        new_obs=np.concatenate([seen[1:], np.zeros_like(seen[:1])]),
        actions=np.array(actions),
        rewards=np.array(rewards, np.float32),
        terminateds=dones,
        truncateds=np.zeros_like(dones),
        dones=dones,
        action_logp=np.array(logp),
        eps_id=np.full(len(states), number),
        t=np.arange(len(states)),
    )


class Table:
    """Network that looks up logits by the state in a one-hot observation."""

    def __init__(self, policy: list[F]) -> None:
        first = np.array([float(share) for share in policy])
        with np.errstate(divide="ignore"):
            logits = np.log(np.stack([first, 1 - first], axis=1))
        self.logits = np.maximum(logits, -1e30).astype(np.float32)

    def run(self, obs, state=(), prev=None, out=None, noise=None):
        return self.logits[obs.argmax(axis=1)], np.zeros(len(obs), np.float32), []

    def set_weights(self, weights):
        raise NotImplementedError

    def get_weights(self):
        return {}


def table_policy(policy: list[F]) -> GraphPolicy:
    spec = ActingSpec(
        (NUM_STATES,), "float32", (), 2, "categorical", space_to_dict(spaces.Discrete(2)), ()
    )
    return GraphPolicy(Table(policy), spec)
