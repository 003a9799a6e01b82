"""GraphPolicy: acting with a network, an action distribution, and noise drawn in advance, for any
network runtime.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from aiorl.acting.acting_graph import ActingGraph, ActingSpec, Outputs, Previous
from aiorl.acting.distributions import Space, make_named_distribution
from aiorl.acting.exploration import make_exploration
from aiorl.acting.filters import LearningFilter, ObservationFilter, RewardScaler
from aiorl.acting.policy import Policy
from aiorl.acting.postprocess import NEED_ACTION_VALUES, NEED_VALUES, postprocessed
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.columns import F32, I64, Array
from aiorl.data.spaces import space_from_dict
from aiorl.errors import BatchError, PolicyError
from aiorl.process.imports import install_command, load_tensorflow, needed_by

FIXED_TIMESTEP = "fixed_timestep"
"""Setting of a policy that doesn't learn: the timestep at which its schedules stand still."""
_CALLS_AHEAD = 16
"""Number of calls that noise is drawn for together."""
_LEARNING = "aiorl.learning.policy_learning"
_TF_POLICY = "aiorl.learning.models.tf_policy"

_log = logging.getLogger(__name__)


class ActResult(NamedTuple):
    """Result of one evaluation.

    Attributes:
        actions: [N, *action_shape] in column form (`aiorl.data.actions`).
        columns: ACTION_LOGP [N], ACTION_DIST_INPUTS [N, P] and VF_PREDS [N], all float32.
        state_out: recurrent state after the step, [N, ...] for each component.
    """

    actions: Array
    columns: dict[str, F32]
    state_out: list[F32]


class ActRows(NamedTuple):
    """Rows of columns that receive the results for N observations; all but the first one float32.

    Attributes:
        actions: [N, *action_shape] in column form.
        dist_inputs: [N, P] inputs of the action distribution.
        values: [N].
        logp: [N] log-probabilities; None, allowed if `logp_is_apart`, skips them.
    """

    actions: Array
    dist_inputs: F32
    values: F32
    logp: F32 | None


class ActingNetwork(Protocol):
    """Interface of a network that acts, for example `ActingGraph`."""

    def run(
        self,
        obs: Array,
        state: Sequence[F32] = (),
        prev: Previous | None = None,
        out: tuple[F32, F32] | None = None,
        noise: F32 | None = None,
    ) -> Outputs:
        """Return inputs of the action distribution [N, P] and values [N], in `out` if given, and
        the next state.

        The shares of the spec's features, if it has any, follow the inputs. Noisy layers use
        `noise`, or their means if it is None.
        """

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace all weights together."""

    def get_weights(self) -> dict[str, Array]:
        """Return the current weights by name."""


class GraphPolicy(Policy):
    """Policy that acts with a network and samples on NumPy.

    Only one thread can call it at a time, except that `set_weights` can be called from another one.

    Attributes:
        acting_spec: description of the network of all instances of a class if known, else None.
        graph: the network.
        spec: its description.
        distribution: distribution of the actions.
        layout: column form and environment form of the actions.
        takes_raw: True if its rows contain observations before the filter; see `filter_inputs`.
        return_discount: discount of the returns that its rewards are scaled by; None = rewards are
            not scaled.
        reward_scaler: scales the rewards of trajectories; the sampler sets it. None leaves rewards
            unchanged.
    """

    reward_scaler: RewardScaler | None = None
    acting_spec: ClassVar[ActingSpec | None] = None

    def __init__(
        self,
        graph: ActingNetwork,
        spec: ActingSpec,
        *,
        observation_space: Space | None = None,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        """Make a policy around a network.

        Args:
            graph: the network.
            spec: its description.
            observation_space: space of its observations; by default an unbounded Box of the spec's
                shape and dtype.
            config: the policy's own settings. This class reads "exploration" (see
                `make_exploration`, with "worker_index" and "num_workers"), "explore" (False: `act`
                uses the distribution's mode by default), "learning" (see `learning`), "postprocess"
                (a name in POSTPROCESSORS), "postprocess_params" (its keyword arguments),
                "bootstrap_values" (True: trajectories get that column), "raw_obs" (`takes_raw`),
                "return_discount" (see the class) and FIXED_TIMESTEP.
            seed: seed of the noise that `compute_actions` draws; `act` gets its noise from the
                caller.

        Raises:
            PolicyError: when graph and spec don't fit each other or the action space.
            ConfigError: when settings can't be applied.
        """
        action_space = space_from_dict(spec.action_space)
        if observation_space is None:
            observation_space = spec.observation_space
        super().__init__(observation_space, action_space, config or {})
        self.distribution = make_named_distribution(
            spec.distribution, action_space, spec.num_features
        )
        if self.distribution.num_inputs != spec.num_dist_inputs:
            raise PolicyError(
                f"the acting graph has {spec.num_dist_inputs} outputs for a {spec.distribution}"
                f" distribution over {action_space}, which needs {self.distribution.num_inputs}"
            )
        self.layout = ActionLayout(action_space)
        self.graph = graph
        self.spec = spec
        self.exploration = make_exploration(
            self.config.get("exploration"),
            self.distribution,
            worker_index=int(self.config.get("worker_index", 0)),
            num_workers=int(self.config.get("num_workers", 0)),
        )
        self.takes_raw = bool(self.config.get("raw_obs", False))
        self.return_discount: float | None = self.config.get("return_discount")
        self._explores = bool(self.config.get("explore", True))
        self._is_fixed = self.config.get(FIXED_TIMESTEP) is not None
        self.global_timestep = int(self.config[FIXED_TIMESTEP]) if self._is_fixed else 0
        self._rng = np.random.default_rng(seed)
        self._noise_ahead = np.zeros((0, 0), np.float32)

    @property
    def logp_is_apart(self) -> bool:
        """True if `act_into` needs no log-probabilities, because `distribution.logp` returns the
        same ones later.
        """
        return self.exploration is None and self.distribution.logp_is_apart

    def filter_inputs(self, filtered: Callable[..., Array]) -> None:
        """Filter observations between the policy and its network, so that rows contain unfiltered
        ones.

        Args:
            filtered: filter, called with observations [N, ...] and ``update=False``.
        """
        self.graph = _Filtering(self.graph, filtered)

    @property
    def is_recurrent(self) -> bool:
        """True if the network has state."""
        return bool(self.spec.state_shapes)

    def initial_state(self, num_rows: int) -> list[F32]:
        """Return the state of `num_rows` rows at the start of their episodes: zeros [num_rows, ...]
        per component.
        """
        return [np.zeros((num_rows, *shape), np.float32) for shape in self.spec.state_shapes]

    def get_initial_state(self) -> list[F32]:
        """Return the state of one row at the start of an episode: zeros [...] per component."""
        return [np.zeros(shape, np.float32) for shape in self.spec.state_shapes]

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> F32:
        """Draw noise in advance.

        Args:
            rng: generator of the noise.
            *leading: leading dimensions: N rows for one step, or T steps and N rows.

        Returns:
            Noise [*leading, K], float32; the noisy layers' part comes first.
        """
        noise = (self.exploration or self.distribution).draw_noise(rng, *leading)
        size = self.spec.noise_size
        if not size:
            return noise
        # drawn last, although it comes first: the order decides which numbers a seed gives
        return np.concatenate([rng.standard_normal((*leading, size), np.float32), noise], axis=-1)

    def act(
        self,
        obs: Array,
        state: Sequence[F32] = (),
        noise: F32 | None = None,
        *,
        prev: Previous | None = None,
        explore: bool | None = None,
        timestep: int | None = None,
        keys: Sequence[Hashable] | None = None,
        with_logp: bool = True,
    ) -> ActResult:
        """Return actions for N observations.

        Args:
            obs: [N, *obs_shape] in the spec's dtype.
            state: recurrent state, [N, ...] for each component.
            noise: [N, K], a result of `draw_noise`; None = drawn now. Not read if `explore` is
                False.
            prev: previous actions [N, ...] in column form and previous rewards [N], for a network
                that looks back.
            explore: False uses the distribution's mode; None follows the policy's settings.
            timestep: timestep for the exploration's schedules; None = the global timestep.
            keys: identities of the rows across calls, for exploration with memory. None identifies
                rows by position, for which `noise` can be drawn in advance.
            with_logp: False leaves out the log-probabilities, which is allowed if `logp_is_apart`.

        Raises:
            PolicyError: when the arrays don't fit or there are no weights yet.
        """
        num_rows = len(obs)
        logp: F32 | None
        if explore is None:
            explore = self._explores
        if not explore:
            outputs, values, state_out = self.graph.run(obs, state, prev)
            dist_inputs = self._dist_inputs(outputs)
            actions = self.distribution.deterministic(dist_inputs)
            logp = self.distribution.logp(dist_inputs, actions) if with_logp else None
        else:
            if noise is None:
                noise = self._next_noise(num_rows)
                # rows need keys, because no noise was drawn in advance for their positions
                keys = keys or range(num_rows)
            actions = np.empty((num_rows, *self.layout.shape), self.layout.dtype)
            dist_inputs = np.empty((num_rows, self.spec.num_dist_inputs), np.float32)
            values = np.empty(num_rows, np.float32)
            logp = np.empty(num_rows, np.float32) if with_logp else None
            rows = ActRows(actions, dist_inputs, values, logp)
            state_out = self.act_into(
                obs, state, noise, rows, prev=prev, timestep=timestep, keys=keys
            )
        columns = {} if logp is None else {c.ACTION_LOGP: logp}
        columns |= {c.ACTION_DIST_INPUTS: dist_inputs, c.VF_PREDS: values}
        return ActResult(actions, columns, state_out)

    def act_into(
        self,
        obs: Array,
        state: Sequence[F32],
        noise: F32,
        rows: ActRows,
        prev: Previous | None = None,
        *,
        timestep: int | None = None,
        keys: Sequence[Hashable] | None = None,
    ) -> list[F32]:
        """Choose actions for N observations, and write the results directly into columns.

        Args:
            obs: [N, *obs_shape] in the spec's dtype.
            state: recurrent state, [N, ...] for each component.
            noise: [N, K], a result of `draw_noise`.
            rows: columns to write.
            prev: previous actions [N, ...] in column form and previous rewards [N], for a network
                that looks back.
            timestep: timestep for the exploration's schedules; None = the global timestep.
            keys: identities of the rows across calls, as in `act`.

        Returns:
            Recurrent state after the step, [N, ...] for each component.

        Raises:
            PolicyError: when the arrays don't fit or there are no weights yet.
        """
        actions, dist_inputs, values, logp = rows
        layer_noise, noise = self._split_noise(noise)
        if self.spec.num_features:
            outputs, values[...], state_out = self.graph.run(obs, state, prev)
            dist_inputs[...] = self._dist_inputs(outputs)
        else:
            outputs, _, state_out = self.graph.run(
                obs, state, prev, out=(dist_inputs, values), noise=layer_noise
            )
        if logp is None:
            self.distribution.choose_into(dist_inputs, noise, actions)
        elif self.exploration is None:
            self.distribution.sample_into(dist_inputs, noise, actions, logp)
        else:
            now = self.global_timestep if timestep is None else timestep
            self.exploration.choose_into(outputs, noise, actions, logp, timestep=now, keys=keys)
        return state_out

    def values(self, obs: Array, state: Sequence[F32] = (), prev: Previous | None = None) -> F32:
        """Return the values [N] of N observations, for bootstrapping.

        Args:
            obs: [N, *obs_shape] in the spec's dtype.
            state: recurrent state, [N, ...] for each component.
            prev: previous actions [N, ...] in column form and previous rewards [N], for a network
                that looks back.
        """
        return self.graph.run(obs, state, prev)[1]

    def compute_actions(
        self,
        obs: Array,
        state_batches: Sequence[Array] = (),
        prev_action_batch: Any = None,
        prev_reward_batch: Array | None = None,
        info_batch: Sequence[Mapping[str, Any]] | None = None,
        episodes: Sequence[Any] | None = None,
        timestep: int | None = None,
        *,
        explore: bool | None = None,
        agent_ids: Sequence[Hashable] | None = None,
        with_logp: bool = True,
    ) -> tuple[Any, list[Array], dict[str, Array]]:
        """See `Policy.compute_actions`; noise comes from the policy's own generator, unknown
        previous steps are zeros.

        Samplers also pass N agent ids if the exploration has a memory, which then follows an agent
        through its episode. `with_logp` is that of `act`.
        """
        keys = None
        if episodes is not None and self.exploration is not None:
            keys = _row_keys(episodes, agent_ids)
        result = self.act(
            obs,
            state_batches,
            prev=self._previous(len(obs), prev_action_batch, prev_reward_batch),
            explore=explore,
            timestep=timestep,
            keys=keys,
            with_logp=with_logp,
        )
        actions = result.actions
        if self.layout.is_nested:
            actions = self.layout.to_components(actions)
        return actions, result.state_out, result.columns

    @functools.cached_property
    def learning(self) -> Any:
        """Learning part of the run's algorithm for this policy, a `PolicyLearning`; first use loads
        TensorFlow.

        The setting "learning" defines the algorithm and how fragments are cut: see
        `PolicyLearning.of`.

        Raises:
            NotImplementedError: when the policy has no such setting, or its update has no gradients
                of batches.
            ConfigError: when TensorFlow is not installed, or the settings make no such algorithm
                here.
            PolicyError: when the algorithm's network is not the one that acts.
        """
        settings = self.config.get("learning")
        if settings is None:
            raise NotImplementedError(f"{type(self).__name__} does not learn")
        threads = int(settings.get("num_cpus_per_worker", 1))
        with needed_by(
            "computing gradients on a worker",
            "TensorFlow",
            "learner",
            key="gradients",
            value="workers",
        ):
            load_tensorflow(threads=threads)
            # a worker loads TensorFlow only if it must, so a static import of this name is not
            # allowed
            module = importlib.import_module(_LEARNING)
        return module.PolicyLearning.of(self, settings)

    def compute_gradients(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """See `Policy.compute_gradients`; gradients by weight name, at the current weights.

        Raises:
            BatchError: when a column or all rows are missing.
            PolicyError: when a number is not finite.
            Exception: as for `learning`.
        """
        result: tuple[Any, dict[str, Any]] = self.learning.compute_gradients(batch)
        return result

    def apply_gradients(self, gradients: Any) -> dict[str, Any]:
        """See `Policy.apply_gradients`.

        Raises:
            PolicyError: when gradients don't fit the weights, or are not finite.
            Exception: as for `learning`.
        """
        figures: dict[str, Any] = self.learning.apply_gradients(gradients)
        return figures

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        """See `Policy.learn_on_batch`; errors are those of `compute_gradients` and
        `apply_gradients`.
        """
        gradients, figures = self.compute_gradients(batch)
        return figures | self.apply_gradients(gradients)

    def postprocess_trajectory(
        self, batch: Any, other_agent_batches: Mapping[Any, Any] | None = None, episode: Any = None
    ) -> Any:
        """Return one agent's rows of one episode, with advantages and value targets if configured.

        The value after the last row is that of its `new_obs`, or 0 if it terminated. If the row was
        truncated, this is also its bootstrap value, if that column is configured.

        Args:
            batch: SampleBatch of the rows.
            other_agent_batches: not used.
            episode: not used.

        Raises:
            BatchError: when a required column is missing.
        """
        self.postprocess_trajectories(batch, np.array([batch.count]))
        return batch

    def postprocess_trajectories(self, batch: Any, ends: I64) -> None:
        """Postprocess several trajectories that lie one after the other, and bootstrap all of them
        in one call.

        If rewards are scaled, the scaled ones are a separate column, and advantages are computed
        from it.

        Args:
            batch: rows of the trajectories.
            ends: [K], index after the last row of each trajectory.
        """
        name = self.config.get("postprocess", "none")
        stores_bootstrap = self.config.get("bootstrap_values", False)
        if not batch.count:
            return
        if self.reward_scaler is not None:
            batch[c.SCALED_REWARDS] = _scaled(self.reward_scaler, batch, ends)
        if name == "none" and not stores_bootstrap:
            return
        needs_values = name in NEED_VALUES
        needs_action_values = name in NEED_ACTION_VALUES
        outputs = [c.ACTION_DIST_INPUTS] if needs_action_values else []
        if needs_values or name == "none":
            outputs.append(c.VF_PREDS)
        self._add_missing_outputs(batch, outputs)
        _require(batch, (c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, *outputs), name)
        terminateds = batch[c.TERMINATEDS]
        truncateds = batch[c.TRUNCATEDS]
        last = ends - 1
        following = np.zeros(batch.count, np.float32)
        if needs_values or stores_bootstrap:
            # unless values are needed, only truncated trajectories have a bootstrap value
            rows = last[~terminateds[last] & (truncateds[last] | needs_values)]
            if len(rows):
                _require(batch, (c.NEW_OBS,), name)
                following[rows] = self._values_after(batch, rows)
        if stores_bootstrap:
            is_truncated = truncateds & ~terminateds
            batch[c.BOOTSTRAP_VALUES] = np.where(is_truncated, following, np.float32(0.0))
        cut = truncateds.copy()
        cut[last] = True  # the next row belongs to another trajectory
        columns = {
            c.REWARDS: batch[c.REWARDS if self.reward_scaler is None else c.SCALED_REWARDS],
            c.TERMINATEDS: terminateds,
            c.TRUNCATEDS: cut,
            c.BOOTSTRAP_VALUES: following,
        }
        if c.VF_PREDS in outputs:
            columns[c.VF_PREDS] = batch[c.VF_PREDS]
        if needs_action_values:
            columns[c.ACTION_VALUES] = self.distribution.action_values(
                batch[c.ACTION_DIST_INPUTS], self.layout.to_column(batch[c.ACTIONS])
            )
        # as [T, N] with N = 1
        columns = {key: column[:, None] for key, column in columns.items()}
        results = postprocessed(name, columns, self.config.get("postprocess_params", {}))
        for column, values in results.items():
            batch[column] = values[:, 0]

    def _add_missing_outputs(self, batch: Any, columns: Sequence[str]) -> None:
        """Add the network's outputs to rows of another policy, which had none to store."""
        is_complete = all(column in batch for column in columns)
        if is_complete or c.OBS not in batch or self.spec.state_shapes:
            return
        dist_inputs, values, _ = self.graph.run(batch[c.OBS])
        outputs = {c.ACTION_DIST_INPUTS: dist_inputs, c.VF_PREDS: values}
        for column in columns:
            batch[column] = outputs[column]

    def _values_after(self, batch: Any, rows: I64) -> F32:
        """Return the values [K] of the observations after K rows of a batch."""
        indices = range(len(self.spec.state_shapes))
        states = [batch[c.state_out(index)][rows] for index in indices]
        prev = self._previous(len(rows), batch[c.ACTIONS][rows], batch[c.REWARDS][rows])
        return self.values(batch[c.NEW_OBS][rows], states, prev)

    def add_recurrent_columns(self, batch: Any) -> None:
        """Add the states, values and previous steps that this policy would have had to a stored
        trajectory.

        The trajectory begins like an episode, even if it was cut. The columns are this policy's,
        regardless of the policy that played it.

        Args:
            batch: rows of one agent in one episode, in order of time.

        Raises:
            BatchError: when a required column is missing, or does not fit.
        """
        _require(batch, (c.OBS, c.ACTIONS, c.REWARDS), "a recurrent policy")
        count = batch.count
        actions = self.layout.to_column(batch[c.ACTIONS])
        rewards = np.asarray(batch[c.REWARDS], np.float32)
        prev_actions = np.concatenate([self.layout.zeros(1), actions[:-1]])
        prev_rewards = np.append(np.float32(0.0), rewards[:-1])
        states = [self.initial_state(1)]
        values = np.empty(count, np.float32)
        for row in range(count):
            at = slice(row, row + 1)
            prev = None if self.spec.prev_action is None else (prev_actions[at], prev_rewards[at])
            _, values[at], state = self.graph.run(batch[c.OBS][at], states[-1], prev)
            states.append([component.copy() for component in state])
        for index, components in enumerate(zip(*states, strict=True)):
            joined = np.concatenate(components)
            batch[c.state_in(index)] = joined[:-1]
            batch[c.state_out(index)] = joined[1:]
        batch[c.VF_PREDS] = values
        if self.spec.prev_action is not None:
            batch[c.PREV_ACTIONS] = prev_actions
            batch[c.PREV_REWARDS] = prev_rewards
        if c.AGENT_INDEX not in batch:
            batch[c.AGENT_INDEX] = np.zeros(count, np.int64)

    def get_weights(self) -> dict[str, Array]:
        """Return the current weights by name, each of any shape."""
        return self.graph.get_weights()

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Replace all weights together; see `ActingGraph.set_weights` for errors."""
        self.graph.set_weights(weights)

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """See `Policy.on_global_var_update`; the timestep of a policy that doesn't learn stays."""
        if not self._is_fixed and "timestep" in global_vars:
            self.global_timestep = int(global_vars["timestep"])

    def get_state(self) -> dict[str, Any]:
        """See `Policy.get_state`."""
        return {**super().get_state(), "distribution": self.spec.distribution}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See `Policy.set_state`.

        Raises:
            PolicyError: when the state is of a policy whose actions are in other units, or its
                weights don't fit.
        """
        was_scaled = str(state.get("distribution", "")).startswith("scaled")
        is_scaled = self.spec.distribution.startswith("scaled")
        if was_scaled != is_scaled:
            raise PolicyError(
                f"the state is of a policy with normalize_actions: {str(was_scaled).lower()}, but"
                f" it is {str(is_scaled).lower()} here; set it as in training"
            )
        super().set_state(state)

    def _next_noise(self, num_rows: int) -> F32:
        """Return noise for N rows, drawn for several calls together, since most of a draw's time is
        its call.
        """
        if self.exploration is not None:
            return self.draw_noise(self._rng, num_rows)
        ahead = self._noise_ahead
        if len(ahead) < num_rows:
            drawn = self.draw_noise(self._rng, _CALLS_AHEAD * num_rows)
            # at first there is none, in an array of another width
            ahead = np.concatenate([ahead, drawn]) if len(ahead) else drawn
        self._noise_ahead = ahead[num_rows:]
        return ahead[:num_rows]

    def _split_noise(self, noise: F32) -> tuple[F32 | None, F32]:
        """Split noise [N, K] into the parts for noisy layers (None without them) and for the choice
        of actions.
        """
        size = self.spec.noise_size
        if size:
            return (noise[:, :size], noise[:, size:])
        return (None, noise)

    def _dist_inputs(self, outputs: F32) -> F32:
        """Return the distribution's inputs [N, P] in the network's output, as a copy if the output
        is wider.

        Raises:
            PolicyError: when the output does not have the width that the features require.
        """
        if not self.spec.num_features:
            return outputs
        if outputs.shape[1] != self.distribution.num_outputs:
            raise PolicyError(
                f"the acting graph returns {outputs.shape[1]} numbers for a"
                f" {self.distribution.name} distribution with {self.spec.num_features} features,"
                f" expected {self.distribution.num_outputs}"
            )
        return outputs[:, : self.spec.num_dist_inputs].copy()

    def _previous(self, rows: int, actions: Any, rewards: Array | None) -> Previous | None:
        if self.spec.prev_action is None:
            return None
        return (
            self.layout.zeros(rows) if actions is None else self.layout.to_column(actions),
            np.zeros(rows, np.float32) if rewards is None else np.asarray(rewards),
        )


class _Filtering:
    """Network with a filter for its observations."""

    def __init__(self, network: ActingNetwork, filtered: Callable[..., Array]) -> None:
        self._network = network
        self._filtered = filtered
        self.set_weights = network.set_weights
        self.get_weights = network.get_weights

    def run(self, obs: Array, *args: Any, **kwargs: Any) -> Outputs:
        """See `ActingNetwork.run`."""
        return self._network.run(self._filtered(obs, update=False), *args, **kwargs)


def _scaled(scaler: RewardScaler, batch: Any, ends: I64) -> F32:
    """Return the scaled rewards of trajectories that lie one after the other."""
    last = ends - 1
    keys = list(
        zip(batch[c.EPS_ID][last].tolist(), batch[c.AGENT_INDEX][last].tolist(), strict=True)
    )
    is_over = batch[c.TERMINATEDS][last] | batch[c.TRUNCATEDS][last]
    return scaler.scale_trajectories(batch[c.REWARDS], ends, is_over, keys)


def _row_keys(episodes: Sequence[Any], agent_ids: Sequence[Hashable] | None) -> list[Hashable]:
    """Return (episode id, agent id) for each row, with the row's number in its episode if agent ids
    are unknown.
    """
    ids = [getattr(episode, "episode_id", None) for episode in episodes]
    if agent_ids is not None:
        return list(zip(ids, agent_ids, strict=True))
    num_rows: Counter[Hashable] = Counter()  # by episode, up to the current row
    keys: list[Hashable] = []
    for episode_id in ids:
        keys.append((episode_id, num_rows[episode_id]))
        num_rows[episode_id] += 1
    return keys


def _require(batch: Mapping[str, Any], columns: Iterable[str], name: str) -> None:
    for column in columns:
        if column not in batch:
            raise BatchError(column, f"the column to be there for {name}", sorted(batch))


def install_filter(policy: Policy, obs_filter: ObservationFilter) -> ObservationFilter:
    """Install a filter, and return the filter to apply before the policy.

    If rows contain raw observations, the policy itself applies `obs_filter` between its rows and
    its network, and the returned filter only learns.
    """
    if obs_filter.is_identity or not isinstance(policy, GraphPolicy) or not policy.takes_raw:
        return obs_filter
    policy.filter_inputs(obs_filter)
    return LearningFilter(obs_filter)


class OnnxPolicy(GraphPolicy):
    """Policy that acts with an exported network and samples on NumPy, without a deep-learning
    framework.

    Only one thread can call it at a time, except that `set_weights` can be called from another one.
    """

    def __init__(
        self,
        graph: bytes,
        spec: ActingSpec,
        *,
        threads: int = 1,
        runs_per_weights: float = math.inf,
        **arguments: Any,
    ) -> None:
        """Make a policy from an export of the learner; it can act once it has weights.

        Args:
            graph: serialised ONNX model.
            spec: its description.
            threads: threads that an evaluation can use.
            runs_per_weights: approximate number of evaluations between two updates of the weights.
            **arguments: "observation_space", "config" and "seed" of GraphPolicy.

        Raises:
            PolicyError: when graph and spec don't fit each other or the action space.
            ConfigError: when settings can't be applied.
        """
        super().__init__(
            ActingGraph(graph, spec, threads=threads, runs_per_weights=runs_per_weights),
            spec,
            **arguments,
        )


def learned_policy_class(
    graph: bytes,
    description: Mapping[str, Any],
    *,
    threads: int = 1,
    runs_per_weights: float = math.inf,
) -> type[GraphPolicy]:
    """Return the class of a learner's policy, constructed like any Policy; instances can act once
    they have weights.

    Args:
        graph: the acting graph; empty for a network without one, which runs in TensorFlow.
        description: a result of `ActingSpec.to_dict`; with an empty graph, also the model's
            settings under "tf_model".
        threads: threads that an evaluation can use.
        runs_per_weights: approximate number of evaluations between two updates of the weights.

    Raises:
        PolicyError: when the description is damaged; and, at construction of an instance, when the
            graph doesn't fit it, or the spaces are not the learner's.
        ImportError: when the network needs TensorFlow, which is not installed here.
    """
    spec = ActingSpec.from_dict(description)
    if not graph:
        return _tensorflow_class(spec, description.get("tf_model"))

    class LearnedPolicy(OnnxPolicy):
        """Policy with the learner's graph."""

        acting_spec = spec

        def __init__(
            self,
            observation_space: Space,
            action_space: Space,
            config: Mapping[str, Any],
        ) -> None:
            spec.check_spaces(observation_space, action_space)
            super().__init__(
                graph,
                spec,
                observation_space=observation_space,
                config=config,
                seed=config.get("seed"),
                threads=threads,
                runs_per_weights=runs_per_weights,
            )

    return LearnedPolicy


def _tensorflow_class(spec: ActingSpec, model_config: Any) -> type[GraphPolicy]:
    if not isinstance(model_config, Mapping):
        raise PolicyError("the learner sent neither an acting graph nor the settings of a model")
    _log.warning(
        "The learner's model has no acting graph, so this process runs it in TensorFlow, with more"
        " memory and more slowly. The learner's log gives the reason."
    )
    try:
        # a worker loads TensorFlow only if it must, so a static import of this name is not allowed
        module = importlib.import_module(_TF_POLICY)
    except ImportError as error:
        raise ImportError(
            "the learner's model can only be run in TensorFlow, which can't be imported here"
            f" ({error}); install it with: {install_command('learner')}"
        ) from error
    policy_class: type[GraphPolicy] = module.learned_tf_policy_class(spec, model_config)
    return policy_class
