"""Open Inference Protocol v2: metadata, and tensors of rows in JSON or in Triton's binary form."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces

from aiorl.data.actions import leaves_of, nested
from aiorl.data.columns import Array
from aiorl.serving.batching import MAX_ROWS, OUTPUTS, Answer
from aiorl.serving.values import is_shape, parse_array, unpack_array
from aiorl.web.app import Refusal, Response, json_response, parse_json

_KINDS: dict[str, type[Any]] = {"inputs": list, "outputs": list, "parameters": dict, "id": str}
BINARY_HEADER = b"inference-header-content-length"


class Tensor(NamedTuple):
    """Input or output of a model.

    Attributes:
        name: its name.
        shape: shape of one row.
        dtype: its dtype.
        path: place of its array in an observation or action.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: tuple[str | int, ...] = ()

    def described(self) -> dict[str, Any]:
        """Return the description that clients get; -1 is the number of rows."""
        datatype = self.dtype.name.upper()
        if self.dtype.kind == "f":
            datatype = f"FP{8 * self.dtype.itemsize}"
        return {"name": self.name, "datatype": datatype, "shape": [-1, *self.shape]}


def tensors_of(name: str, space: spaces.Space[Any]) -> dict[str, Tensor]:
    """Return a tensor for each array in a space, by their names."""
    tensors: dict[str, Tensor] = {}
    for path, leaf in leaves_of(space):
        full_name = ".".join(map(str, (name, *path)))
        tensors[full_name] = Tensor(full_name, tuple(leaf.shape or ()), np.dtype(leaf.dtype), path)
    return tensors


class TensorModel(Protocol):
    """Model that answers to tensors.

    Attributes:
        name: its name.
        observation_space: space of its observations, as the environment gives them.
        inputs: arrays of an observation, by their names as tensors.
        outputs: arrays of an action, and further outputs.
    """

    name: str
    observation_space: spaces.Space[Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Call:
    """Request to a model.

    Attributes:
        observations: its rows in the environment's form.
        parameters: its parameters.
    """

    def __init__(self, model: TensorModel, body: bytes, header_bytes: str) -> None:
        """Read a request.

        Args:
            model: the model.
            body: the request's body.
            header_bytes: length of the JSON in front of binary data, as the header says it; ""
                without.

        Raises:
            Refusal: it breaks the protocol, or doesn't fit the model.
        """
        digits = header_bytes or str(len(body))
        size = int(digits) if digits.isdecimal() and len(digits) < 12 else -1
        if not 0 <= size <= len(body):
            raise Refusal(
                400, f"Inference-Header-Content-Length is {digits:.40}, the body has {len(body)}."
            )
        fields = parse_json(body[:size])
        if not isinstance(fields, dict) or any(
            type(fields.get(key, kind())) is not kind for key, kind in _KINDS.items()
        ):
            raise Refusal(
                400,
                "The body must be an object with lists 'inputs' and 'outputs', an object"
                " 'parameters' and a text 'id'; all but 'inputs' can be left out.",
            )
        self.parameters = fields.get("parameters", {})
        self._model = model
        self._id = fields.get("id")
        inputs = fields.get("inputs", [])
        arrays = dict[str, Array]()
        rest = memoryview(body)[size:]
        # no more are read: a body can have many that are alike
        for part in inputs[: len(model.inputs)]:
            tensor, parameters = _tensor_of(part, model.inputs)
            num_bytes = parameters.get("binary_data_size")
            arrays[tensor.name], rest = read_input(tensor, part, num_bytes, rest)
        if len(rest) and len(inputs) <= len(model.inputs):
            raise Refusal(400, f"The body has {len(rest)} bytes more than its inputs.")
        if not len(inputs) == len(arrays) == len(model.inputs):
            raise Refusal(400, f"The inputs are {', '.join(model.inputs)}, each of them once.")
        rows = {len(array) for array in arrays.values()}
        if len(rows) != 1 or not 1 <= max(rows) <= MAX_ROWS:
            raise Refusal(
                400,
                f"Inputs have {sorted(rows)} rows, expected all of one number from 1 to"
                f" {MAX_ROWS}.",
            )
        columns = [arrays[name] for name in model.inputs]
        self.observations = [
            nested(model.observation_space, iter(row)) for row in zip(*columns, strict=True)
        ]
        default = self.parameters.get("binary_data_output", False)
        self._is_binary: dict[str, bool] = {}  # by the names of the outputs of the answer
        for part in fields.get("outputs") or [{"name": name} for name in model.outputs]:
            tensor, parameters = _tensor_of(part, model.outputs)
            self._is_binary[tensor.name] = parameters.get("binary_data", default) is True

    def response(self, answer: Answer) -> Response:
        """Return the response with the wanted outputs."""
        outputs: list[dict[str, Any]] = []
        binary: list[bytes] = []
        for name, is_binary in self._is_binary.items():
            tensor = self._model.outputs[name]
            if name in OUTPUTS:
                rows: Any = answer.output(name)
            else:
                rows = [
                    functools.reduce(operator.getitem, tensor.path, action)
                    for action in answer.actions
                ]
            array = np.ascontiguousarray(rows, tensor.dtype)
            output = tensor.described() | {"shape": list(array.shape)}
            if is_binary:
                binary.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
                output["parameters"] = {"binary_data_size": len(binary[-1])}
            else:
                output["data"] = array.ravel()
            outputs.append(output)
        fields = {
            "model_name": self._model.name,
            "model_version": answer.version,
            "outputs": outputs,
        }
        if self._id is not None:
            fields["id"] = self._id
        response = json_response(fields)
        if not binary:
            return response
        return Response(
            b"".join([response.body, *binary]),
            content_type=b"application/octet-stream",
            headers=((BINARY_HEADER, b"%d" % len(response.body)),),
        )


def _tensor_of(part: Any, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the tensor that a part of a request is about, and the part's parameters.

    Raises:
        Refusal: there is no such tensor.
    """
    name = part.get("name") if isinstance(part, dict) else None
    if not isinstance(name, str) or name not in tensors:
        raise Refusal(
            400,
            f"{short_repr(part)} has no name of a tensor; there are {', '.join(tensors)}.",
        )
    parameters = part.get("parameters")
    return tensors[name], parameters if isinstance(parameters, dict) else {}


def read_input(
    tensor: Tensor, part: Mapping[str, Any], num_bytes: Any, rest: memoryview
) -> tuple[Array, memoryview]:
    """Return an input's array, and the binary data of the inputs after it.

    Raises:
        Refusal: it does not fit the tensor.
    """
    expected = tensor.described()
    datatype = part.get("datatype")
    shape = part.get("shape")
    if (
        datatype != expected["datatype"]
        or not is_shape(shape)
        or not shape
        or tuple(shape[1:]) != tensor.shape
    ):
        raise Refusal(
            400,
            f"Input {tensor.name!r} has datatype {short_repr(datatype)} and shape"
            f" {short_repr(shape)}, expected {expected['datatype']} and {expected['shape']}.",
        )
    if num_bytes is not None:
        if type(num_bytes) is not int or not 0 <= num_bytes <= len(rest):
            raise Refusal(
                400,
                f"Input {tensor.name!r} has binary_data_size {short_repr(num_bytes)}, more than the"
                " body has.",
            )
        array = unpack_array(rest[:num_bytes], tensor.dtype, shape, tensor.name)
        return array, rest[num_bytes:]
    array = parse_array(
        part.get("data"), tensor.dtype, f"Input {tensor.name!r} of {expected['datatype']}"
    )
    if array.size != math.prod(shape):
        raise Refusal(
            400, f"Input {tensor.name!r} of shape {shape} needs {math.prod(shape)} numbers."
        )
    return array.reshape(shape), rest
