"""Export of a policy to a Keras model, and from there to `.keras`, SavedModel and TFLite."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from numpy.typing import NDArray

from aiorl.acting.acting_graph import (
    OBS_INPUT,
    PREV_ACTIONS_INPUT,
    PREV_REWARDS_INPUT,
)
from aiorl.data.columns import Array
from aiorl.errors import ExportError
from aiorl.learning.models.functional import FunctionalNetwork
from aiorl.run.export.check import Runner
from aiorl.run.export.form import (
    PolicyForm,
    actions_before_clipping,
    carry_actions,
    choose_action,
    normalise,
)

_SIGNATURE = "serving_default"
_LACKING = re.compile(r"'tf\.(\w+)' op is neither")
"""Pattern of an operation that is not built in, in messages of TFLite's converter."""
_UNKNOWN_CLASS = re.compile(r"Could not locate class '(\w+)'")
"""Pattern of a class that Keras can't find, in its messages."""


def to_keras(form: PolicyForm) -> Any:
    """Return the whole policy as a functional Keras model: dict of inputs by name -> dict of
    outputs by name.

    Raises:
        ExportError: the network can't be built from the checkpoint.
    """
    spec = form.spec
    inputs = {
        item.name: keras.Input(item.shape, dtype=item.dtype, name=item.name) for item in form.inputs
    }
    operations = _KerasOperations()
    obs = inputs[OBS_INPUT]
    if form.normalisation is not None:
        obs = normalise(operations, obs, form.normalisation)
    previous = inputs.get(PREV_ACTIONS_INPUT)
    if form.carried is not None:
        previous = actions_before_clipping(
            operations,
            previous,
            inputs[form.carried.name],
            form,
        )
    try:
        dist_inputs, values, state_out = _network(form)(
            obs,
            [inputs[name] for name in spec.state_inputs],
            previous,
            inputs.get(PREV_REWARDS_INPUT),
        )
    except ValueError as error:
        # a ConfigError, or Keras's error about weights that don't fit the settings
        raise ExportError(f"its network can't be built: {error!s:.500}") from error
    outputs = {
        part.output.name: choose_action(operations, dist_inputs, part) for part in form.actions
    }
    outputs |= zip(spec.output_names, (dist_inputs, values, *state_out), strict=True)
    if form.carried_output is not None:
        outputs[form.carried_output.name] = carry_actions(operations, dist_inputs, form)
    return keras.Model(inputs, outputs, name="policy")


def _network(form: PolicyForm) -> FunctionalNetwork:
    """Return the policy's network, which takes Keras tensors.

    Raises:
        ConfigError: it can't be built from the checkpoint.
    """
    parts = form.parts
    settings = form.run.acting.part.policies[form.parts.policy_id].config
    layout = parts.filter.output_layout(parts.preprocessor.layout)
    distribution = parts.policy.distribution
    least = settings.get("v_min")
    largest = settings.get("v_max")
    return FunctionalNetwork(
        layout,
        form.spec.obs_dtype,
        distribution,
        model_config=settings.get("model") or {},
        weights=form.parts.policy.get_weights(),
        returns=None if least is None or largest is None else (least, largest),
    )


def write_keras(form: PolicyForm, path: Path) -> Runner:
    """Write a ``.keras`` file, and return a function that runs it, opened without running code from
    the file.

    Raises:
        ExportError: the network has a part that Keras can't save or load.
    """
    try:
        to_keras(form).save(path)
        model = keras.models.load_model(path, compile=False)
    except Exception as error:
        # layers of the user's own raise exceptions of any kind
        reason = f"{error!s:.500}"
        unknown = _UNKNOWN_CLASS.search(str(error))
        if unknown is not None:
            reason = (
                f"{unknown[1]} is a class of your own; decorate it with"
                " @keras.saving.register_keras_serializable(), and import it before the file is"
                " loaded"
            )
        raise ExportError(f"Keras can't save and load it: {reason}") from error
    return lambda inputs: {name: np.asarray(value) for name, value in model(dict(inputs)).items()}


def write_savedmodel(form: PolicyForm, path: Path) -> Runner:
    """Write a SavedModel with the signature ``serving_default``, and return a function that runs
    it.
    """
    _save(form, path)
    function = tf.saved_model.load(path).signatures[_SIGNATURE]

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = function(**{name: tf.constant(value) for name, value in inputs.items()})
        return {name: value.numpy() for name, value in outputs.items()}

    return run


def write_tflite(form: PolicyForm, path: Path) -> Runner:
    """Write a TFLite file of built-in operations only, and return a function that runs it.

    Raises:
        ExportError: the network needs other operations, or actions need float64.
    """
    if any(part.dtype == "float64" for part in form.actions):
        raise ExportError(
            "TFLite computes in float32, which is too coarse for a Box so narrow and so far from 0;"
            " try onnx, savedmodel or keras"
        )
    with tempfile.TemporaryDirectory(prefix="tflite-") as folder:
        _save(form, Path(folder))
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=[_SIGNATURE])
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        try:
            content = converter.convert()
        except Exception as error:
            # the converter's exceptions have no narrower common base
            lacking = sorted(set(_LACKING.findall(str(error))))
            reason = f"it has no {', '.join(lacking)}" if lacking else f"{error!s:.500}"
            raise ExportError(
                f"TFLite's built-in operations are not enough for its network: {reason}"
            ) from error
    path.write_bytes(content)
    with warnings.catch_warnings():
        # the interpreter warns that it will move to its own package
        warnings.simplefilter("ignore")
        interpreter = tf.lite.Interpreter(str(path))
    runner = interpreter.get_signature_runner(_SIGNATURE)
    return lambda inputs: dict(runner(**inputs))


def _save(form: PolicyForm, path: Path) -> None:
    model = to_keras(form)
    signature = [
        tf.TensorSpec((None, *item.shape), item.dtype, name=item.name) for item in form.inputs
    ]
    names = [item.name for item in form.inputs]
    function = tf.function(
        lambda *values: model(dict(zip(names, values, strict=True))),
        input_signature=signature,
        autograph=False,
    )
    module = tf.Module()
    module.weights = [item.value for item in model.weights]
    module.act = function
    tf.saved_model.save(module, str(path), signatures={_SIGNATURE: function})


class _KerasOperations:
    """Keras operations, as `aiorl.run.export.form` calls them."""

    subtract = staticmethod(ops.subtract)
    multiply = staticmethod(ops.multiply)
    minimum = staticmethod(ops.minimum)
    maximum = staticmethod(ops.maximum)
    tanh = staticmethod(ops.tanh)
    cast = staticmethod(ops.cast)

    def add(self, tensor: Any, constant: Array) -> Any:
        # in the other order it would be Keras's bias_add, which TFLite has only for float32
        return ops.add(constant, tensor)

    def where_close(self, first: Any, second: Any, tolerance: Array, tensor: Any) -> Any:
        difference = ops.abs(ops.subtract(first, second))
        return ops.where(ops.less_equal(difference, tolerance), tensor, first)

    def joined(self, tensors: Sequence[Any]) -> Any:
        return ops.concatenate(tensors, axis=1)

    def is_positive(self, tensor: Any) -> Any:
        return ops.greater(tensor, 0.0)

    def argmax(self, tensor: Any) -> Any:
        # Keras's argmax uses bitwise operations, which TFLite doesn't have
        return ops.cast(ops.top_k(tensor, 1)[1][..., 0], "int64")

    def columns(self, tensor: Any, start: int, stop: int) -> Any:
        return tensor[:, start:stop]

    def take(self, tensor: Any, columns: NDArray[np.int64], fill: float) -> Any:
        padded = ops.pad(tensor, [[0, 0], [0, 1]], constant_values=fill)
        return ops.take(padded, columns, axis=1)

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        return ops.reshape(tensor, [-1, *shape])
