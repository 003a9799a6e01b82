"""Fitted Q evaluation: the value of stored actions under another policy.

Q is linear in features of the policy's inputs: the inputs themselves and random Fourier features of
several widths. For a Discrete space each action has its own weights; otherwise the features are of
observation and action together. Each iteration regresses ``r + g E[Q(s', a')]``, the expectation
over the new policy's actions, with a ridge. So it needs only NumPy, not TensorFlow, has no step
size or schedule to tune, and returns the same numbers for the same seed; the price is that Q of
images is rough. The first iteration starts at the fixed point of the unbounded regression if that
is small enough to solve. Targets are clipped to the range that rewards allow.

After the last step of an episode the value is 0 if the episode terminated. After a cut (a time
limit) the value continues as elsewhere, unless a cut counts as an end.

Sources: Le, Voloshin, Yue 2019, "Batch policy learning under constraints",
https://arxiv.org/abs/1903.08738, algorithm 3; Rahimi, Recht 2007, "Random features for large-scale
kernel machines".

Arrays [R + E, ...] hold the R steps of E episodes, one episode after the other, each with one more
row at its end for the observation after its last step. So the row after a step is always the one
that followed it. If an episode terminated, the row at its end has no meaning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from aiorl.acting.distributions import Categorical
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.columns import F32, F64, I64, Array, Bools
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, ConfigError, PolicyError
from aiorl.offline.estimators import (
    ActionLikelihoods,
    Trajectories,
    action_log_likelihoods,
    check_actions,
)

logger = logging.getLogger(__name__)

_EVALUATED_AT_ONCE = 4096
_MAX_WAVES = 256
_ROWS_PER_WAVE = 16
"""Rows per random feature: the first rows must have at least this many for each."""
_WIDTHS = (0.5, 1.0, 2.0, 4.0)
"""Widths of the random features, in deviations of the data, for one number; more numbers are
further apart."""
_MAX_PLAIN = 64
"""Largest number of inputs that are features themselves; with more, all features are random
ones."""
_FARTHEST = 10.0
"""Deviations from the mean at which numbers are clipped."""
_RIDGE = 1e-3
"""Ridge, as a fraction of the mean of the features' squares."""
_MAX_SOLVED = 2048
_TOLERANCE = 1e-4
"""Change of values, as a fraction of the largest, below which they have converged."""
_SMALLEST_DISCOUNT = 1e-5
"""Discount of steps beyond the reach of the iterations."""
_MAX_ITERATIONS = 2000
_NUM_DRAWS = 8
"""Actions sampled for an expectation over a continuous policy."""
_ROWS_AT_ONCE = 8192


class PolicyOutputs(NamedTuple):
    """Evaluation of a policy on E episodes of R steps together.

    Attributes:
        policy: the policy.
        steps: [R], the rows of [R + E] that are steps.
        logp: [R], log-probability of the action taken.
        actions: [R, ...], the actions, in column form.
        inputs: float32 [R + E, D], the policy's inputs: observations, flat, and recurrent states.
        dist_inputs: [R + E, P], inputs of its action distribution.
    """

    policy: GraphPolicy
    steps: I64
    logp: F64
    actions: Array
    inputs: F32
    dist_inputs: F32


Observe = Callable[[Sequence[Any]], Array]
"""Function that turns stored observations into network inputs."""


def log_likelihoods(
    policy: Policy,
    episodes: Sequence[SampleBatch],
    observe: Observe | None = None,
) -> F64:
    """Return log-probabilities [R] of the actions taken; see `evaluate_policy` for the
    arguments.

    Raises:
        PolicyError: the policy does not compute probabilities of actions.
        BatchError: observations or actions are outside its spaces.
    """
    if isinstance(policy, GraphPolicy) and not isinstance(policy, ActionLikelihoods):
        return evaluate_policy(policy, episodes, observe, need_ends=False).logp
    logp = [action_log_likelihoods(policy, episode) for episode in episodes]
    return _finite(np.concatenate(logp))


def evaluate_policy(
    policy: Policy,
    episodes: Sequence[SampleBatch],
    observe: Observe | None = None,
    *,
    need_ends: bool,
) -> PolicyOutputs:
    """Evaluate a policy at each step, and after the last step of each episode.

    The policy samples from its distribution, without additional exploration. A recurrent policy
    starts each episode with its initial state.

    Args:
        policy: the policy.
        episodes: whole episodes.
        observe: function that turns stored observations into network inputs; None if they are
            network inputs already.
        need_ends: require the final observation of each episode that did not terminate.

    Raises:
        PolicyError: the policy is not one of aiorl's networks.
        BatchError: a column is missing, or observations or actions are outside its spaces.
    """
    if not isinstance(policy, GraphPolicy):
        raise PolicyError(
            f"{type(policy).__name__} has no known action distribution, which dm and dr need; use"
            " is, wis, pdis"
        )
    obs_parts: list[Array] = []
    for episode in episodes:
        obs_parts += _inputs(policy, episode, observe, need_ends)
    obs = np.concatenate(obs_parts)
    by_episode = [check_actions(episode, policy.layout) for episode in episodes]
    actions = np.concatenate(by_episode)
    lengths = np.array([episode.count for episode in episodes])
    steps = steps_of(lengths)
    prev = None
    if policy.spec.prev_action is not None:
        rewards = [np.asarray(episode[c.REWARDS], np.float32) for episode in episodes]
        prev = _behind_zeros(by_episode), _behind_zeros(rewards)
    dist_inputs, states = _evaluated(policy, obs, lengths, prev)
    logp = np.asarray(
        policy.distribution.logp(dist_inputs[steps], actions),
        np.float64,
    )
    inputs = [array.reshape(len(obs), -1) for array in (obs.astype(np.float32), *states)]
    return PolicyOutputs(
        policy=policy,
        steps=steps,
        logp=_finite(logp),
        actions=actions,
        inputs=np.concatenate(inputs, axis=1),
        dist_inputs=dist_inputs,
    )


def _inputs(
    policy: GraphPolicy,
    episode: SampleBatch,
    observe: Observe | None,
    need_end: bool,
) -> tuple[Array, Array]:
    """Return an episode's observations as network inputs, and the observation [1, ...] after its
    last step.
    """
    obs = _network_inputs(policy, episode, episode[c.OBS], observe)
    if c.NEW_OBS in episode:
        return obs, _network_inputs(policy, episode, episode[c.NEW_OBS][-1:], observe)
    if need_end and not has_terminated(episode):
        raise BatchError(
            c.NEW_OBS,
            "it to exist, because an episode was cut and its end has a value (or count a cut as an"
            " end)",
            sorted(episode),
        )
    return obs, np.zeros_like(obs[:1])


def _network_inputs(
    policy: GraphPolicy,
    episode: SampleBatch,
    stored: Array,
    observe: Observe | None,
) -> Array:
    spec = policy.spec
    obs = stored if observe is None else observe(list(stored))
    if obs.shape[1:] != spec.obs_shape:
        hint = ""
        if observe is None:
            hint = "; observations in the form of the environment must be preprocessed first"
        raise BatchError(
            c.OBS,
            f"observations of shape {spec.obs_shape}, as the policy expects them",
            f"{obs.shape[1:]}{hint}",
        )
    cast: Array = obs.astype(spec.obs_dtype, copy=False)
    if spec.obs_dtype == "uint8" and obs.dtype != np.uint8 and not np.array_equal(cast, obs):
        raise BatchError(
            c.OBS,
            "whole numbers from 0 to 255",
            f"others{_in_episode(episode)}",
        )
    if cast.dtype.kind == "f" and not np.isfinite(cast).all():
        raise BatchError(
            c.OBS,
            "finite numbers",
            f"others{_in_episode(episode)}",
        )
    return cast


def _in_episode(episode: SampleBatch) -> str:
    return f" in episode {episode[c.EPS_ID][0]}" if c.EPS_ID in episode else ""


def has_terminated(episode: SampleBatch) -> bool:
    """Return whether an episode terminated, not by a time limit; ``dones`` decides if there is no
    better column.
    """
    for name in (c.TERMINATEDS, c.DONES):
        if name in episode:
            return bool(episode[name][-1])
    return False


def steps_of(lengths: I64) -> I64:
    """Return the rows of [R + E] that are steps of episodes with the given lengths [E]."""
    return np.arange(lengths.sum()) + np.repeat(np.arange(len(lengths)), lengths)


def _behind_zeros(by_episode: Sequence[Array]) -> Array:
    """Return [R + E, ...]: in each row the value of the previous step of the same episode; 0 at the
    starts.
    """
    parts: list[Array] = []
    for column in by_episode:
        parts += (np.zeros_like(column[:1]), column)
    return np.concatenate(parts)


def _evaluated(
    policy: GraphPolicy,
    obs: Array,
    lengths: I64,
    prev: tuple[Array, Array] | None,
) -> tuple[F32, list[F32]]:
    """Return the network's outputs for each row, and the states before each row."""
    num_dist_inputs = policy.spec.num_dist_inputs
    dist_inputs = np.empty((len(obs), num_dist_inputs), np.float32)
    states = policy.initial_state(len(obs))

    def evaluate(rows: Any, state: list[F32]) -> list[F32]:
        for whole, component in zip(states, state, strict=True):
            whole[rows] = component
        prev_of_rows = None
        if prev is not None:
            actions, rewards = prev
            prev_of_rows = (actions[rows], rewards[rows])
        outputs, _, next_state = policy.graph.run(obs[rows], state, prev_of_rows)
        dist_inputs[rows] = outputs[:, :num_dist_inputs]
        return next_state

    if not policy.is_recurrent:
        for begin in range(0, len(obs), _EVALUATED_AT_ONCE):
            evaluate(slice(begin, begin + _EVALUATED_AT_ONCE), [])
        return dist_inputs, []
    starts = np.cumsum(lengths + 1) - (lengths + 1)
    running = np.arange(len(lengths))
    state = policy.initial_state(len(lengths))
    for step in range(int(lengths.max()) + 1):  # all episodes in parallel
        has_step = lengths[running] >= step
        running = running[has_step]
        state = [component[has_step] for component in state]
        state = evaluate(starts[running] + step, state)
    return dist_inputs, states


def _finite(logp: F64) -> F64:
    """Return `logp` unchanged; -inf is allowed, because an action can be impossible now, but NaN
    and inf are not.
    """
    rows = np.flatnonzero(np.isnan(logp) | (logp == np.inf))
    if len(rows):
        raise PolicyError(
            f"the policy's log-probability of action {rows[0]} is {logp[rows[0]]}; its weights or"
            " the observations are wrong"
        )
    return logp


class _Waves:
    """Features [N, d] of numbers [N, D], standardised with the first numbers."""

    def __init__(self, first: F32, rng: np.random.Generator) -> None:
        self._mean = first.mean(0)
        std = first.std(0)
        scale = 1.0 / np.maximum(std, 1e-6)
        # numbers that are constant are not scaled
        self._scale = np.where(std > 1e-6, scale, 1.0).astype(np.float32)
        size = first.shape[1]
        num_waves = max(16, min(_MAX_WAVES, len(first) // _ROWS_PER_WAVE))
        widths = np.resize(np.array(_WIDTHS), num_waves) * math.sqrt(max(1, size))
        frequencies = rng.standard_normal((size, num_waves)) / widths
        self._frequencies = frequencies.astype(np.float32)
        self._phases = rng.uniform(0.0, 2.0 * math.pi, num_waves).astype(np.float32)
        self._has_plain = size <= _MAX_PLAIN

    def __call__(self, numbers: F32) -> F64:
        standardised = (numbers - self._mean) * self._scale
        near = np.clip(standardised, -_FARTHEST, _FARTHEST)
        waves = np.cos(near @ self._frequencies + self._phases)
        parts = [np.ones((len(near), 1), np.float32), waves]
        if self._has_plain:
            parts.append(near)
        # in float32, sums of products over many rows are too inexact for iterations to converge
        return np.concatenate(parts, axis=1, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class QRows:
    """Features of E episodes of R steps.

    Attributes:
        of: the episodes.
        action_features: [R + E, d], features of observation and action together; equal to ``expected`` if
            actions have their own weights.
        choices: [R], the action's number; 0 if actions have no weights of their own.
        expected: [R + E, d], ``action_features`` averaged over the new policy's actions, or features of
            observations alone.
        probabilities: [R + E, A], the new policy's; ones [R + E, 1] if actions have no weights of
            their own.
        has_next_value: bool [E], True if the observation after the last step has a value.
    """

    of: Trajectories
    action_features: F64
    choices: I64
    expected: F64
    probabilities: F64
    has_next_value: Bools

    def of_episodes(self, index: I64) -> QRows:
        """Return the rows of some episodes, given in increasing order."""
        is_in = np.zeros(len(self.of), bool)
        is_in[index] = True
        steps = np.repeat(is_in, self.of.lengths)
        rows = np.repeat(is_in, self.of.lengths + 1)
        expected = self.expected[rows]
        action_features = expected
        if self.action_features is not self.expected:
            action_features = self.action_features[rows]
        return QRows(
            of=Trajectories(self.of.rewards[steps], self.of.lengths[index], self.of.gamma),
            action_features=action_features,
            choices=self.choices[steps],
            expected=expected,
            probabilities=self.probabilities[rows],
            has_next_value=self.has_next_value[index],
        )

    @property
    def steps(self) -> I64:
        """Rows [R] that are steps."""
        return steps_of(self.of.lengths)

    @property
    def discounts(self) -> F64:
        """Discounts [R] of the value after each step; 0 if that has no value."""
        discounts = np.full(len(self.choices), self.of.gamma)
        last_steps = self.of.starts + self.of.lengths - 1
        discounts[last_steps] *= self.has_next_value
        return discounts


class FeatureBank:
    """Collection of the features of episodes, a few episodes at a time."""

    def __init__(self, seed: int) -> None:
        """Start empty, with the seed of the features and of the sampled actions."""
        self._rng = np.random.default_rng(seed)
        self._waves: _Waves | None = None
        self._action_features: list[F64] = []
        self._parts: list[tuple[Array, Array, Array]] = []

    def add(self, outputs: PolicyOutputs) -> None:
        """Add the evaluation of some episodes; the first ones determine the features."""
        distribution = outputs.policy.distribution
        num_rows = len(outputs.inputs)
        if isinstance(distribution, Categorical):
            first_action = int(getattr(outputs.policy.action_space, "start", 0))
            choices = outputs.actions.astype(np.int64) - first_action
            expected = self._features(outputs.inputs, outputs.steps)
            probabilities = distribution.probabilities(outputs.dist_inputs)
        else:
            draws = [distribution.sample(outputs.dist_inputs, self._rng) for _ in range(_NUM_DRAWS)]
            # the rows at the ends of episodes have no action
            actions = np.zeros((num_rows, *outputs.actions.shape[1:]), outputs.actions.dtype)
            actions[outputs.steps] = outputs.actions
            self._action_features.append(
                self._features(_joined(outputs.inputs, actions), outputs.steps)
            )
            features = [
                self._features(_joined(outputs.inputs, draw), outputs.steps) for draw in draws
            ]
            expected = np.mean(features, axis=0)
            choices = np.zeros(len(outputs.steps), np.int64)
            probabilities = np.ones((num_rows, 1))
        self._parts.append((choices, expected, probabilities))

    def rows(self, of: Trajectories, has_next_value: Bools) -> QRows:
        """Return the rows of all episodes.

        Args:
            of: the episodes, in the order of `add`.
            has_next_value: [E], True if the observation after the last step has a value.
        """
        choices, expected, probabilities = map(np.concatenate, zip(*self._parts, strict=True))
        action_features = expected
        if self._action_features:
            action_features = np.concatenate(self._action_features)
        return QRows(
            of=of,
            action_features=action_features,
            choices=choices,
            expected=expected,
            probabilities=probabilities,
            has_next_value=has_next_value,
        )

    def _features(self, numbers: F32, steps: I64) -> F64:
        self._waves = self._waves or _Waves(numbers[steps], self._rng)
        starts = range(0, len(numbers), _ROWS_AT_ONCE)
        return np.concatenate(
            [self._waves(numbers[start : start + _ROWS_AT_ONCE]) for start in starts]
        )


def _joined(inputs: F32, actions: Array) -> F32:
    flat_actions = actions.reshape(len(actions), -1).astype(np.float32)
    return np.concatenate([inputs, flat_actions], axis=1)


class FittedQ:
    """Q of a policy, fitted to episodes.

    Attributes:
        num_iterations: number of regressions.
        has_converged: True if the last regression changed almost nothing.
        error: root mean square of the differences between Q and its targets, on the rows it was
            fitted to.
    """

    def __init__(self, rows: QRows) -> None:
        """Fit Q.

        Raises:
            ConfigError: values are infinite, because there is no discount and a cut is not an end.
        """
        gamma = rows.of.gamma
        if gamma >= 1.0 and rows.has_next_value.any():
            raise ConfigError(
                "without a discount, the value after a time limit is not finite.",
                key="gamma",
                value=gamma,
                hint="Give a gamma below 1, or count a cut as an end (--cut-is-end).",
            )
        longest = int(rows.of.lengths.max())
        if gamma >= 1.0:
            horizon = float(longest)
            max_iterations = longest + 1
        else:
            horizon = 1.0 / (1.0 - gamma)
            reach = math.log(_SMALLEST_DISCOUNT) / math.log(max(gamma, 1e-3))
            max_iterations = math.ceil(reach)
        self._low = min(0.0, float(rows.of.rewards.min())) * horizon
        self._high = max(0.0, float(rows.of.rewards.max())) * horizon
        self._fit(rows, min(_MAX_ITERATIONS, max_iterations))

    def values(self, rows: QRows) -> tuple[F64, F64, F64]:
        """Return Q of the actions taken, V of the observations and V of the next ones (0 after an
        end): [R] each.
        """
        v = self._expected(rows)
        steps = rows.steps
        q = (rows.action_features @ self._weights)[steps, rows.choices]
        v_next = np.where(rows.discounts > 0.0, v[steps + 1], 0.0)
        return self._bounded(q), v[steps], v_next

    def _fit(self, rows: QRows, max_iterations: int) -> None:
        num_actions = rows.probabilities.shape[1]
        steps = rows.steps
        discounts = rows.discounts
        of_action = [np.flatnonzero(rows.choices == action) for action in range(num_actions)]
        inverses = [_inverse(rows.action_features, steps[chosen]) for chosen in of_action]
        self._weights = self._fixed_point(rows, of_action, inverses)
        v_next = self._expected(rows)[steps + 1]
        by_action = np.zeros((len(rows.expected), num_actions))
        self.has_converged = False
        self.num_iterations = 0
        while self.num_iterations < max_iterations and not self.has_converged:
            targets = rows.of.rewards + discounts * v_next
            by_action[steps, rows.choices] = targets
            moments = rows.action_features.T @ by_action
            for action, inverse in enumerate(inverses):
                self._weights[:, action] = inverse @ moments[:, action]
            previous = v_next
            v_next = self._expected(rows)[steps + 1]
            self.num_iterations += 1
            change = np.abs((v_next - previous) * discounts).max()
            largest = max(1e-8, np.abs(v_next).max())
            self.has_converged = bool(change <= _TOLERANCE * largest)
        q, _, _ = self.values(rows)
        errors = q - targets
        self.error = float(np.sqrt(np.mean(errors * errors)))
        if not self.has_converged:
            logger.warning(
                "fitted Q evaluation has not converged after %d iterations",
                self.num_iterations,
            )

    def _fixed_point(
        self,
        rows: QRows,
        of_action: Sequence[I64],
        inverses: Sequence[F64],
    ) -> F64:
        """Return weights [d, A] that a regression of unbounded targets keeps; zeros if they can't
        be computed.
        """
        size = rows.action_features.shape[1]
        num_actions = len(of_action)
        zeros = np.zeros((size, num_actions))
        num_weights = size * num_actions
        if num_weights > _MAX_SOLVED:
            return zeros
        steps = rows.steps
        discounts = rows.discounts
        # the weights w of all actions solve matrix @ w = constants
        matrix = np.eye(num_weights)
        constants = np.zeros(num_weights)
        blocks = [slice(start, start + size) for start in range(0, num_weights, size)]
        for action, chosen in enumerate(of_action):
            features = rows.action_features[steps[chosen]]
            next_rows = steps[chosen] + 1
            next_features = rows.expected[next_rows]
            rewards = rows.of.rewards[chosen] @ features
            constants[blocks[action]] = inverses[action] @ rewards
            for next_action in range(num_actions):
                weights = discounts[chosen] * rows.probabilities[next_rows, next_action]
                moments = features.T @ (next_features * weights[:, None])
                block = (blocks[action], blocks[next_action])
                matrix[block] -= inverses[action] @ moments
        try:
            solution = np.linalg.solve(matrix, constants)
        except np.linalg.LinAlgError:
            return zeros
        if not np.isfinite(solution).all():
            return zeros
        return np.ascontiguousarray(solution.reshape(num_actions, size).T)

    def _expected(self, rows: QRows) -> F64:
        """Return V [R + E]."""
        q = self._bounded(rows.expected @ self._weights)
        v: F64 = (rows.probabilities * q).sum(axis=1)
        return v

    def _bounded(self, values: Array) -> F64:
        return np.clip(values, self._low, self._high)


def _inverse(features: F64, rows: I64) -> F64:
    """Return the inverse [d, d] of the features' second moments over some rows, with a ridge."""
    size = features.shape[1]
    moments = np.zeros((size, size))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = features[rows[start : start + _ROWS_AT_ONCE]]
        moments += part.T @ part
    ridge = _RIDGE * max(1.0, float(np.trace(moments)) / size)
    inverse: F64 = np.linalg.inv(moments + ridge * np.eye(size))
    return inverse
