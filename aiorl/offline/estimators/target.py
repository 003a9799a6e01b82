"""What the policy that is judged would do at each step of stored episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.distributions import Categorical
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, PolicyError
from aiorl.offline.estimators.likelihoods import ActionLikelihoods, action_log_likelihoods, check_actions

__all__ = ["Look", "Target"]

Array = NDArray[Any]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_ROWS_AT_ONCE = 4096


class Look(NamedTuple):
    """What the policy makes of E episodes of R rows together.

    Rows of what followed the last step of each episode, [E, ...], are behind those of the steps. Where an episode
    terminated they mean nothing.

    Attributes:
        logp: [R], log-probability of the action taken.
        actions: [R, ...], the actions, in column form.
        known: float32 [R + E, D], what the policy acts upon: observations, flat, and recurrent states.
        dist_inputs: [R + E, P], inputs of its action distribution.
    """

    logp: F64
    actions: Array
    known: F32
    dist_inputs: F32


class Target:
    """Evaluates a policy along stored episodes; a recurrent one with its own states, from each episode's start.

    It is judged as it acts when it draws from its distribution, without exploration on top of that.

    Attributes:
        policy: the policy.
    """

    def __init__(self, policy: Policy, observe: Callable[[Sequence[Any]], Array] | None = None) -> None:
        """Take a policy.

        Args:
            policy: it.
            observe: makes network inputs of stored observations; None where they are network inputs already.
        """
        self.policy = policy
        self._observe = observe

    @property
    def num_choices(self) -> int | None:
        """A, the number of actions of a Discrete space; None for any other one."""
        policy = self.policy
        is_choice = isinstance(policy, GraphPolicy) and isinstance(policy.distribution, Categorical)
        return policy.distribution.num_inputs if is_choice else None  # type: ignore[attr-defined]

    def log_likelihoods(self, episodes: Sequence[SampleBatch]) -> F64:
        """[R]: log-probabilities of the actions taken.

        Raises:
            PolicyError: the policy cannot tell.
            BatchError: observations or actions that are not of its spaces.
        """
        if isinstance(self.policy, GraphPolicy) and not isinstance(self.policy, ActionLikelihoods):
            return self.look(episodes, need_ends=False).logp
        return _finite(np.concatenate([action_log_likelihoods(self.policy, episode) for episode in episodes]))

    def look(self, episodes: Sequence[SampleBatch], *, need_ends: bool) -> Look:
        """Evaluate the policy at each step, and at what followed the last ones.

        Args:
            episodes: whole episodes.
            need_ends: an episode that did not terminate must have the observation that followed.

        Raises:
            PolicyError: the policy is not one of aiorl's networks.
            BatchError: a column is missing; observations or actions that are not of its spaces.
        """
        policy = self.policy
        if not isinstance(policy, GraphPolicy):
            raise PolicyError(
                f"{type(policy).__name__} cannot tell its action distribution, which dm and dr need; use is, wis, pdis"
            )
        obs = np.concatenate(
            [self._inputs(episode, episode[c.OBS]) for episode in episodes]
            + [self._end(episode, need_ends) for episode in episodes]
        )
        actions = np.concatenate([check_actions(episode, policy.layout) for episode in episodes])
        lengths = np.array([episode.count for episode in episodes])
        prev = None if policy.spec.prev_action is None else _previous(policy, episodes, actions)
        if policy.is_recurrent:
            dist_inputs, states = _step_by_step(policy, obs, lengths, prev)
        else:
            dist_inputs, states = _all_at_once(policy, obs, prev), []
        logp = policy.distribution.logp(dist_inputs[: len(actions)], actions)
        known = [obs.reshape(len(obs), -1).astype(np.float32), *(state.reshape(len(obs), -1) for state in states)]
        return Look(_finite(np.asarray(logp, np.float64)), actions, np.concatenate(known, axis=1), dist_inputs)

    def probabilities(self, dist_inputs: F32) -> F64:
        """[N, A]: of each action, where there are `num_choices`."""
        assert isinstance(self.policy, GraphPolicy)  # whose inputs these are
        assert isinstance(self.policy.distribution, Categorical)
        return self.policy.distribution.probabilities(dist_inputs)

    def sample(self, dist_inputs: F32, rng: np.random.Generator) -> Array:
        """[N, ...]: actions drawn anew, in column form."""
        assert isinstance(self.policy, GraphPolicy)  # whose inputs these are
        return self.policy.distribution.sample(dist_inputs, rng)

    def _inputs(self, episode: SampleBatch, stored: Array) -> Array:
        """Observations as the network takes them."""
        assert isinstance(self.policy, GraphPolicy)
        spec = self.policy.spec
        obs = stored if self._observe is None else self._observe(list(stored))
        if obs.shape[1:] != spec.obs_shape:
            hint = "" if self._observe else "; stored as its environment gives them, they must be preprocessed first"
            raise BatchError(
                c.OBS, f"observations of shape {spec.obs_shape}, as the policy takes them", f"{obs.shape[1:]}{hint}"
            )
        cast: Array = obs.astype(spec.obs_dtype, copy=False)
        is_lost = spec.obs_dtype == "uint8" and obs.dtype != np.uint8 and not np.array_equal(cast, obs)
        if is_lost or not (cast.dtype.kind != "f" or np.isfinite(cast).all()):
            episode_id = f" in episode {episode[c.EPS_ID][0]}" if c.EPS_ID in episode else ""
            expected = "whole numbers from 0 to 255" if is_lost else "finite numbers"
            raise BatchError(c.OBS, expected, f"others{episode_id}")
        return cast

    def _end(self, episode: SampleBatch, is_needed: bool) -> Array:
        """[1, ...]: what followed the last step; zeros where nobody asks."""
        assert isinstance(self.policy, GraphPolicy)
        if c.NEW_OBS in episode:
            return self._inputs(episode, episode[c.NEW_OBS][-1:])
        if is_needed and not has_terminated(episode):
            raise BatchError(
                c.NEW_OBS,
                "it to be there, since an episode was cut and its end has a value (or say that a cut is an end)",
                sorted(episode),
            )
        return np.zeros((1, *self.policy.spec.obs_shape), self.policy.spec.obs_dtype)


def has_terminated(episode: SampleBatch) -> bool:
    """Whether an episode ended by itself and not by a time limit; ``dones`` say so where nothing better is there."""
    for name in (c.TERMINATEDS, c.DONES):
        if name in episode:
            return bool(episode[name][-1])
    return False


def _all_at_once(policy: GraphPolicy, obs: Array, prev: tuple[Array, Array] | None) -> F32:
    parts = []
    for begin in range(0, len(obs), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        outputs = policy.graph.run(obs[rows], (), None if prev is None else (prev[0][rows], prev[1][rows]))[0]
        parts.append(outputs[:, : policy.spec.num_dist_inputs])
    return np.concatenate(parts)


def _step_by_step(
    policy: GraphPolicy, obs: Array, lengths: NDArray[np.int64], prev: tuple[Array, Array] | None
) -> tuple[F32, list[F32]]:
    """All episodes side by side, and the states that went into each row."""
    num_rows = len(obs) - len(lengths)
    starts = np.cumsum(lengths) - lengths
    dist_inputs = np.empty((len(obs), policy.spec.num_dist_inputs), np.float32)
    states = policy.initial_state(len(obs))
    running = np.arange(len(lengths))
    state = policy.initial_state(len(lengths))
    for step in range(int(lengths.max()) + 1):
        goes_on = lengths[running] >= step
        running, state = running[goes_on], [component[goes_on] for component in state]
        rows = np.where(lengths[running] == step, num_rows + running, starts[running] + step)
        for whole, component in zip(states, state, strict=True):
            whole[rows] = component
        before = None if prev is None else (prev[0][rows], prev[1][rows])
        outputs, _, state = policy.graph.run(obs[rows], state, before)
        dist_inputs[rows] = outputs[:, : policy.spec.num_dist_inputs]
    return dist_inputs, states


def _previous(policy: GraphPolicy, episodes: Sequence[SampleBatch], actions: Array) -> tuple[Array, Array]:
    """Actions and rewards of the step before, for each step and behind the last ones; zeros at the starts."""
    rewards = np.concatenate([np.asarray(episode[c.REWARDS], np.float32) for episode in episodes])
    lengths = np.array([episode.count for episode in episodes])
    starts = np.cumsum(lengths) - lengths
    before = []
    for column in (actions, rewards):
        shifted = np.roll(column, 1, axis=0)
        shifted[starts] = 0
        before.append(np.concatenate([shifted, column[starts + lengths - 1]]))
    return before[0], before[1]


def _finite(logp: F64) -> F64:
    """What is impossible now may be -inf, but nothing may be undefined."""
    rows = np.flatnonzero(np.isnan(logp) | (logp == np.inf))
    if len(rows):
        raise PolicyError(
            f"the policy's log-probability of action {rows[0]} is {logp[rows[0]]}; its weights or observations are not "
            "what they should be"
        )
    return logp
