"""Base class of algorithms whose weights one `CompiledUpdate` changes: guard, counters, state, target networks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from aiorl.acting.exploration import Schedule
from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError, ConfigError, InternalError, TrainingDiverged
from aiorl.learning.algorithms.algorithm import Algorithm, AlgorithmState, Array
from aiorl.learning.algorithms.compiled_update import STEPS_BEFORE, CompiledUpdate
from aiorl.learning.lazy import Tensors, tf

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.models.networks import Network

_log = logging.getLogger(__name__)


def keras_optimizer(name: str, options: Mapping[str, Any], **own: Any) -> Any:  # Any: Keras ships no types
    """An optimizer of Keras.

    Args:
        name: of its class, such as Adam.
        options: further arguments of it, as users set them.
        **own: arguments that the algorithm has keys for.
    Raises: ConfigError if one of the options is among those, or Keras takes it not.
    """
    import keras

    for option in options:
        if option in own:
            raise ConfigError(
                f"optimizer.{option} can't be set: the algorithm has a key of its own for it.",
                key=f"optimizer.{option}",
                value=options[option],
            )
    try:
        return getattr(keras.optimizers, name)(**own, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Keras makes no {name} with these options: {error}.", key="optimizer", value=dict(options),
            hint=f"See https://keras.io/api/optimizers/{name.lower()}.",
        ) from error  # fmt: skip


class TargetNetwork:
    """Weights that follow those of a network.

    Attributes:
        network: that learns; it takes `tensors` in place of its own weights.
        variables: by the names of the network's.
    """

    def __init__(self, network: Network) -> None:
        """Begin with the network's weights as they are now."""
        self.network = network
        self.variables: dict[str, Any] = {
            name: tf.Variable(variable, trainable=False) for name, variable in network.variables.items()
        }

    def tensors(self) -> Tensors:
        """The weights of this moment by name."""
        return {name: tf.convert_to_tensor(variable) for name, variable in self.variables.items()}

    def take_over(self, share: float = 1.0) -> None:
        """Become the network, or come nearer to it by a share."""
        for name, variable in self.variables.items():
            online = tf.convert_to_tensor(self.network.variables[name])
            is_whole = share == 1 or not online.dtype.is_floating  # counts of a user's layers have no part in between
            variable.assign(online if is_whole else variable + share * (online - variable))


def following(*targets: TargetNetwork, tau: float, every: int) -> dict[str, Any]:
    """Return what an `UpdateSpec` has to be told so that target networks follow within an update.

    Args:
        targets: all of the update.
        tau: how far, see `TargetNetwork.take_over`.
        every: after how many minibatches, counted on from the coefficient STEPS_BEFORE.
    """

    def move() -> tf.Tensor:
        for target in targets:
            target.take_over(tau)
        return tf.constant(0)

    def follow(step: tf.Tensor, coefficients: Tensors) -> None:
        if every == 1:
            move()
            return
        made = tf.cast(coefficients[STEPS_BEFORE], tf.int32) + step + 1
        tf.cond(tf.equal(made % every, 0), move, lambda: tf.constant(0))

    variables = tuple(variable for target in targets for variable in target.variables.values())
    return {"followers": variables, "follow": follow}


ConfigT = TypeVar("ConfigT", bound=CommonConfig)

MAX_SKIPS_IN_A_ROW = 10
"""So many updates in a row may be skipped for numbers that are not finite before training ends."""

_SEED_KEY = 0x616C676F  # keeps the algorithm's random numbers apart from the workers' of the same seed


class CompiledBase(Algorithm, Generic[ConfigT]):
    """Has a model, which a compiled update changes or leaves as it is. Subclasses make the update.

    Attributes:
        model: the network.
        compiled: the update.
        targets: name below which its weights are saved -> target network; there before the update is.
    """

    compiled: CompiledUpdate
    targets: Mapping[str, TargetNetwork] = MappingProxyType({})

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Take the model; nothing is compiled yet."""
        self.config = self.own_config(config)
        self.model = model
        self.rng = np.random.default_rng(np.random.SeedSequence(config.seed, spawn_key=(_SEED_KEY,)))
        self.updates = 0
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._lr_is_over = False
        self._read: Callable[[], dict[str, Any]] | None = None  # Any: tensors

    @classmethod
    def own_config(cls, config: CommonConfig) -> ConfigT:
        """Return a config as that of this algorithm.

        Raises: InternalError if it is not.
        """
        if not isinstance(config, cls.config_class):
            raise InternalError(f"{cls.__name__} was given a {type(config).__name__}")
        return cast(ConfigT, config)

    def adam(self, epsilon: float) -> Any:  # Any: a Keras optimiser
        """Make an Adam with the learning rate and the options of the config."""
        return keras_optimizer("Adam", self.config.optimizer, learning_rate=self.config.lr, epsilon=epsilon)

    def adam_of_multiplier(self, epsilon: float) -> Any:  # Any: a Keras optimiser
        """Of a single number that weighs losses: what a user sets for networks, such as decay, is not for it."""
        return keras_optimizer("Adam", {}, learning_rate=self.config.lr, epsilon=epsilon)

    def _note_held(self) -> None:
        """Count an update that held."""
        self.updates += 1
        self._skipped_in_a_row = 0

    def _warn_of_last_lr(self, lr: Schedule, env_steps: int) -> None:
        """Warn, once, that the learning rate has ended at 0."""
        if self._lr_is_over or env_steps < lr.end or lr.value(env_steps) > 0:
            return
        self._lr_is_over = True
        _log.warning(
            "the learning rate is 0 from here on, so the policy will not change any more: lr_schedule ends at %s env "
            "steps. To go on learning, let lr_schedule end later or at a value above 0; to end the run there, set "
            "stop_timesteps: %d",
            f"{lr.end:,.0f}", lr.end,
        )  # fmt: skip

    def _note_skipped(self, bad_column: str) -> None:
        """Count an update that was skipped, for a number in a column or, if there is none, in what was computed.

        Raises: TrainingDiverged after `MAX_SKIPS_IN_A_ROW` in a row.
        """
        self._skipped += 1
        self._skipped_in_a_row += 1
        where = (
            f"column {bad_column!r} of the batch"
            if bad_column
            else "the loss or its gradient; the batch itself is finite"
        )
        _log.warning("update skipped: a number in %s is not finite; weights stay as they were", where)
        if self._skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} updates in a row were skipped because numbers were not finite, the last "
                f"in {where}. The weights are those of the last good update. Check the environment's rewards and "
                "observations, or set a lower lr or a smaller grad_clip."
            )

    def extra_state(self) -> dict[str, Any]:
        """Return further state to save, in a form that JSON can hold."""
        return {}

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Take up what `extra_state` gave."""

    def get_weights(self) -> dict[str, Array]:
        """Copies of the weights by the names the acting graph knows."""
        return self.model.get_weights()

    def get_state(self) -> AlgorithmState:
        """Weights, optimiser, random numbers to come, counters."""
        return self.hold_state()()

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """See `Algorithm.hold_state`.

        What is read of a variable is immutable; TensorFlow copies it only once the variable changes. One function reads
        all of them, since each alone takes as long as some dozen together.
        """
        if self._read is None:
            variables = {f"weights/{name}": variable for name, variable in self.model.variables.items()}
            variables |= self.other_variables()
            self._read = tf.function(
                lambda: {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}, autograph=False
            )
        tensors = self._read()
        values = {
            "rng": self.rng.bit_generator.state,
            "updates": self.updates,
            "updates_skipped": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
            **self.extra_state(),
        }
        return lambda: AlgorithmState({name: np.array(tensor.numpy()) for name, tensor in tensors.items()}, values)

    def set_state(self, state: AlgorithmState) -> None:
        """Go on from `state`; all of it is checked before any of it is taken.

        Raises: CheckpointError if a tensor is missing, left over or of another shape, or a value is missing.
        """
        variables = self.other_variables()
        wanted = {f"weights/{name}": _kind(weight) for name, weight in self.get_weights().items()}
        wanted |= {name: _kind(variable.numpy()) for name, variable in variables.items()}
        given = {name: _kind(tensor) for name, tensor in state.tensors.items()}
        if wanted != given:
            differing = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
            first = differing[0]
            raise CheckpointError(
                "tensors",
                f"they don't fit this model: {first} is {given.get(first, 'missing')} there and "
                f"{wanted.get(first, 'unknown')} here ({len(differing)} differ)",
            )
        self._set_values(state.values)
        weights = {name: state.tensors[f"weights/{name}"] for name in self.get_weights()}
        self.model.set_weights(weights)
        for name, variable in variables.items():
            variable.assign(state.tensors[name])

    def _set_values(self, values: Mapping[str, Any]) -> None:
        try:
            self.set_extra_state(values)
            self.rng.bit_generator.state = values["rng"]
            self.updates = int(values["updates"])
            self._skipped = int(values["updates_skipped"])
            self._skipped_in_a_row = int(values["skipped_in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError("values", f"a counter or random state is missing or wrong: {error!r}") from error

    def weights_replaced(self) -> None:
        """The model's target is the same then; those of other networks learn of it as they go on."""
        for target in self.targets.values():
            if target.network is self.model:
                target.take_over()

    def other_variables(self) -> dict[str, Any]:
        """What is saved beside the weights, by names that don't change from run to run: optimisers, target networks."""
        optimizers = self.compiled.optimizer_variables
        found = {f"optimizer/{index:03d}": variable for index, variable in enumerate(optimizers)}
        for prefix, target in self.targets.items():
            found |= {f"{prefix}/{name}": variable for name, variable in target.variables.items()}
        return found


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
