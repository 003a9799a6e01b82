"""Open Inference Protocol v2: metadata, and tensors of rows in JSON or in Triton's binary form."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from reprlib import repr as shown
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import leaves_of, nested
from aiorl.serving.batching import MAX_ROWS, OUTPUTS, Answer
from aiorl.serving.values import given_array, is_shape, unpacked_array
from aiorl.web.app import Refusal, Response, json_response, parse_json

Array = NDArray[Any]

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
        datatype = (
            f"FP{8 * self.dtype.itemsize}" if self.dtype.kind == "f" else self.dtype.name.upper()
        )
        return {"name": self.name, "datatype": datatype, "shape": [-1, *self.shape]}


def tensors_of(name: str, space: spaces.Space[Any]) -> dict[str, Tensor]:
    """Return a tensor for each array in a space, by their names."""
    found: dict[str, Tensor] = {}
    for path, leaf in leaves_of(space):
        full = ".".join(map(str, (name, *path)))
        found[full] = Tensor(full, tuple(leaf.shape or ()), np.dtype(leaf.dtype), path)
    return found


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
        said = parse_json(body[:size])
        if not isinstance(said, dict) or any(
            type(said.get(key, kind())) is not kind for key, kind in _KINDS.items()
        ):
            raise Refusal(
                400,
                "The body must be an object with lists 'inputs' and 'outputs', an object"
                " 'parameters' and a text 'id'; all but 'inputs' can be left out.",
            )
        self.parameters = said.get("parameters", {})
        self._model = model
        self._id = said.get("id")
        arrays = dict[str, Array]()
        rest = memoryview(body)[size:]
        for one in said.get("inputs", []):
            tensor, own = _named(one, model.inputs)
            arrays[tensor.name], rest = _read(tensor, one, own.get("binary_data_size"), rest)
        if len(rest):
            raise Refusal(400, f"The body has {len(rest)} bytes more than its inputs.")
        if not len(said.get("inputs", [])) == len(arrays) == len(model.inputs):
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
        wanted = said.get("outputs") or [{"name": name} for name in model.outputs]
        is_binary = self.parameters.get("binary_data_output", False)
        asked = (_named(one, model.outputs) for one in wanted)
        self._is_binary = {
            tensor.name: own.get("binary_data", is_binary) is True for tensor, own in asked
        }

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
            one = tensor.described() | {"shape": list(array.shape)}
            if is_binary:
                binary.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
                one["parameters"] = {"binary_data_size": len(binary[-1])}
            else:
                one["data"] = array.ravel()
            outputs.append(one)
        said = {"model_name": self._model.name, "model_version": answer.version, "outputs": outputs}
        found = json_response(said if self._id is None else {**said, "id": self._id})
        if not binary:
            return found
        headers = ((BINARY_HEADER, b"%d" % len(found.body)),)
        return Response(b"".join([found.body, *binary]), 200, b"application/octet-stream", headers)


def _named(one: Any, known: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the tensor that a part of a request is about, and the part's parameters.

    Raises:
        Refusal: there is no such tensor.
    """
    name = one.get("name") if isinstance(one, dict) else None
    if not isinstance(name, str) or name not in known:
        raise Refusal(400, f"{shown(one)} has no name of a tensor; there are {', '.join(known)}.")
    own = one.get("parameters")
    return known[name], own if isinstance(own, dict) else {}


def _read(
    tensor: Tensor, one: Mapping[str, Any], size: Any, rest: memoryview
) -> tuple[Array, memoryview]:
    """Return an input's array, and the binary data of the inputs after it.

    Raises:
        Refusal: it does not fit the tensor.
    """
    expected = tensor.described()
    given = one.get("datatype")
    shape = one.get("shape")
    if (
        given != expected["datatype"]
        or not is_shape(shape)
        or not shape
        or tuple(shape[1:]) != tensor.shape
    ):
        said = (
            f"Input {tensor.name!r} has datatype {shown(given)} and shape {shown(shape)}, expected"
        )
        raise Refusal(400, f"{said} {expected['datatype']} and {expected['shape']}.")
    if size is not None:
        if type(size) is not int or not 0 <= size <= len(rest):
            raise Refusal(
                400,
                f"Input {tensor.name!r} has binary_data_size {shown(size)}, more than the body"
                " has.",
            )
        return unpacked_array(rest[:size], tensor.dtype, shape, tensor.name), rest[size:]
    array = given_array(
        one.get("data"), tensor.dtype, f"Input {tensor.name!r} of {expected['datatype']}"
    )
    if array.size != math.prod(shape):
        raise Refusal(
            400, f"Input {tensor.name!r} of shape {shape} needs {math.prod(shape)} numbers."
        )
    return array.reshape(shape), rest
