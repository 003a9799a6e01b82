"""Learning with a single policy outside a learner's run: an algorithm's gradients and steps with
gradients, or its updates with rows of a replay.

It uses the same code as the learner, but has no leases, train batches or schedules of a run.
`algorithm_policy` creates policies for users who drive a RolloutWorker themselves::

    policy = algorithm_policy(A2CConfig(lr=1e-3))
    worker = RolloutWorker("CartPole-v1", policy, rollout_fragment_length=64)
    info, count = worker.sample_and_learn(
        64, num_sgd_iter=1, sgd_minibatch_size=0, standardize_fields=[]
    )
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.postprocess import n_step_new_obs
from aiorl.config import with_former_defaults
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.columns import (
    CULPRIT,
    I64,
    METRICS,
    NUM_ROWS,
    PRIORITIES,
    TD_ERROR,
    Array,
    gradients_in,
)
from aiorl.data.fragment import check_fragment
from aiorl.data.layout import to_training_arrays
from aiorl.data.obs_layout import layout_of
from aiorl.errors import BatchError, PolicyError
from aiorl.learning.algorithm import (
    Algorithm,
    Networks,
    Observations,
    Update,
    acting_settings_of,
    experience_of,
    own_config,
)
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.algorithms.surrogate import KLPenalty
from aiorl.learning.compiled import CompiledUpdate
from aiorl.learning.experience import Fragments
from aiorl.learning.keys.replay import ReplayKeys
from aiorl.learning.models.actor_critic import ActorCritic
from aiorl.learning.models.export import make_acting_spec
from aiorl.learning.models.tf_policy import TFPolicy
from aiorl.learning.replayed import Replayed, replay_spec
from aiorl.learning.steps import SEEDS, STEPS_BEFORE, WEIGHTS

_LEAST_UNIT = 4
_SIZE_BITS = 4
"""Sizes of padded batches are multiples of at least the one, and have no more significant bits than
the other."""


class _Updates:
    """Update of a policy, and how often it was made."""

    def __init__(self, update: Update) -> None:
        self.plan = update
        self.count = 0

    def made(self, metrics: dict[str, Any]) -> None:
        """Count an update with these metrics, to which knobs and targets adapt.

        The penalty on divergence adapts to whole train batches, and this may be one minibatch of
        many: see `AlgorithmPolicy.update_kl`.
        """
        self.count += 1
        for adaptation in self.plan.adaptations:
            if isinstance(adaptation, KLPenalty):
                adaptation.report(metrics)
            else:
                adaptation.after_update(metrics, self.count)

    def state(self) -> dict[str, Any]:
        """Return what to save besides the weights."""
        variables = self.plan.other_variables().items()
        adapted = [adaptation.state() for adaptation in self.plan.adaptations]
        return {
            "updates": self.count,
            "variables": {name: np.array(variable.numpy()) for name, variable in variables},
            "adapted": {name: value for values in adapted for name, value in values.items()},
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a state fits.

        Args:
            state: state that `state` returned.

        Raises:
            PolicyError: a value is missing, or a variable has another shape.
        """
        current = self.state()
        _require(state, current)
        _require(state["adapted"], current["adapted"])
        _require(state["variables"], current["variables"])
        for name, array in current["variables"].items():
            shape = np.shape(state["variables"][name])
            if shape != array.shape:
                raise PolicyError(
                    f"the saved state has {name!r} of the shape {shape}, expected {array.shape}: it"
                    " is of a policy with other settings"
                )

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `check` has accepted."""
        for name, variable in self.plan.other_variables().items():
            variable.assign(state["variables"][name])
        for adaptation in self.plan.adaptations:
            adaptation.set_state(state["adapted"])
        self.count = int(state["updates"])


def _require(saved: Mapping[str, Any], names: Iterable[str]) -> None:
    """Check that there is a saved value for each name.

    Raises:
        PolicyError: there is none.
    """
    for name in names:
        if name not in saved:
            raise PolicyError(
                f"the saved state has no {name!r}: it is of another kind of policy, or of one with"
                " other settings"
            )


class PolicyLearning:
    """Computation of gradients at the weights of an acting policy, and optimiser steps that update
    that policy.

    Attributes:
        updates: the algorithm's update, and how often `learn_on_batch` made it.
    """

    def __init__(
        self,
        kind: type[Algorithm[Any]],
        config: CommonConfig,
        model: ActorCritic,
        policy: GraphPolicy,
    ) -> None:
        """Take over a model, which can be the acting one.

        Args:
            kind: algorithm.
            config: its config.
            model: network to train.
            policy: acting policy.

        Raises:
            NotImplementedError: the algorithm's update doesn't consist of gradients of batches.
        """
        self._model = model
        self._policy = policy
        self._is_shared = getattr(policy.graph, "model", None) is model
        experience = _fragments_of(kind, config)
        self._plan = experience.sample_plan
        self._sequence_length = None
        if self._plan.of_sequences:
            self._sequence_length = config.sequence_length()
        self.updates = _Updates(kind.update(own_config(kind, config), Networks.of(model)))
        self._gradients = experience.gradients(model, self.updates.plan, xla=config.update_mode)

    @classmethod
    def of(cls, policy: GraphPolicy, settings: Mapping[str, Any]) -> PolicyLearning:
        """Return the learning of a learner's policy in a worker, with its own copy of the network.

        Args:
            policy: acting policy; its settings include the algorithm's.
            settings: "algo", the algorithm's registered name or import path, and the keys that
                determine how fragments are cut.

        Raises:
            ConfigError: the settings are invalid for this algorithm.
            PolicyError: the network built here differs from the acting one.
            NotImplementedError: the algorithm's update doesn't consist of gradients of batches.
        """
        kind = algorithm_class(settings["algo"])
        all_settings = {**with_former_defaults(policy.config), **settings}
        config = _config_for_fragments(kind.config_class, all_settings)
        _fragments_of(kind, config)
        spec = policy.spec
        observations = Observations(
            spec.obs_shape, spec.obs_dtype, layout_of(policy.observation_space)
        )
        model = kind.build_model(config, observations, policy.action_space, seed=None)
        if make_acting_spec(model) != spec:
            raise PolicyError(
                "the network differs from the learner's; install the same versions on both hosts"
            )
        return cls(kind, config, model, policy)

    def warm_up(self) -> None:
        """See `Learning`."""
        self._gradients.warm_up()

    def gradient_columns(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """See `Learning`; schedules use the env steps of the newest snapshot."""
        if not self._is_shared:
            self._model.set_weights(self._policy.get_weights())
        return self._gradients.compute(columns, self._policy.global_timestep)

    def compute_gradients(self, batch: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the gradients by weight name, and the loss with its metrics.

        Args:
            batch: SampleBatch.

        Raises:
            BatchError: a column that the loss needs is missing, or there are no rows.
            PolicyError: a number is not finite.
        """
        arrays = to_training_arrays(batch, self._plan, self._sequence_length)
        columns = self.gradient_columns(self._padded(arrays))
        if not columns:
            raise BatchError(NUM_ROWS, "at least one transition", 0)
        if CULPRIT in columns:
            culprit = int(columns[CULPRIT][0])
            place = "the loss or its gradient"
            if culprit:
                place = f"column {self._plan.columns[culprit - 1]!r} of the batch"
            raise PolicyError(f"there is no gradient: a number in {place} is not finite")
        metrics = dict(zip(self._gradients.metric_names, columns[METRICS].tolist(), strict=True))
        return gradients_in(columns), {**metrics, NUM_ROWS: int(columns[NUM_ROWS][0])}

    def apply_gradients(self, gradients: Mapping[str, Array]) -> dict[str, Any]:
        """Take one step of the optimiser and give the policy the new weights.

        Raises:
            PolicyError: the gradients don't match the weights or are not finite; nothing is changed
                then.
        """
        if not self._is_shared:
            self._model.set_weights(self._policy.get_weights())
        figures = self._gradients.apply(gradients, self._policy.global_timestep)
        if not self._is_shared:
            self._policy.set_weights(self._model.get_weights())
        return figures

    def _padded(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return arrays of rows or sequences, filled up with ones that are not valid: each size is
        compiled, and the batches of policies that share an environment have many.
        """
        is_of_rows = self._sequence_length is None
        leading = arrays[self._plan.of_rows[0]].shape[:2]
        size = leading[0 if is_of_rows else 1]
        unit = max(_LEAST_UNIT, 1 << max(0, size.bit_length() - _SIZE_BITS))
        missing = -size % unit
        padded = {}
        for name, array in {c.VALID: np.ones(leading, np.bool_), **arrays}.items():
            widths = [(0, 0)] * array.ndim
            widths[0 if is_of_rows or c.is_of_sequences(name) else 1] = (0, missing)
            padded[name] = np.pad(array, widths)
        return padded

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        """Compute and apply the gradients of a `batch`; return the figures of both.

        Raises:
            (BatchError, PolicyError): see `compute_gradients`.
        """
        gradients, figures = self.compute_gradients(batch)
        figures |= self.apply_gradients(gradients)
        self.updates.made(figures)
        return figures


class ReplayLearning:
    """Updates of an acting policy with rows that its user draws from a replay.

    Attributes:
        updates: the algorithm's update, and how often it was made.
    """

    def __init__(
        self,
        kind: type[Algorithm[Any]],
        config: Any,  # of the kind's class, with the keys of a replay
        model: ActorCritic,
        policy: GraphPolicy,
    ) -> None:
        """Train a model, with which the policy acts.

        Args:
            kind: algorithm.
            config: its config.
            model: network to train.
            policy: acting policy.
        """
        self._policy = policy
        self._columns = replay_spec(config, model).columns
        self._seed = np.random.randint(2**31) if config.seed is None else config.seed
        update = kind.update(config, Networks.of(model))
        self.updates = _Updates(update)
        self._compiled = CompiledUpdate(
            update.loop, [*update.knobs_at(0), STEPS_BEFORE], xla=config.update_mode
        )

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        """Make one step of the algorithm with all rows of a batch as its minibatch.

        Args:
            batch: rows [B, ...] with the columns that the policy's postprocessing makes; optionally
                with importance ``weights`` [B].

        Returns:
            Metrics of the step, and `TD_ERROR`.

        Raises:
            BatchError: a column is missing or wrong, a number in it isn't finite, or there are no
                rows.
            PolicyError: the loss or its gradient isn't finite; nothing is changed then.
        """
        plan = self.updates.plan
        loop = plan.loop
        names = [column.name for column in self._columns]
        rows = {name: np.asarray(batch[name])[:, None] for name in names if name in batch}
        num_rows, _ = check_fragment(self._columns, rows)
        columns = {
            column.name: rows[column.name][:, 0].astype(column.dtype)[None]
            for column in self._columns
        }
        weights = batch[WEIGHTS] if WEIGHTS in batch else np.ones(num_rows)
        columns[WEIGHTS] = np.asarray(weights, np.float32)[None]
        if loop.seeds is not None:
            # by the number of the update, so that a restored policy draws what the saved one would
            rng = np.random.default_rng([self._seed, self.updates.count])
            highest = np.iinfo(np.int32).max
            columns[SEEDS] = rng.integers(highest, size=(1, *loop.seeds), dtype=np.int32)
        knobs = plan.knobs_at(self._policy.global_timestep)
        # modulo the period, so that a knob, which is a float32, never loses count
        before = float(self.updates.count % loop.step.period)
        result = self._compiled(columns, None, {STEPS_BEFORE: before, **knobs}, max_steps=1)
        if not result.is_kept:
            raise PolicyError("no step was taken: the loss or its gradient is not finite")
        figures: dict[str, Any] = {**result.metrics, "cur_lr": knobs["lr"]}
        self.updates.made(figures)
        return {**figures, TD_ERROR: result.written[PRIORITIES][0]}


def _config_for_fragments(kind: type[CommonConfig], settings: Mapping[str, Any]) -> CommonConfig:
    """Return the config of an algorithm that treats each fragment of one worker as a train batch.

    Args:
        kind: class of the config.
        settings: settings that include the algorithm's, "rollout_fragment_length" and
            "num_envs_per_worker".

    Raises:
        ConfigError: they are invalid for the algorithm.
    """
    fragment = settings["rollout_fragment_length"] * settings["num_envs_per_worker"]
    is_eager = bool(settings.get("eager")) and not settings.get("no_eager_on_workers")
    values = {
        **settings,
        "train_batch_size": fragment,
        "sgd_minibatch_size": fragment,
        "gradients": "learner",
        "eager": is_eager,
    }
    return kind.from_mapping(
        {name: value for name, value in values.items() if name in kind.model_fields}
    )


def _fragments_of(kind: type[Algorithm[Any]], config: CommonConfig) -> Fragments:
    """Return the experience of an algorithm that updates by gradients of batches.

    Raises:
        NotImplementedError: it doesn't.
    """
    experience = experience_of(kind, config)
    if not isinstance(experience, Fragments):
        raise NotImplementedError(f"{kind.__name__} does not update by one gradient of a batch")
    return experience


class AlgorithmPolicy(TFPolicy):
    """Policy that acts with an algorithm's network and learns by its update, as a config says.

    The rows of a policy whose algorithm has a replay hold what an update needs: ``new_obs`` is the
    observation after n steps, ``n_step_returns`` their discounted rewards.

    Attributes:
        config_of: returns the config of the algorithm for a policy's settings.
    """

    config_of: ClassVar[Callable[[Mapping[str, Any]], CommonConfig]]

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: Mapping[str, Any],
    ) -> None:
        """Build the network and its update.

        Args:
            observation_space: see `TFPolicy`.
            action_space: space with which the algorithm can act.
            config: settings of a policy.

        Raises:
            ConfigError: a setting is wrong.
            UnsupportedSpaceError: there is no network for a space.
            NotImplementedError: the algorithm doesn't update by gradients of batches, or by rows of
                a replay.
        """
        self._config = algorithm_config = type(self).config_of(config)
        self._kind = kind = algorithm_class(algorithm_config.algo)
        plan = dataclasses.replace(
            _experience_of_rows(kind, algorithm_config).sample_plan, raw_obs=False
        )
        acting = acting_settings_of(kind, algorithm_config) | plan.policy_settings()
        super().__init__(observation_space, action_space, {**acting, **config})
        learning = ReplayLearning if issubclass(kind.config_class, ReplayKeys) else PolicyLearning
        self.learning = learning(kind, algorithm_config, self.model, self)

    def _make_model(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: Mapping[str, Any],
    ) -> ActorCritic:
        observations = Observations(
            shape=tuple(observation_space.shape or ()),
            dtype="uint8" if observation_space.dtype == np.uint8 else "float32",
            layout=layout_of(observation_space),
        )
        return self._kind.build_model(self._config, observations, action_space, config.get("seed"))

    def postprocess_trajectories(self, batch: Any, ends: I64) -> None:
        """See `GraphPolicy.postprocess_trajectories`."""
        super().postprocess_trajectories(batch, ends)
        if c.N_STEPS in batch:
            columns = {name: batch[name][:, None] for name in (c.NEW_OBS, c.N_STEPS)}
            batch[c.NEW_OBS] = n_step_new_obs(columns)[:, 0]
            del batch[c.N_STEPS]

    def compute_gradients(self, batch: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """See `PolicyLearning.compute_gradients`.

        Raises:
            NotImplementedError: the algorithm has a replay.
        """
        return self._gradient_learning().compute_gradients(batch)

    def apply_gradients(self, gradients: Mapping[str, Array]) -> dict[str, Any]:
        """See `PolicyLearning.apply_gradients`.

        Raises:
            NotImplementedError: the algorithm has a replay.
        """
        return self._gradient_learning().apply_gradients(gradients)

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        """See `PolicyLearning.learn_on_batch`, or `ReplayLearning.learn_on_batch` if the algorithm
        has a replay.
        """
        figures: dict[str, Any] = self.learning.learn_on_batch(batch)
        return figures

    def update_target(self) -> None:
        """Copy the networks to their target networks, which updates also do as the config says."""
        for target in self.learning.updates.plan.targets.values():
            target.take_over()

    def update_kl(self, kl: float) -> float:
        """Adapt the weight of the penalty on divergence, ``kl_coeff``, which `learn_on_batch` leaves
        as it is.

        Call this once for each train batch. The weight rises if ``kl`` is above twice
        ``kl_target``, and falls if it is below half of it.

        Args:
            kl: mean ``kl`` over the minibatches of the last pass, nats; the figures of an optimizer
                have it.

        Returns:
            The new weight.

        Raises:
            PolicyError: ``kl`` is not finite.
            NotImplementedError: the algorithm has no such penalty.
        """
        if not math.isfinite(kl):
            raise PolicyError(
                f"update_kl: kl is {kl}, expected a finite number; nothing has changed"
            )
        for adaptation in self.learning.updates.plan.adaptations:
            if isinstance(adaptation, KLPenalty):
                return adaptation.update_kl(kl)
        raise NotImplementedError(
            f"{self._kind.__name__} has no penalty on divergence: only PPO and APPO have kl_coeff"
        )

    def get_state(self) -> dict[str, Any]:
        """See `Policy.get_state`; includes optimisers, target networks and what adapts."""
        return {**super().get_state(), "learning": self.learning.updates.state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See `Policy.set_state`.

        Raises:
            PolicyError: a value is missing, or the weights or a variable don't fit; nothing has
                changed then.
        """
        _require(state, ("weights", "global_timestep", "learning"))
        self.learning.updates.check(state["learning"])
        super().set_state(state)
        self.learning.updates.set_state(state["learning"])

    def _gradient_learning(self) -> PolicyLearning:
        if not isinstance(self.learning, PolicyLearning):
            raise NotImplementedError(
                f"{self._kind.__name__} does not update by one gradient of a batch: use"
                " learn_on_batch"
            )
        return self.learning


def _experience_of_rows(kind: type[Algorithm[Any]], config: CommonConfig) -> Fragments | Replayed:
    """Return the experience of an algorithm that a policy can learn from by itself.

    Raises:
        NotImplementedError: it can't.
    """
    experience = experience_of(kind, config)
    if isinstance(experience, Replayed) and not config.model.is_recurrent:
        return experience
    return _fragments_of(kind, config)


def algorithm_policy(config: CommonConfig) -> type[AlgorithmPolicy]:
    """Return a class of policies that act with an algorithm's network and learn by its update.

    ``learn_on_batch`` makes one step with all rows of its batch, with the algorithm's optimiser,
    ``grad_clip`` and schedules. ``compute_gradients`` and ``apply_gradients`` are its two halves,
    for an algorithm without a replay. Rows are postprocessed as by the algorithm's workers.

    Args:
        config: config of the algorithm. It doesn't affect sampling, which the RolloutWorker
            determines.

    Raises:
        NotImplementedError: the algorithm's update consists neither of gradients of batches nor of
            steps with rows of a replay, as for recurrent networks with a replay.
    """
    _experience_of_rows(algorithm_class(config.algo), config)
    members = {"config_of": staticmethod(lambda settings: config)}
    return type("ConfiguredPolicy", (AlgorithmPolicy,), members)
