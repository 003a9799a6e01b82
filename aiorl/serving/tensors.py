"""Open Inference Protocol v2: metadata, and tensors of rows in JSON or in Triton's binary form."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from aiorl.serving.batching import MAX_ROWS, OUTPUTS, Answer
from aiorl.serving.models import Model
from aiorl.serving.values import held_by, is_shape, joined, part_at
from aiorl.web.messages import Refusal, Response, json_response, parse_json

Array = NDArray[Any]

BINARY_HEADER = b"inference-header-content-length"


class Tensor(NamedTuple):
    """Input or output of a model.

    Attributes:
        name: its name.
        shape: shape of one row.
        dtype: its dtype.
        of: function that takes an output from an answer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] = np.dtype(np.float32)
    of: Callable[[Answer], Any] = operator.attrgetter("actions")

    def described(self) -> dict[str, Any]:
        """Return the description that clients get; -1 is the number of rows."""
        datatype = f"FP{8 * self.dtype.itemsize}" if self.dtype.kind == "f" else self.dtype.name.upper()
        return {"name": self.name, "datatype": datatype, "shape": [-1, *self.shape]}


class Tensors:
    """Tensors of a model.

    Attributes:
        required: inputs without which there is no answer.
        optional: inputs that are zeros if they are missing.
        outputs: outputs; those of the action come first, and their names begin with ``action``.
    """

    def __init__(self, model: Model) -> None:
        """Name the tensors of a model."""
        actor = model.actor
        shapes = [state.shape for state in actor.initial_state]

        def named(name: str, leaves: Sequence[Any]) -> Iterator[Tensor]:
            for path, space in leaves:
                full, shape = ".".join(map(str, (name, *path))), tuple(space.shape or ())
                part = lambda answer, path=path: [part_at(action, path) for action in answer.actions]  # noqa: E731
                yield Tensor(full, shape, np.dtype(space.dtype), part)

        self._model = model
        self.required = list(named("obs", model.observations))
        self.optional = [Tensor(f"state_in_{index}", shape) for index, shape in enumerate(shapes)]
        self._prev_actions = list(named("prev_action", model.actions)) if actor.looks_back else []
        if self._prev_actions:
            self.optional += [*self._prev_actions, Tensor("prev_reward", ())]
        size = getattr(getattr(getattr(actor, "policy", actor), "spec", actor), "num_dist_inputs", -1)
        self.outputs = list(named("action", model.actions))
        for name, column in OUTPUTS.items():
            shape = (size,) if name == "dist_inputs" else ()
            self.outputs.append(Tensor(name, shape, of=lambda answer, column=column: answer.columns[column]))  # type: ignore[misc]
        for index, shape in enumerate(shapes):
            self.outputs.append(Tensor(f"state_out_{index}", shape, of=lambda answer, at=index: answer.states[at]))  # type: ignore[misc]
        self._inputs = {tensor.name: tensor for tensor in (*self.required, *self.optional)}
        self._output_names = [tensor.name for tensor in self.outputs]

    def metadata(self) -> dict[str, Any]:
        """Return the model's metadata."""
        return {
            "name": self._model.name,
            "versions": [version.name for version in self._model.arms],
            "platform": "onnxruntime_onnx",
            "inputs": [tensor.described() for tensor in self._inputs.values()],
            "outputs": [tensor.described() for tensor in self.outputs],
        }

    def read(self, body: bytes, header_bytes: str) -> Call:
        """Return a request's content.

        Args:
            body: its body.
            header_bytes: length of the JSON in front of binary data, as the header says it; "" without.

        Raises:
            Refusal: it breaks the protocol, or doesn't fit the model.
        """
        size = len(body)
        if header_bytes:
            size = int(header_bytes) if header_bytes.isdecimal() and len(header_bytes) < 12 else -1
            if not 0 <= size <= len(body):
                raise Refusal(400, f"Inference-Header-Content-Length is {header_bytes:.40}, the body has {len(body)}.")
        said = parse_json(body[:size])
        if not isinstance(said, dict) or not isinstance(said.get("inputs"), list):
            raise Refusal(400, "The body must be an object with 'inputs', a list of tensors.")
        if not isinstance(said.get("id", ""), str) or not isinstance(said.get("parameters", {}), dict):
            raise Refusal(400, "'id' must be a text, and 'parameters' an object.")
        binary, at, arrays = memoryview(body), size, dict[str, Array]()
        for one in said["inputs"]:
            if not isinstance(one, dict) or not isinstance(one.get("name"), str):
                raise Refusal(400, "Each input must be an object with 'name', 'shape', 'datatype' and 'data'.")
            name = one["name"]
            if name not in self._inputs or name in arrays:
                fault = "is there twice" if name in arrays else f"is unknown; there are {', '.join(self._inputs)}"
                raise Refusal(400, f"Input {name!r:.100} {fault}.")
            given = one.get("parameters", {})
            length = given.get("binary_data_size") if isinstance(given, dict) else None
            if length is not None and (type(length) is not int or not 0 <= length <= len(body) - at):
                raise Refusal(400, f"Input {name!r} has binary_data_size {shown(length)}, more than the body has.")
            arrays[name] = _read(self._inputs[name], one, None if length is None else binary[at : at + length])
            at += length or 0
        if at != len(body) and header_bytes:
            raise Refusal(400, f"The body has {len(body) - at} bytes more than its inputs.")
        missing = [tensor.name for tensor in self.required if tensor.name not in arrays]
        rows = {len(array) for array in arrays.values()}
        if missing or len(rows) != 1 or not 1 <= max(rows) <= MAX_ROWS:
            fault = f"Inputs {', '.join(missing)} are missing" if missing else f"Inputs have {sorted(rows)} rows"
            raise Refusal(400, f"{fault}; expected all of one number of rows, from 1 to {MAX_ROWS}.")
        own = self._said(arrays, max(rows))
        return Call(said.get("id"), said.get("parameters") or {}, own, self._wanted(said))

    def _wanted(self, said: Mapping[str, Any]) -> dict[str, bool]:
        """Return the wanted outputs, and whether each is sent in binary form."""
        is_binary = (said.get("parameters") or {}).get("binary_data_output") is True
        outputs, wanted = said.get("outputs") or [], dict[str, bool]()
        for one in outputs if isinstance(outputs, list) else [outputs]:
            name = one.get("name") if isinstance(one, dict) else None
            if name not in self._output_names:
                raise Refusal(400, f"Output {shown(name)} is unknown; there are {', '.join(self._output_names)}.")
            own = one.get("parameters")
            wanted[name] = own.get("binary_data", is_binary) is True if isinstance(own, dict) else is_binary
        return wanted or dict.fromkeys(self._output_names, is_binary)

    def _said(self, arrays: Mapping[str, Array], rows: int) -> dict[str, Any]:
        """Return inputs as the keys of /act."""
        model, said = self._model, dict[str, Any]()
        said["observations"] = _rows(model.observation_space, arrays, self.required)
        if any(name.startswith("state_in_") for name in arrays):
            blank = [np.zeros((rows, *state.shape), np.float32) for state in model.actor.initial_state]
            said["state"] = [arrays.get(f"state_in_{index}", zeros) for index, zeros in enumerate(blank)]
        if self._prev_actions and all(tensor.name in arrays for tensor in self._prev_actions):
            said["prev_action"] = _rows(model.action_space, arrays, self._prev_actions)
        if "prev_reward" in arrays:
            said["prev_reward"] = arrays["prev_reward"].tolist()
        return said

    def response(self, call: Call, answer: Answer) -> Response:
        """Return the response with the wanted outputs."""
        described: list[dict[str, Any]] = []
        binary: list[bytes] = []
        for tensor in self.outputs:
            if (is_binary := call.wanted.get(tensor.name)) is None:
                continue
            array = np.ascontiguousarray(tensor.of(answer), tensor.dtype)
            one = tensor.described() | {"shape": list(array.shape)}
            if is_binary:
                binary.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
                one["parameters"] = {"binary_data_size": len(binary[-1])}
            else:
                one["data"] = (array.astype(np.float32) if array.dtype == np.float16 else array).ravel()
            described.append(one)
        said: dict[str, Any] = {"model_name": self._model.name, "model_version": answer.version}
        if call.id is not None:
            said["id"] = call.id
        if own := {name: call.parameters[name] for name in ("session", "sequence_id") if name in call.parameters}:
            said["parameters"] = own
        said["outputs"] = described
        if not binary:
            return json_response(said)
        head = orjson.dumps(said, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = ((BINARY_HEADER, b"%d" % len(head)),)
        return Response(b"".join([head, *binary]), 200, b"application/octet-stream", headers)


class Call(NamedTuple):
    """Content of a request.

    Attributes:
        id: its id, None if it has none.
        parameters: its parameters.
        said: inputs as the keys of /act.
        wanted: outputs by name, True for binary ones.
    """

    id: str | None
    parameters: Mapping[str, Any]
    said: dict[str, Any]
    wanted: dict[str, bool]


def _rows(space: Any, arrays: Mapping[str, Array], tensors: Sequence[Tensor]) -> list[Any]:
    """Return rows of tensors in the environment's form."""
    given = [arrays[tensor.name] for tensor in tensors]
    columns = [array.tolist() if array.ndim == 1 else array for array in given]
    return [joined(space, iter(row)) for row in zip(*columns, strict=True)]


def _read(tensor: Tensor, one: Mapping[str, Any], binary: memoryview | None) -> Array:
    """Return an input's array.

    Raises:
        Refusal: it does not fit the tensor.
    """
    expected, shape = tensor.described(), one.get("shape")
    if one.get("datatype") != expected["datatype"]:
        given = one.get("datatype")
        raise Refusal(400, f"Input {tensor.name!r} has datatype {shown(given)}, expected {expected['datatype']}.")
    if not is_shape(shape) or not shape or tuple(shape[1:]) != tensor.shape:
        raise Refusal(400, f"Input {tensor.name!r} has shape {shown(shape)}, expected {expected['shape']}.")
    count = math.prod(shape)
    if binary is not None:
        if len(binary) != count * tensor.dtype.itemsize:
            raise Refusal(400, f"Input {tensor.name!r} of shape {shape} has {len(binary)} bytes.")
        return np.frombuffer(binary, tensor.dtype.newbyteorder("<")).astype(tensor.dtype, copy=False).reshape(shape)
    try:
        return held_by(tensor.dtype, one.get("data")).reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        said = f"Input {tensor.name!r} needs data of {count} numbers of {expected['datatype']}: {error!s:.200}"
        raise Refusal(400, f"{said}.") from None
