"""Open Inference Protocol v2: metadata, and tensors of rows in JSON or in Triton's binary form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np
import orjson
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.data.actions import leaves_of, nested
from aiorl.serving.batching import MAX_ROWS, OUTPUTS, Answer
from aiorl.serving.models import Model
from aiorl.serving.values import held_by, is_shape, part_at, unpacked_array
from aiorl.web.app import Refusal, Response, json_response, parse_json

Array = NDArray[Any]

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
        datatype = f"FP{8 * self.dtype.itemsize}" if self.dtype.kind == "f" else self.dtype.name.upper()
        return {"name": self.name, "datatype": datatype, "shape": [-1, *self.shape]}


class Tensors:
    """Tensors of a model.

    Attributes:
        model: the model.
        inputs: inputs by name.
        outputs: outputs by name; those of the action come first, and their names begin with ``action``.
    """

    def __init__(self, model: Model) -> None:
        """Name the tensors of a model."""
        self.model = model
        self.inputs = {tensor.name: tensor for tensor in _parts("obs", model.observation_space)}
        self.outputs = {tensor.name: tensor for tensor in _parts("action", model.action_space)}
        self.outputs |= {name: Tensor(name, (), np.dtype(np.float32)) for name in OUTPUTS}

    def metadata(self) -> dict[str, Any]:
        """Return the model's metadata."""
        return {
            "name": self.model.name,
            "versions": [version.name for version in self.model.arms],
            "platform": "onnxruntime_onnx",
            "inputs": [tensor.described() for tensor in self.inputs.values()],
            "outputs": [tensor.described() for tensor in self.outputs.values()],
        }


class Call:
    """Request to a model.

    Attributes:
        observations: its rows in the environment's form.
        parameters: its parameters.
    """

    def __init__(self, tensors: Tensors, body: bytes, header_bytes: str) -> None:
        """Read a request.

        Args:
            tensors: the model's tensors.
            body: the request's body.
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
        kinds = {"inputs": list, "outputs": list, "parameters": dict, "id": str}
        if not isinstance(said, dict) or not all(
            isinstance(said.get(key, kind()), kind) for key, kind in kinds.items()
        ):
            raise Refusal(400, "The body must be an object with lists 'inputs' and 'outputs', an object 'parameters' "
                          "and a text 'id'; all but 'inputs' can be left out.")  # fmt: skip
        self.parameters, self._tensors, self._id = said.get("parameters", {}), tensors, said.get("id")
        arrays, rest = dict[str, Array](), memoryview(body)[size:]
        for one in said.get("inputs", []):
            tensor, own = _named(one, tensors.inputs)
            arrays[tensor.name], rest = _read(tensor, one, own.get("binary_data_size"), rest)
        if len(rest) and header_bytes:
            raise Refusal(400, f"The body has {len(rest)} bytes more than its inputs.")
        if not len(said.get("inputs", [])) == len(arrays) == len(tensors.inputs):
            raise Refusal(400, f"The inputs are {', '.join(tensors.inputs)}, each of them once.")
        rows = {len(array) for array in arrays.values()}
        if len(rows) != 1 or not 1 <= max(rows) <= MAX_ROWS:
            raise Refusal(400, f"Inputs have {sorted(rows)} rows, expected all of one number from 1 to {MAX_ROWS}.")
        columns = [arrays[name] for name in tensors.inputs]
        self.observations = [nested(tensors.model.observation_space, iter(row)) for row in zip(*columns, strict=True)]
        is_binary = self.parameters.get("binary_data_output", False)
        self._wanted: dict[str, bool] = {}  # by name, True for those in binary form
        for one in said.get("outputs", []):
            tensor, own = _named(one, tensors.outputs)
            self._wanted[tensor.name] = own.get("binary_data", is_binary) is True
        self._wanted = self._wanted or dict.fromkeys(tensors.outputs, is_binary is True)

    def response(self, answer: Answer) -> Response:
        """Return the response with the wanted outputs."""
        outputs: list[dict[str, Any]] = []
        binary: list[bytes] = []
        for name, is_binary in self._wanted.items():
            tensor = self._tensors.outputs[name]
            if name in OUTPUTS:
                found: Any = answer.output(name)
            else:
                found = [part_at(action, tensor.path) for action in answer.actions]
            array = np.ascontiguousarray(found, tensor.dtype)
            one = tensor.described() | {"shape": list(array.shape)}
            if is_binary:
                binary.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
                one["parameters"] = {"binary_data_size": len(binary[-1])}
            else:
                one["data"] = array.ravel()
            outputs.append(one)
        own_id = {} if self._id is None else {"id": self._id}
        said = {"model_name": self._tensors.model.name, "model_version": answer.version, **own_id, "outputs": outputs}
        if not binary:
            return json_response(said)
        head = orjson.dumps(said, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = ((BINARY_HEADER, b"%d" % len(head)),)
        return Response(b"".join([head, *binary]), 200, b"application/octet-stream", headers)


def _parts(name: str, space: spaces.Space[Any]) -> Iterator[Tensor]:
    """Yield a tensor for each array in a space."""
    for path, leaf in leaves_of(space):
        full = ".".join(map(str, (name, *path)))
        yield Tensor(full, tuple(leaf.shape or ()), np.dtype(leaf.dtype), path)


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


def _read(tensor: Tensor, one: Mapping[str, Any], size: Any, rest: memoryview) -> tuple[Array, memoryview]:
    """Return an input's array, and the binary data of the inputs after it.

    Raises:
        Refusal: it does not fit the tensor.
    """
    expected, given, shape = tensor.described(), one.get("datatype"), one.get("shape")
    if given != expected["datatype"] or not is_shape(shape) or not shape or tuple(shape[1:]) != tensor.shape:
        said = f"Input {tensor.name!r} has datatype {shown(given)} and shape {shown(shape)}, expected"
        raise Refusal(400, f"{said} {expected['datatype']} and {expected['shape']}.")
    if size is not None:
        if type(size) is not int or not 0 <= size <= len(rest):
            raise Refusal(400, f"Input {tensor.name!r} has binary_data_size {shown(size)}, more than the body has.")
        return unpacked_array(rest[:size], tensor.dtype, shape, tensor.name), rest[size:]
    try:
        return held_by(tensor.dtype, one.get("data")).reshape(shape), rest
    except (ValueError, TypeError, OverflowError) as error:
        said = f"Input {tensor.name!r} needs data of {math.prod(shape)} numbers of {expected['datatype']}"
        raise Refusal(400, f"{said}: {error!s:.200}.") from None
