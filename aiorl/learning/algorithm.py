"""An algorithm: the experience it learns from, an update of steps, and how it acts.

Everything outside `aiorl.learning` uses these types and knows no algorithm by name. An
`Algorithm` says what it needs from the config alone, so that leases and sampling can be planned
before TensorFlow is loaded; `aiorl.learning.learner.Learner` learns by what it says.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.acting.exploration import Schedule
from aiorl.acting.filters import NoFilter, ObservationFilter
from aiorl.config.schema import CommonConfig
from aiorl.config.shared_keys import SDEKeys
from aiorl.data.columns import DEFAULT_POLICY_ID, I32, Array, Columns, Piece
from aiorl.data.fragment import SamplePlan
from aiorl.data.obs_layout import ObsLayout, Shape
from aiorl.errors import CheckpointError, ConfigError, InternalError
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.optimised import like, of_tensorflow
from aiorl.learning.step_checks import check_distinct, check_only_one, checked_pair
from aiorl.learning.steps import Composed, Descent, Loop, Loss, Step, TargetNetwork, descend

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.replay.ring import Snapshot

Batch = dict[str, Array]
"""Data that `Feed.make_batch` prepares for an update: a train batch, arrays by name; or counts of
the rows stored."""


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """Limits on how much is sampled and with which policy versions.

    Attributes:
        mode: "on_policy" hands out exactly one train batch for each version; "streaming" leases as
            much as can be trained on within ``max_policy_lag`` (see `aiorl.net.protocol.pacing`).
        fragments_per_batch: fragments in one train batch.
        env_steps_per_batch: on_policy: env steps after which a train batch is full. Used for
            fragments of whole episodes, which can be longer than requested. None if all fragments
            have the same length.
        outstanding_per_worker: streaming: maximum number of fragments that a worker owes at a time,
            within the budget of the whole run.
        max_policy_lag: maximum age of a fragment in policy versions; older ones are discarded. None
            = no limit.
        max_under_way: streaming: maximum number of fragments that are leased, queued or held by the
            learner, all together. None = limited by `max_policy_lag` only.
        publish_every: updates after which the weights are published as a new version.
        publish_interval_s: seconds after which an update publishes the weights even if
            `publish_every` is not reached. Ignored when one process samples and trains in turn.
    """

    mode: Literal["on_policy", "streaming"]
    fragments_per_batch: int
    outstanding_per_worker: int = 1
    max_policy_lag: int | None = None
    max_under_way: int | None = None
    publish_every: int = 1
    publish_interval_s: float = math.inf
    env_steps_per_batch: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of one update.

    Attributes:
        metrics: numbers to report, by name.
        skipped: True if the loss or a gradient was not finite; the weights and the optimiser are
            then unchanged.
        bad_column: first column of a skipped batch with a non-finite number; "" if the batch is
            finite and the computation was not.
    """

    metrics: dict[str, float]
    skipped: bool = False
    bad_column: str = ""


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """State that a learner needs to continue as if it had never stopped.

    Attributes:
        tensors: weights and optimiser variables, name -> array.
        values: counters, random states and adaptive coefficients, JSON-serialisable.
    """

    tensors: dict[str, Array]
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations that a network receives.

    Attributes:
        shape: shape of one observation's array.
        dtype: "float32" or "uint8".
        layout: layout of an observation in the array.
    """

    shape: Shape
    dtype: str
    layout: ObsLayout


@dataclass(frozen=True, slots=True)
class Round:
    """Minibatches of one call of the compiled update.

    Attributes:
        columns: arrays by name: [R, ...] of rows, from which `order` picks, or stacks [K, M, ...]
            of minibatches; for an update of several policies, by policy id and name.
        order: int32 [K, M], rows of each minibatch; None if the arrays are stacks of minibatches.
        num_steps: minibatches to make, at most K.
        knobs: knobs of this call, in addition to those of the update.
        ids: int64 [K, M], numbers of the rows that were drawn; empty if none were drawn.
    """

    columns: Mapping[str, Any]
    order: I32 | None
    num_steps: int
    knobs: Mapping[str, float] = field(default_factory=dict)
    ids: Array = field(default_factory=lambda: np.empty((0, 0), np.int64))


class Feed(ABC):
    """Takes the fragments of one policy and makes minibatches of them, in the learner's process.

    For each update, the learner calls `make_batch`, runs the compiled update on each of `rounds`,
    passes what it wrote to `take_back`, and calls `report` at the end. One thread calls all
    methods, `check_fragment` and `hurry` excepted.

    Attributes:
        merged_filter: merged filter of the policy's observations, for observations that arrive
            unfiltered. Another thread merges into it.
        shares_memory: True if the arrays of a round are `shareable_zeros` that stay as they are
            during its call.
    """

    merged_filter: ObservationFilter = NoFilter()
    shares_memory: ClassVar[bool] = False

    @abstractmethod
    def fit(self, loop: Loop) -> Loop:
        """Return the loop of an update as it must be to read the arrays of `rounds`."""

    @abstractmethod
    def check_fragment(self, fragment: Columns) -> None:
        """Check that `make_batch` can use a `fragment`, before it is queued. Can be called in any
        thread.

        Args:
            fragment: columns ``[T, N, ...]`` by name.

        Raises:
            BatchError: a column is wrong; the error names it.
        """

    @abstractmethod
    def make_batch(self, fragments: Sequence[Columns]) -> Batch:
        """Take fragments in the given order: lay them out as one train batch, or add them to the
        replay.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``.

        Returns:
            Batch for `rounds`, with arrays of fixed shapes. The second call after this one
            overwrites its buffers.

        Raises:
            BatchError: a column is missing or has a wrong shape or dtype.
        """

    @abstractmethod
    def rounds(self, batch: Batch, env_steps_total: int) -> Iterator[Round]:
        """Yield the minibatches that are due after `make_batch`.

        Args:
            batch: result of `make_batch`, arrays of any shape.
            env_steps_total: env steps trained on before this batch; schedules depend on it.
        """

    @abstractmethod
    def nominal(self) -> Round:
        """Return a round of the usual shape, without minibatches to make; changes nothing."""

    @abstractmethod
    def first_not_finite(self, minibatches: Round) -> str:
        """Return the first column of these `minibatches` with a non-finite number; "" if all are
        finite.
        """

    def take_back(self, minibatches: Round, written: Columns) -> None:
        """Take the columns that a call wrote for its rows; not called if it was skipped.

        Args:
            minibatches: round of the call.
            written: [K, M, ...] by name.
        """
        return

    def report(self, results: Sequence[tuple[Round, dict[str, float]]]) -> dict[str, float]:
        """Return the metrics of an update.

        Args:
            results: rounds that were not skipped, with their metrics.
        """
        return {name: value for _, metrics in results for name, value in metrics.items()}

    def hurry(self) -> None:
        """End `rounds` early, in a state from which training can continue. Can be called in any
        thread.
        """
        return

    def state(self) -> dict[str, Any]:
        """Return the feed's part of `AlgorithmState.values`, without stored experience."""
        return {}

    def set_state(self, values: Mapping[str, Any]) -> None:
        """Continue from values that `state` returned, which can be among others.

        Raises:
            (KeyError, TypeError, ValueError): a value is missing or wrong.
        """
        return

    @property
    def stores_experience(self) -> bool:
        """True if `hold_experience` returns stored experience."""
        return False

    def hold_experience(self) -> Snapshot | None:
        """Return the stored experience as it is now; None if there is none.

        Called between two updates when a checkpoint will be written. It is too large to be held
        after each update.
        """
        return None

    def restore_experience(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """Continue with the stored experience that `hold_experience` returned.

        Args:
            values: values of the snapshot, possibly read back from JSON.
            pieces: pieces of the snapshot, in any order.

        Raises:
            CheckpointError: it doesn't fit.
        """
        raise CheckpointError("experience", "the algorithm stores no experience")


class Experience(Protocol):
    """Experience of an algorithm: which data workers send, how much may be sampled with which
    weights, and what the learner makes of it.

    `aiorl.learning.experience` and `aiorl.learning.replayed` have the usual ones.
    """

    @property
    def sample_plan(self) -> SamplePlan:
        """Columns that workers compute and send."""

    @property
    def sends_gradients(self) -> bool:
        """True if workers send the gradient of a fragment instead of its rows."""

    def lease_plan(self) -> LeasePlan:
        """Return the leases that the algorithm wants.

        Raises:
            ConfigError: whole fragments can't make up a train batch, or there is no stored
                experience for an algorithm that learns from nothing else.
        """

    def feed(self, model: ActorCritic, update: Update, rng: np.random.Generator) -> Feed:
        """Return what takes the fragments of a policy, with its buffers allocated.

        Args:
            model: network of the policy.
            update: update that will use them.
            rng: generator of the learner's random numbers.

        Raises:
            ConfigError: there is not enough room.
        """

    @staticmethod
    def check_room(policies: Sequence[tuple[Any, ActorCritic]]) -> None:
        """Check that this machine has room for all policies before allocating anything, and log how
        much they take.

        Args:
            policies: experience and model of every policy that learns in the run, of any kind.

        Raises:
            ConfigError: there is no room for all of them together.
        """


class Adaptation:
    """Change after an update, for example of knobs, by the metrics of the update.

    This class does nothing; algorithms override some of its methods. With this one, a loss reads
    ``knobs["penalty"]``::

        class Penalty(Adaptation):
            value = 1.0

            def knobs(self):
                return {"penalty": self.value}

            def after_update(self, metrics, updates):
                if metrics["kl"] > 0.02:
                    self.value *= 2

            def state(self):
                return {"penalty": self.value}

            def set_state(self, values):
                self.value = float(values["penalty"])
    """

    def knobs(self) -> Mapping[str, float]:
        """Return the current values of the knobs, by name."""
        return {}

    def after_update(self, metrics: dict[str, float], updates: int) -> None:
        """Adapt to an update that was not skipped.

        Args:
            metrics: means over the minibatches of the update; others can be added.
            updates: number of updates so far that were not skipped.
        """

    def state(self) -> dict[str, Any]:
        """Return the values to save, JSON-serialisable."""
        return {}

    def set_state(self, values: Mapping[str, Any]) -> None:
        """Continue from values that `state` returned, which can be among others.

        Raises:
            (KeyError, TypeError, ValueError): a value is missing or wrong.
        """


@dataclass(frozen=True, kw_only=True)
class Update:
    """Update of an algorithm's networks::

        Update(loop=epochs(10, minibatches(256, step)), knobs=schedules(config))

    Attributes:
        loop: steps and minibatches, compiled as one function.
        knobs: schedules over env steps of the numbers that the steps read, by name. "lr" is among
            them.
        reported: knobs to report among the metrics.
        adaptations: knobs that depend on earlier updates.
        targets: target networks, by the prefix of the names under which they are saved.
        saved: further variables to save, by names that never change.
    """

    loop: Loop
    knobs: Mapping[str, Schedule]
    reported: Sequence[str] = ()
    adaptations: Sequence[Adaptation] = ()
    targets: Mapping[str, TargetNetwork] = field(default_factory=dict)
    saved: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the loop and the knobs.

        Raises:
            ConfigError: `loop` is no loop, a knob no schedule, or there is no knob "lr".
        """
        if not isinstance(self.loop, Loop):
            raise ConfigError(
                f"loop of an Update is a {type(self.loop).__name__}, expected a loop.",
                key="algo",
                hint="Pass epochs(number, minibatches(env_steps, step)) or drawn(step).",
            )
        for name, knob in self.knobs.items():
            if not isinstance(knob, Schedule):
                raise ConfigError(
                    f"the knob {name!r} of an Update is {knob!r:.200}, expected a schedule.",
                    key="algo",
                    hint="Pass Schedule(value) for a constant.",
                )
        if "lr" not in self.knobs:
            raise ConfigError(
                f"the knobs of an Update are {sorted(self.knobs)}, without 'lr'.",
                key="algo",
                hint="Begin with schedules(config), or replay_knobs(config) for a replay.",
            )

    def other_variables(self) -> dict[str, Any]:
        """Return the variables to save along with the weights, by names that never change."""
        variables = {
            f"optimizer/{index:03d}": variable
            for index, variable in enumerate(self.loop.optimizer_variables)
        }
        for prefix, target in self.targets.items():
            variables |= {f"{prefix}/{name}": item for name, item in target.variables.items()}
        return {**variables, **self.saved}

    def with_descent(self, name: str = "", **changes: Any) -> Update:
        """Return this update with other arguments of `descend` for one of its steps::

            PPO.update(config, networks).with_descent(parts=[Part(first_layer, rate=0.1)])

        Args:
            name: name of the step: NAME of its metric "NAME_loss", "" of "loss".
            **changes: arguments of `descend` by name: `optimizer`, `parts`, `clip`, `reduce`, `lr`.
                The others stay as they are; without an `optimizer`, it is one like the former.

        Raises:
            ConfigError: no step, or more than one, has that name; or see `descend`.
        """

        def changed(step: Descent) -> Descent:
            return _remade(step, step.loss, step.variables, changes)

        loop = replace(self.loop, step=_with_descent(self.loop.step, name, changed))
        return replace(self, loop=loop)

    def with_loss(
        self, loss: Loss, variables: Mapping[str, Any] | None = None, *, name: str = ""
    ) -> Update:
        """Return this update with a further loss in one of its steps, which descends the sum of
        both::

            PPO.update(config, networks).with_loss(prediction_loss, {"predictor/kernel": kernel})

        Args:
            loss: loss of a minibatch. Its tensors join those of the step's own loss.
            variables: further variables for the step to train, TensorFlow's or Keras's, by the
                names under which they are saved, which never change.
            name: name of the step, see `with_descent`.

        Raises:
            ConfigError: no step, or more than one, has that name; a name in `variables` is taken.
                Or, when it is traced, both losses return a tensor of the same name.
        """
        variables = variables or {}
        further = dict(zip(variables, of_tensorflow([*variables.values()]), strict=True))
        check_distinct("variables", self.saved, further)

        def changed(step: Descent) -> Descent:
            def total(minibatch: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
                value, tensors = checked_pair(step.loss(minibatch, knobs), step.loss)
                further_value, further_tensors = checked_pair(loss(minibatch, knobs), loss)
                check_distinct("tensors", tensors, further_tensors)
                return value + further_value, {**tensors, **further_tensors}

            return _remade(step, total, [*step.variables, *further.values()], {})

        loop = replace(self.loop, step=_with_descent(self.loop.step, name, changed))
        return replace(self, loop=loop, saved={**self.saved, **further})

    def knobs_at(self, env_steps_total: int) -> dict[str, float]:
        """Return all knobs after `env_steps_total` env steps."""
        values = {
            name: knob.value(env_steps_total) if knob.constant is None else knob.constant
            for name, knob in self.knobs.items()
        }
        for adaptation in self.adaptations:
            values.update(adaptation.knobs())
        return values


def _with_descent(step: Step, name: str, change: Callable[[Descent], Descent]) -> Step:
    """Return a step in which the `Descent` of that name is changed.

    Args:
        step: a step, or what combinators made of several.
        name: name of the descent, as in its metrics.
        change: returns what takes its place.

    Raises:
        ConfigError: no descent, or more than one, has that name; or see `change`.
    """
    names: list[str] = []

    def changed(part: Step) -> Step:
        if isinstance(part, Composed):
            return replace(part, steps=tuple(changed(inner) for inner in part.steps))
        if not isinstance(part, Descent):
            return part
        names.append(part.name)
        return change(part) if part.name == name else part

    result = changed(step)
    check_only_one(name, names)
    return result


def _remade(
    step: Descent, loss: Loss, variables: Sequence[Any], changes: Mapping[str, Any]
) -> Descent:
    """Return a step like another one, with this loss and these variables.

    Args:
        step: the other one.
        loss: loss of a minibatch.
        variables: variables to train.
        changes: further arguments of `descend` that differ, by name.
    """
    arguments = {
        "parts": step.parts,
        "clip": step.clip,
        "reduce": step.reduce,
        "lr": step.lr,
        "name": step.name,
        "optimizer": like(step.optimizer),
        **changes,
    }
    return descend(variables, loss, **arguments)


@dataclass(frozen=True, slots=True)
class Networks:
    """Networks that an update trains.

    Attributes:
        by_policy: policy id -> network with which the policy acts. Updates of an `Algorithm` that
            is not joint have one policy.
    """

    by_policy: Mapping[str, ActorCritic]

    @classmethod
    def of(cls, model: ActorCritic) -> Networks:
        """Return the networks of a single policy, which has this `model`."""
        return cls({DEFAULT_POLICY_ID: model})

    @property
    def model(self) -> Any:  # Any: algorithms build networks of their own classes
        """The network of the only policy."""
        (model,) = self.by_policy.values()
        return model


ConfigT = TypeVar("ConfigT", bound=CommonConfig)


class Algorithm(ABC, Generic[ConfigT]):
    """An algorithm: experience x update x acting.

    It is never instantiated. All of it is static methods of the config, so that one algorithm can
    take parts of another::

        class Munchausen(Algorithm):
            config_class = MunchausenConfig
            experience = DQN.experience
            build_model = DQN.build_model
            acting_settings = DQN.acting_settings

            @staticmethod
            def update(config, networks): ...

    Attributes:
        config_class: class of the algorithm's config.
        is_joint: True if one update is of all policies of a run that learn by the algorithm. It has
            their networks in `Networks.by_policy`, and its minibatches are by policy id; see
            `aiorl.learning.joint`.
    """

    config_class: ClassVar[type[CommonConfig]]
    is_joint: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def experience(config: ConfigT) -> Experience:
        """Return what the algorithm learns from with this `config`. Loads no TensorFlow."""

    @staticmethod
    @abstractmethod
    def update(config: ConfigT, networks: Networks) -> Update:
        """Return how it learns; creates the optimisers and all networks that stay on the learner.

        Args:
            config: config of the run, or of the policy if it has its own settings.
            networks: networks with which policies act.
        """

    @staticmethod
    def acting_settings(config: ConfigT) -> dict[str, Any]:
        """Return settings of the acting policy in addition to those in `config`, such as
        "exploration".
        """
        if isinstance(config, SDEKeys) and config.use_sde:
            return {"exploration": config.sampling()}
        return {}

    @staticmethod
    def build_model(
        config: ConfigT,
        observations: Observations,
        action_space: spaces.Space[Any],
        seed: int | None,
    ) -> ActorCritic:
        """Build the network that is trained; its `forward_step` acts. Loads TensorFlow.

        Args:
            config: config of the policy.
            observations: observations that the network receives.
            action_space: space of the actions.
            seed: seed of the initial weights; None = random.

        Raises:
            ConfigError: the settings can't make a network for these observations.
        """
        from aiorl.learning.models.catalog import build_model

        return build_model(
            observations.shape,
            observations.dtype,
            make_distribution(action_space, scale=config.normalize_actions),
            config.model.model_dump(),
            seed=seed,
            layout=observations.layout,
            noise=config.state_dependent_noise,
        )


def own_config(kind: type[Algorithm[Any]], config: CommonConfig) -> Any:
    """Return a `config` of an algorithm, untyped, for its static methods.

    Raises:
        InternalError: it belongs to another algorithm.
    """
    if not isinstance(config, kind.config_class):
        raise InternalError(f"{kind.__name__} was given a {type(config).__name__}")
    return config


def experience_of(kind: type[Algorithm[Any]], config: CommonConfig) -> Experience:
    """Return what an algorithm learns from with this `config`.

    Raises:
        InternalError: the config belongs to another algorithm.
    """
    return kind.experience(own_config(kind, config))


def acting_settings_of(kind: type[Algorithm[Any]], config: CommonConfig) -> dict[str, Any]:
    """Return an algorithm's settings of acting, in which the exploration in `config`, if any,
    replaces the algorithm's own.
    """
    settings = kind.acting_settings(own_config(kind, config))
    if config.exploration is None:
        return settings
    return {**settings, "exploration": config.exploration}


def want_stored_experience(config: CommonConfig) -> None:
    """Raise ConfigError if the config names no stored experience."""
    if config.input == "sampler":
        raise ConfigError(
            f"{config.algo} learns from stored experience, but input names none.",
            key="input",
            value=config.input,
            hint='Name files, such as --input "data/*.json". A run with --output DIR writes them.',
        )
