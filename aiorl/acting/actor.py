"""Actor: one policy with everything around it, from an environment's observations to actions in the
environment's form.

It consists of preprocessor, filter, policy with its exploration, and clipping. Samplers and loaded
policies share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from aiorl.acting.filters import ObservationFilter
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy, check_policy_input
from aiorl.acting.preprocessors import Preprocessor
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.columns import I64, Array, all_finite
from aiorl.errors import BatchError, PolicyError
from aiorl.process.log_once import report, summarize

_ROW_COLUMNS = frozenset(
    {
        c.T,
        c.EPS_ID,
        c.AGENT_INDEX,
        c.OBS,
        c.ACTIONS,
        c.REWARDS,
        c.PREV_ACTIONS,
        c.PREV_REWARDS,
        c.TERMINATEDS,
        c.TRUNCATEDS,
        c.DONES,
        c.INFOS,
        c.NEW_OBS,
    }
)
"""Columns that every row has; a policy cannot add one with such a name."""


_NO_ROWS = np.zeros(0, np.int64)
CARRIES_ACTION = "carries_action"
"""Key in the description of an export whose state includes the last action before it was
clipped."""


class FurtherInputs(NamedTuple):
    """Inputs of a policy besides observations and states, for N rows; a network gets only those
    that it uses.

    Attributes:
        prev_actions: [N, ...] in column form.
        prev_rewards: float32 [N].
        infos: N dicts.
        episodes: N episodes.
        agent_ids: N agent ids.
    """

    prev_actions: Array
    prev_rewards: Array
    infos: Sequence[Mapping[str, Any]]
    episodes: Sequence[Any]
    agent_ids: Sequence[Hashable]


class PolicyOutput(NamedTuple):
    """Result of one evaluation of a policy.

    Attributes:
        actions: [N, ...] in column form, unclipped.
        states: recurrent state after the step, N rows of each component.
        columns: columns that the policy adds to the rows.
        seconds: duration of the policy's evaluation.
    """

    actions: Array
    states: Sequence[Any]
    columns: Mapping[str, Any]
    seconds: float


class Actor:
    """Observes and acts for any number of rows together.

    Attributes:
        policy_id: the policy's name.
        policy: the policy.
        clips_actions: True if actions are clipped for the environment.
        layout: column form and environment form of the actions.
        obs_shape: shape of an observation at the policy.
        obs_dtype: its dtype.
        initial_state: recurrent state of one row at an episode's start, as the policy has it.
        initial_memory: the same as callers of `compute_actions` get it: the recurrent state and, if
            the policy looks back at actions that are clipped for environments, its last action
            before it was clipped.
    """

    def __init__(
        self,
        policy_id: str,
        policy: Policy,
        preprocessor: Preprocessor,
        observation_filter: ObservationFilter,
        *,
        clip_actions: bool = True,
        carries_action: bool = False,
    ) -> None:
        """Connect a policy with its other parts.

        Args:
            policy_id: the policy's name.
            policy: the policy.
            preprocessor: preprocessor of its observations.
            observation_filter: filter after the preprocessor.
            clip_actions: True to clip the environment's actions to the bounds of their space.
            carries_action: True if the last component of the policy's own state is its last action
                before it was clipped, as in exports.

        Raises:
            UnsupportedSpaceError: when the policy requires nested observations (also a ValueError).
        """
        check_policy_input(getattr(policy, "observation_space", None))
        self.policy_id = policy_id
        self.policy = policy
        self.layout = ActionLayout(policy.action_space)
        self.obs_shape = tuple(preprocessor.shape)
        self.obs_dtype = observation_filter.output_dtype(preprocessor.dtype)
        self.initial_state: list[Array] = [
            np.asarray(component) for component in policy.get_initial_state()
        ]
        self._preprocessor = preprocessor
        self._filter = observation_filter
        self.clips_actions = clip_actions
        self._has_mask = getattr(policy, "has_action_mask", False)
        self._result_check = _ResultCheck(
            policy_id, type(policy).__name__, self.layout, num_states=len(self.initial_state)
        )
        # our own policies need neither infos nor episodes, and their results need no check
        self._is_ours = (
            getattr(policy.compute_actions, "__func__", None) is GraphPolicy.compute_actions
        )
        self._policy_carries_action = carries_action
        self._carries_action = (
            isinstance(policy, GraphPolicy)
            and policy.spec.prev_action is not None
            and clip_actions
            and self.layout.is_bounded
            and not carries_action
        )
        self.initial_memory = list(self.initial_state)
        if self._carries_action:
            self.initial_memory.append(np.zeros(self.layout.shape, np.float32))

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """Space of the environment's observations."""
        return self._preprocessor.space

    @property
    def is_plain(self) -> bool:
        """True if the policy uses only observations, states and previous steps, and no code gets
        infos or episodes.
        """
        return self._is_ours and self.policy.exploration is None

    @property
    def uses_previous_step(self) -> bool:
        """True if the policy uses previous actions and rewards, or if that is unknown."""
        return not (
            self.is_plain
            and isinstance(self.policy, GraphPolicy)
            and self.policy.spec.prev_action is None
        )

    @property
    def is_filtered(self) -> bool:
        """True if the policy's input for an observation depends on earlier observations."""
        return not self._filter.is_identity

    def observe(self, observations: Sequence[Any], *, update: bool = True) -> Array:
        """Return the policy's inputs [N, ...] for observations.

        Args:
            observations: N observations of environments.
            update: True to add each one to the filter's statistics.

        Raises:
            BatchError: when one does not fit the space (also a ValueError).
            ValueError: when one does not fit the space, or is not finite.
            TypeError: when one does not fit the space.
        """
        batch = self._preprocessor.transform_rows(observations)
        if batch.dtype.kind == "f" and not all_finite(batch):
            raise ValueError("observation holds NaN or infinity")
        filtered = self._filter(batch, update)
        report("preprocessed_obs", self.policy_id, batch)
        report("filtered_obs", self.policy_id, filtered)
        return filtered

    def describe_fault(self, observation: Any) -> str:
        """Return the fault of one observation, "" for none."""
        try:
            row = self._preprocessor.transform_rows([observation])
        except (BatchError, ValueError, TypeError) as error:
            return str(error)
        if row.dtype.kind != "f" or all_finite(row):
            return ""
        return f"observation holds NaN or infinity: {summarize(observation)}"

    def rows_without_action(self, obs: Array) -> I64:
        """Return the rows with an action mask that forbids every action, so that no action is
        possible.
        """
        if self._has_mask:
            return self.policy.rows_without_action(obs)
        return _NO_ROWS

    def act(
        self,
        obs: Array,
        states: Sequence[Array],
        further_inputs: Callable[[], FurtherInputs],
        *,
        with_logp: bool = True,
    ) -> PolicyOutput:
        """Evaluate the policy once.

        Args:
            obs: [N, ...] from `observe`; the policy may write into it.
            states: recurrent state, [N, ...] of each component.
            further_inputs: returns the other inputs; called only if the policy uses them.
            with_logp: see `GraphPolicy.act`; other policies always return what they have.

        Raises:
            BatchError: when the policy returns another number of rows or states than it was given,
                other columns than before, or actions that its space cannot represent (also a
                ValueError).
            PolicyError: when it does not return actions, states and columns (also a ValueError).
        """
        report("compute_actions_input", self.policy_id, [obs, *states])
        policy = self.policy
        if self.is_plain and isinstance(policy, GraphPolicy):
            # previous actions and rewards; they are collected only for a network that looks back
            prev = None if policy.spec.prev_action is None else further_inputs()[:2]
            began = time.perf_counter()
            actions, columns, states_out = policy.act(obs, states, prev=prev, with_logp=with_logp)
            seconds = time.perf_counter() - began
            report("compute_actions_result", self.policy_id, [actions, states_out, columns])
            return PolicyOutput(actions, states_out, columns, seconds)
        inputs = further_inputs()
        has_memory = getattr(policy.exploration, "has_memory", False)
        extra: dict[str, Any] = {"agent_ids": inputs.agent_ids} if has_memory else {}
        began = time.perf_counter()
        result = policy.compute_actions(
            obs,
            states,
            prev_action_batch=inputs.prev_actions,
            prev_reward_batch=inputs.prev_rewards,
            info_batch=inputs.infos,
            episodes=inputs.episodes,
            timestep=policy.global_timestep,
            **extra,
        )
        seconds = time.perf_counter() - began
        return self._result_check.checked(result, len(obs), seconds)

    def compute_single_action(
        self,
        obs: Any,
        state: Sequence[Array] = (),
        prev_action: Any = None,
        prev_reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        *,
        explore: bool = True,
    ) -> tuple[Any, list[Array], dict[str, Any]]:
        """Return one action for one observation of an environment, without changing the filter's
        statistics.

        Args:
            obs: the observation.
            state: state after the previous step, as `initial_memory`; empty = the initial one. The
                recurrent state alone is also accepted.
            prev_action: previous action in the environment's form; None at an episode's start.
                Numbers that the state says were clipped are replaced by those that the policy
                chose.
            prev_reward: previous reward.
            info: info that came with the observation.
            explore: False requests the policy's best action instead of a sample.

        Returns:
            The action in the environment's form, the state after the step, and further outputs of
            the policy, for example "vf_preds".

        Raises:
            BatchError: when the observation does not fit the space (also a ValueError).
            ValueError: when it does not fit the space, or is not finite.
            PolicyError: when its action mask forbids every action, or the state does not fit (also
                a ValueError).
        """
        row = self.observe([obs], update=False)[0]
        policy_state, carried = self._split_memory(state)
        if prev_action is not None and carried is not None:
            before = self._before_clipping(self.layout.to_row(prev_action), carried)
            prev_action = self.layout.to_env(before[None])[0]
        action, state_out, columns = self.policy.compute_single_action(
            row, policy_state, prev_action, prev_reward, info, explore=explore
        )
        chosen = self.layout.to_row(action)
        return self.to_env(chosen[None])[0], self._with_action(state_out, chosen), columns

    def compute_actions(
        self,
        observations: Sequence[Any],
        states: Sequence[Array] = (),
        prev_actions: Sequence[Any] | None = None,
        prev_rewards: Sequence[float] | None = None,
        *,
        explore: bool = True,
        with_logp: bool = True,
    ) -> tuple[list[Any], list[Array], dict[str, Array]]:
        """Return actions for N observations in one evaluation; states and further outputs are [N,
        ...].

        See `compute_single_action` for arguments and errors. Outputs include ACTIONS, in column
        form and unclipped. Without `with_logp`, log-probabilities can be left out.
        """
        rows = self.observe(observations, update=False)
        return self.act_on(
            rows, states, prev_actions, prev_rewards, explore=explore, with_logp=with_logp
        )

    def act_on(
        self,
        rows: Array,
        states: Sequence[Array] = (),
        prev_actions: Sequence[Any] | None = None,
        prev_rewards: Sequence[float] | None = None,
        *,
        explore: bool = True,
        with_logp: bool = True,
    ) -> tuple[list[Any], list[Array], dict[str, Array]]:
        """Return what `compute_actions` returns, for the inputs [N, ...] that `observe` makes of
        observations.
        """
        stuck_rows = self.rows_without_action(rows)
        if len(stuck_rows):
            raise PolicyError(
                f"there is no action to take: the action mask of observation {stuck_rows[0]}"
                " forbids every one"
            )
        policy_states, carried = self._split_memory(states)
        prev_column: Array | None = None
        if prev_actions is not None:
            prev_column = np.stack([self.layout.to_row(action) for action in prev_actions])
            if carried is not None:
                prev_column = self._before_clipping(prev_column, carried)
        # policies of users need not have this parameter
        extra: dict[str, Any] = {"with_logp": with_logp or explore} if self._is_ours else {}
        actions, states_out, columns = self.policy.compute_actions(
            rows,
            policy_states
            or [
                np.broadcast_to(component, (len(rows), *component.shape))
                for component in self.initial_state
            ],
            prev_action_batch=prev_column,
            prev_reward_batch=(
                None if prev_rewards is None else np.asarray(prev_rewards, np.float32)
            ),
            explore=explore,
            **extra,
        )
        column = self.layout.to_column(actions)
        return (
            self.to_env(column),
            self._with_action(states_out, column),
            {**columns, c.ACTIONS: column},
        )

    def memory_with_action(self, memory: Sequence[Array], action: Any) -> list[Array]:
        """Return the memory after a step in which an action was taken that the policy has not
        chosen.

        Args:
            memory: state after the step, [...] of each component.
            action: the action, in the environment's form.
        """
        if not self._carries_action and not self._policy_carries_action:
            return list(memory)
        policy_state, _ = self._split_memory(memory)
        return self._with_action(policy_state, self.layout.to_row(action))

    def _split_memory(self, states: Sequence[Array]) -> tuple[Sequence[Array], Array | None]:
        """Return the recurrent state for the policy, and the last action before it was clipped if
        it is there.
        """
        if self._carries_action and len(states) == len(self.initial_memory):
            return states[:-1], np.asarray(states[-1], self.layout.dtype)
        return states, None

    def _before_clipping(self, actions: Array, carried: Array) -> Array:
        """Return previous actions as the policy chose them: it was trained on its actions before
        they were clipped.

        Args:
            actions: [..., *shape] as environments got them.
            carried: [..., *shape] as the policy chose them in the step before.

        Returns:
            The carried numbers where the others are what clipping makes of them; elsewhere another
            action was taken.

        Raises:
            PolicyError: when the carried actions have another shape.
        """
        if carried.shape != actions.shape:
            raise PolicyError(
                f"the last component of the state has shape {carried.shape}; it is the last action"
                f" before it was clipped, of shape {actions.shape}"
            )
        return self.layout.before_clipping(actions, carried)

    def _with_action(self, states: Sequence[Array], chosen: Array) -> list[Array]:
        """Return states for callers, with the chosen actions before they are clipped if the policy
        looks back.
        """
        if self._carries_action:
            return [*states, chosen.astype(np.float32)]
        if self._policy_carries_action:
            # the one in the policy's own state is the likeliest action, even if actions are drawn
            return [*states[:-1], chosen.astype(np.float32)]
        return list(states)

    def to_env(self, actions: Array) -> list[Any]:
        """Return N actions in the environment's form, clipped if configured."""
        return self.layout.to_env(self.layout.clip(actions) if self.clips_actions else actions)


@dataclass(slots=True)
class _ResultCheck:
    """Check of what a policy of any class returns: its parts, rows and columns.

    Attributes:
        policy_id: the policy's name.
        class_name: name of its class.
        layout: form of its actions.
        num_states: number of its recurrent states.
        columns: names of the columns that its first evaluation returned; None before.
    """

    policy_id: str
    class_name: str
    layout: ActionLayout
    num_states: int
    columns: frozenset[str] | None = None

    def checked(self, result: Any, rows: int, seconds: float) -> PolicyOutput:
        """Return a result with its parts as arrays; see `Actor.act` for errors."""
        if not (
            isinstance(result, tuple | list)
            and len(result) == 3
            and isinstance(result[1], tuple | list | np.ndarray)
            and isinstance(result[2], Mapping)
        ):
            returned = result
            if isinstance(result, tuple):
                returned = f"({', '.join(type(part).__name__ for part in result)})"
            raise PolicyError(
                f"compute_actions of policy {self.policy_id!r} ({self.class_name})"
                f" returned {returned!s:.200}, expected (actions, list of states, dict of columns);"
                " return an empty list or dict if there are none"
            )
        actions, states, columns = result
        if len(states) != self.num_states:
            raise BatchError(
                "state_out",
                f"{self.num_states} recurrent states of policy {self.policy_id!r}, as in"
                " its initial state",
                f"{len(states)}",
            )
        if columns.keys() != self.columns:
            self._settle_columns(columns)
        report("compute_actions_result", self.policy_id, [actions, states, columns])
        column = self.layout.to_column(actions)
        if len(column) != rows:
            raise BatchError(
                c.ACTIONS, f"{rows} actions of policy {self.policy_id!r}", f"{len(column)}"
            )
        return PolicyOutput(
            actions=column,
            states=[
                self._as_rows(c.state_out(index), component, rows)
                for index, component in enumerate(states)
            ],
            columns={name: self._as_rows(name, values, rows) for name, values in columns.items()},
            seconds=seconds,
        )

    def _as_rows(self, name: str, column: Any, rows: int) -> Array:
        values = np.asarray(column)
        if values.shape[:1] != (rows,):
            raise BatchError(
                name, f"{rows} rows of policy {self.policy_id!r}", f"shape {values.shape}"
            )
        return values

    def _settle_columns(self, columns: Mapping[str, Any]) -> None:
        """Fix the columns of the first evaluation, and check that later ones have the same."""
        if self.columns is None:
            indices = range(self.num_states)
            state_columns = {*map(c.state_in, indices), *map(c.state_out, indices)}
            reserved = sorted(columns.keys() & (_ROW_COLUMNS | state_columns))
            if reserved:
                raise BatchError(
                    reserved[0],
                    "a name that rows do not have already, for a column of policy"
                    f" {self.policy_id!r}",
                    reserved,
                )
            self.columns = frozenset(columns)
            return
        odd = sorted(self.columns ^ columns.keys())
        raise BatchError(
            odd[0],
            f"the columns {sorted(self.columns)} of policy {self.policy_id!r}, the same at"
            " every evaluation",
            sorted(columns),
        )
