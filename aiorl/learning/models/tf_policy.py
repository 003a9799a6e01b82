"""TFPolicy: a policy whose network runs in TensorFlow.

It is the learner's form of a policy in a process that has TensorFlow anyway, the base of custom
policies that learn by themselves, and a worker's fallback for a network without an acting graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from gymnasium import spaces

from aiorl.acting.acting_graph import ActingSpec, Previous
from aiorl.acting.distributions import make_distribution
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.config.schema import SDESettings
from aiorl.data.columns import F32, Array, Columns
from aiorl.data.obs_layout import layout_of
from aiorl.errors import CheckpointError, PolicyError, UnsupportedSpaceError
from aiorl.learning.models.actor_critic import ActorCritic
from aiorl.learning.models.catalog import build_model
from aiorl.learning.models.distributions import to_tf_distribution
from aiorl.learning.models.export import acting_signature, make_acting_spec

_DEFAULT_LR = 1e-4
_OF_KERAS = {"layers", "_layer_checkpoint_dependencies", "model_weights", "optimizer_weights"}
"""Groups at the top of Keras's HDF5 files."""


class TFNetwork:
    """Model for acting, with the interface of `ActingGraph`."""

    def __init__(self, model: ActorCritic) -> None:
        """Take over the `model`; it is traced at its first run, once for any number of rows."""
        self.model = model
        self._spec = make_acting_spec(model)
        self._step = tf.function(
            self._forward, input_signature=acting_signature(self._spec), autograph=False
        )

    def run(
        self,
        obs: Array,
        state: Sequence[F32] = (),
        prev: Previous | None = None,
        out: tuple[F32, F32] | None = None,
        noise: F32 | None = None,
    ) -> tuple[F32, F32, list[F32]]:
        """See `ActingGraph.run`; noisy layers use their means.

        Raises:
            PolicyError: the arrays don't fit.
        """
        previous: list[Any] = []
        if prev is not None and self._spec.prev_action is not None:
            previous = [prev[0].astype(self._spec.prev_action.dtype), prev[1].astype(np.float32)]
        try:
            outputs = self._step(tf.constant(obs), *map(tf.constant, [*previous, *state]))
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise PolicyError(f"the model rejected its inputs: {error!s:.500}") from error
        dist_inputs, values, *state_out = (output.numpy() for output in outputs)
        if out is not None:
            out[0][...] = dist_inputs
            out[1][...] = values
            return *out, state_out
        return dist_inputs, values, state_out

    def set_weights(self, weights: Columns) -> None:
        """See `ActorCritic.set_weights`."""
        self.model.set_weights(weights)

    def get_weights(self) -> dict[str, Array]:
        """Return copies of all weights by name."""
        return self.model.get_weights()

    def save(self, directory: str) -> None:
        """Write a SavedModel whose default signature uses the acting graph's names for its inputs
        and outputs.
        """

        def act(*inputs: Any) -> dict[str, Any]:
            return dict(zip(self._spec.output_names, self._forward(*inputs), strict=True))

        module = tf.Module()
        module.weights = list(self.model.variables.values())
        function = tf.function(act, input_signature=acting_signature(self._spec), autograph=False)
        module.act = function
        tf.saved_model.save(module, directory, signatures={"serving_default": function})

    def _forward(self, obs: Any, *rest: Any) -> tuple[Any, ...]:
        num_previous = 0 if self._spec.prev_action is None else 2
        previous = rest[:num_previous]
        state = list(rest[num_previous:])
        dist_inputs, values, state = self.model.forward_step(obs, state, *previous, for_acting=True)
        return (dist_inputs, values, *state)


class TFPolicy(GraphPolicy):
    """Policy with a network from `aiorl.learning.models.catalog`; subclasses that define a loss
    also learn.

    Attributes:
        model: network of the policy.
        tf_distribution: action distribution in TensorFlow, for losses.
        noise: settings of state-dependent noise; None = no such noise.
    """

    noise: ClassVar[SDESettings | None] = None

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: Mapping[str, Any],
    ) -> None:
        """Build the network.

        Args:
            observation_space: Box of floats or bytes, as a preprocessor returns it.
            action_space: any space with a distribution.
            config: settings. Read here, in addition to those of GraphPolicy: "model" (a model
                config), "squash_actions" (squash Boxes into their bounds), "scale_actions" (sample
                Boxes in units of their ranges, as normalize_actions of an algorithm does), "lr" (of
                Adam, 1e-4) and "seed" (of weights and noise).

        Raises:
            ConfigError: the settings make no network.
            UnsupportedSpaceError: a space has no network or no distribution.
        """
        self.model = self._make_model(observation_space, action_space, config)
        super().__init__(
            TFNetwork(self.model),
            make_acting_spec(self.model),
            observation_space=observation_space,
            config=config,
            seed=config.get("seed"),
        )
        self.tf_distribution = to_tf_distribution(self.distribution)
        self._optimizer: Any = None
        self._take_step: Any = None

    def _make_model(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: Mapping[str, Any],
    ) -> ActorCritic:
        """Build the network; arguments and errors are those of the constructor."""
        if not isinstance(observation_space, spaces.Box):
            raise UnsupportedSpaceError(
                "a network over the observation space",
                observation_space,
                ["Box"],
                "Leave the preprocessor on; it turns the space into a Box.",
            )
        distribution = make_distribution(
            action_space,
            squash=bool(config.get("squash_actions", False)),
            scale=bool(config.get("scale_actions", False)),
        )
        return build_model(
            observation_space.shape,
            "uint8" if observation_space.dtype == np.uint8 else "float32",
            distribution,
            config.get("model"),
            seed=config.get("seed"),
            layout=layout_of(observation_space),
            noise=self.noise,
        )

    def loss(self, batch: Mapping[str, Any]) -> Any:
        """Return the loss to minimise, a scalar; subclasses that learn define it.

        Args:
            batch: tensors ``[B, ...]`` by column.

        Raises:
            NotImplementedError: the class defines no loss.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no loss")

    def compute_gradients(self, batch: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """Compute the gradients of the loss.

        Args:
            batch: SampleBatch, or any mapping of columns ``[B, ...]``.

        Returns:
            The gradients by weight name, each in the weight's shape, and ``{"loss": ...}``.
        """
        tensors = {
            name: tf.convert_to_tensor(batch[name]) for name in batch if batch[name].dtype != object
        }
        variables = self.model.trainable
        with tf.GradientTape() as tape:
            loss = self.loss(tensors)
        gradients = tape.gradient(loss, variables, unconnected_gradients="zero")
        arrays = {name: np.asarray(gradient) for name, gradient in gradients.items()}
        return arrays, {"loss": float(loss)}

    def apply_gradients(self, gradients: Columns) -> dict[str, Any]:
        """Take one step of Adam.

        Args:
            gradients: weight name -> gradient in the weight's shape, for all trainable weights.

        Returns:
            ``{"grad_norm": ...}``, the norm of all gradients.

        Raises:
            PolicyError: the gradients don't match the weights or are not finite; nothing is changed
                then.
        """
        variables = self.model.trainable
        if gradients.keys() != variables.keys():
            raise PolicyError(
                f"gradients for {sorted(gradients)[:10]}, but the weights are"
                f" {sorted(variables)[:10]}"
            )
        squares = (np.square(gradient, dtype=np.float64).sum() for gradient in gradients.values())
        norm = float(np.sqrt(sum(squares)))
        if not np.isfinite(norm):
            raise PolicyError("gradients are not finite; no step was taken")
        tensors = [tf.convert_to_tensor(gradients[name]) for name in variables]
        self._adam()
        self._take_step(tensors)
        return {"grad_norm": norm}

    def learn_on_batch(self, batch: Any) -> dict[str, Any]:
        """Compute and apply the gradients of a `batch`; return the loss and the norm of the
        gradients.
        """
        gradients, figures = self.compute_gradients(batch)
        return figures | self.apply_gradients(gradients)

    def get_state(self) -> dict[str, Any]:
        """See `Policy.get_state`; includes the optimizer's moments once there are any."""
        state = super().get_state()
        if self._optimizer is not None:
            state["optimizer"] = {
                str(index): np.array(keras.ops.convert_to_numpy(item))
                for index, item in enumerate(self._optimizer.variables)
            }
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See `Policy.set_state`."""
        super().set_state(state)
        saved = state.get("optimizer")
        self._optimizer = None
        if saved:
            for index, item in enumerate(self._adam().variables):
                item.assign(saved[str(index)])

    def export_model(self, export_dir: str) -> None:
        """Write a TensorFlow SavedModel of the acting network with its weights to the directory
        `export_dir`.
        """
        network = self.graph
        assert isinstance(network, TFNetwork), "a TFPolicy runs its own model"
        network.save(export_dir)

    def export_checkpoint(self, export_dir: str, filename_prefix: str = "model") -> None:
        """Write the weights by name to one safetensors file.

        Args:
            export_dir: directory of the file, made if missing.
            filename_prefix: name of the file without its suffix.
        """
        from safetensors.numpy import save_file

        directory = Path(export_dir)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.get_weights(), directory / f"{filename_prefix}.safetensors")

    def import_model_from_h5(self, import_file: str) -> None:
        """Read weights from a file of `export_checkpoint`, or from an HDF5 file with a dataset at
        each weight's name.

        Args:
            import_file: path of the file.

        Raises:
            CheckpointError: the file can't be read, lacks a weight, or was written by Keras, which
                names weights by layers.
            PolicyError: a weight doesn't fit.
        """
        import h5py
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            if Path(import_file).suffix == ".safetensors":
                saved = load_file(import_file)
                weights = {name: saved[name] for name in self.model.variables}
            else:
                with h5py.File(import_file, "r") as file:
                    if not file.keys().isdisjoint(_OF_KERAS):
                        raise CheckpointError(
                            import_file,
                            "Keras wrote it, and names weights by layers, not as this policy does;"
                            " write the weights with export_checkpoint, or one dataset each:"
                            f" {', '.join(self.model.variables)}",
                        )
                    weights = {name: np.asarray(file[name]) for name in self.model.variables}
        except (OSError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(
                import_file, f"can't be read as weights of this policy: {error}"
            ) from error
        self.set_weights(weights)

    def _adam(self) -> Any:
        if self._optimizer is None:
            optimizer = keras.optimizers.Adam(float(self.config.get("lr", _DEFAULT_LR)))
            variables = list(self.model.trainable.values())
            optimizer.build(variables)
            self._optimizer = optimizer
            # operation by operation, a step takes ten times as long
            self._take_step = tf.function(
                lambda gradients: optimizer.apply(gradients, variables), autograph=False
            )
        return self._optimizer


def learned_tf_policy_class(spec: ActingSpec, model_config: Mapping[str, Any]) -> type[TFPolicy]:
    """Return the class of a learner's policy whose network has no acting graph; objects act once
    they have weights.

    Args:
        spec: the learner's description of the network.
        model_config: settings from which the learner built it.
    """

    class LearnedTFPolicy(TFPolicy):
        """Policy with the learner's network, built from the spaces of this host and the learner's
        settings.

        Raises:
            PolicyError: the settings make a different network here.
        """

        acting_spec = spec
        if spec.num_features:
            # initial weights and learning are up to the learner
            noise = SDESettings(initial_log_std=0.0, learns_features=False)

        def __init__(
            self,
            observation_space: spaces.Space[Any],
            action_space: spaces.Space[Any],
            config: Mapping[str, Any],
        ) -> None:
            spec.check_spaces(observation_space, action_space)
            network = {
                "model": dict(model_config),
                "squash_actions": spec.distribution.startswith("squashed"),
                "scale_actions": spec.distribution.startswith("scaled"),
            }
            super().__init__(observation_space, action_space, {**config, **network})
            if self.spec != spec:
                raise PolicyError(
                    "the network differs from the learner's; install the same versions on both"
                    " hosts"
                )

    return LearnedTFPolicy
