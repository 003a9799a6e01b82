"""Validation of ONNX graphs that came over a socket, and their canonical form for ONNX Runtime.

A graph can name files to read tensors from ("external data"; one special name even means an address in memory), and
operators can do anything. So the bytes received are never loaded: they are read strictly (`aiorl.acting.onnx_wire`),
what is understood and allowed is written anew, and only that is loaded. Ours takes external data only as a placeholder
for weights, which are always handed over by name; its place is written here, whatever was received.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aiorl.acting.onnx_wire import Message, read_model, write_model
from aiorl.errors import PolicyError

__all__ = ["DTYPES", "MAX_GRAPH_BYTES", "WEIGHTS_LOCATION", "to_canonical_graph"]

MAX_GRAPH_BYTES = 16 * 1024 * 1024
WEIGHTS_LOCATION = "weights"
"""Location that the external data of a weight names; no such file is ever opened."""

Weights = Mapping[str, tuple[tuple[int, ...], str]]

_IR_VERSIONS = range(4, 14)  # from 4 on, initialisers need not be inputs
_OPSETS = range(11, 23)
_STANDARD_DOMAINS = ("", "ai.onnx")
_MAX_DIMS = 32
_EXTERNAL = 1

# operators of the ONNX standard that turn tensors into tensors; left out are those of strings, sequences, images,
# optional values and training, and what is deprecated
_OPERATORS = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Bernoulli BitShift
BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu CenterCropPad Clip Compress Concat Constant
ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Det Div Dropout
DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu
Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid
HardSwish Hardmax Identity If InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less
LessOrEqual Log LogSoftmax Loop LpNormalization LpPool MatMul MatMulInteger Max MaxPool Mean
MeanVarianceNormalization Min Mish Mod Mul Multinomial Neg NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow
QLinearConv QLinearMatMul QuantizeLinear RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range
Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
ReduceSumSquare Relu Reshape Resize ReverseSequence Round Scan ScatterElements ScatterND Selu Shape Shrink Sigmoid
Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh ThresholdedRelu
Tile TopK Transpose Trilu Unique Unsqueeze Where Xor
"""
_ALLOWED = frozenset(_OPERATORS.split())
_WITH_GRAPHS = frozenset(["If", "Loop", "Scan"])

DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
}
"""ONNX's numbers of dtypes."""
_DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data")
_FIXED_DATA = {"float_data": "float32", "double_data": "float64"}
_INT_DATA = {"int32_data": ("int8", "uint8", "int16", "uint16", "int32", "bool"), "int64_data": ("int64",)}

# type numbers of an attribute, and the field that holds its value
_ATTRIBUTES = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings"}
_LISTS = ("floats", "ints", "strings")


def to_canonical_graph(graph: bytes, weights: Weights, *, weights_as_inputs: bool = False) -> bytes:
    """The graph as ONNX Runtime may have it: everything that was understood and is allowed, written anew.

    Args:
        graph: a serialised ONNX ModelProto.
        weights: shape and dtype by name.
        weights_as_inputs: they are inputs of each run, and not of the session.

    Returns: a serialised ModelProto that computes the same.
    Raises: PolicyError if the graph is too large, damaged or not as `onnx` writes it; holds external data that is no
        weight; lacks a weight or holds one twice, or with another shape or dtype; uses operators other than the ONNX
        standard's on tensors, or functions, sparse tensors or training graphs.
    """
    if len(graph) > MAX_GRAPH_BYTES:
        raise PolicyError(f"the acting graph has {len(graph)} bytes; at most {MAX_GRAPH_BYTES} are accepted")
    model = read_model(graph)
    if "graph" not in model:
        raise PolicyError("the acting graph holds no graph")
    missing = dict(weights)
    written = _graph(model["graph"], missing)
    canonical = {
        "ir_version": _in_range(model.get("ir_version", 0), _IR_VERSIONS, "IR version"),
        "graph": _with_inputs(written, weights) if weights_as_inputs else written,
        "opset_import": [{"domain": "", "version": _opset(model.get("opset_import", []))}],
    }
    if missing:
        raise PolicyError(f"the acting graph has no place for the weight {next(iter(missing))!r}")
    return write_model(canonical)


def _opset(imports: list[Message]) -> int:
    """The version of the standard's operators; imports of other domains are nothing without their operators."""
    versions = [item.get("version", 0) for item in imports if item.get("domain", "") in _STANDARD_DOMAINS]
    if len(versions) != 1:
        raise PolicyError(f"the acting graph names {len(versions)} versions of ONNX's operators, not one")
    return _in_range(versions[0], _OPSETS, "operators' version")


def _in_range(number: int, allowed: range, what: str) -> int:
    if number not in allowed:
        raise PolicyError(f"the acting graph's {what} is {number}; {allowed[0]} to {allowed[-1]} are accepted")
    return number


def _graph(graph: Message, missing: dict[str, tuple[tuple[int, ...], str]]) -> Message:
    """The graph written anew; takes the weights it holds out of `missing`."""
    inputs = [_value_info(item) for item in graph.get("input", [])]
    names = {item["name"] for item in inputs}
    initializers = []
    for tensor in graph.get("initializer", []):
        name = _name(tensor)
        if name in names:
            raise PolicyError(f"the acting graph holds {name[:80]!r} twice")
        names.add(name)
        if "external_data" in tensor or tensor.get("data_location", 0):
            initializers.append(_weight(tensor, missing))
        else:
            initializers.append({"name": name} | _tensor(tensor))
    return {
        "node": [_node(node) for node in graph.get("node", [])],
        "name": graph.get("name", ""),
        "initializer": initializers,
        "input": inputs,
        "output": [_value_info(item) for item in graph.get("output", [])],
    }


def _with_inputs(graph: Message, weights: Weights) -> Message:
    """The canonical graph with its weights among the inputs."""
    kept = [tensor for tensor in graph["initializer"] if tensor["name"] not in weights]
    inputs = [
        {
            "name": tensor["name"],
            "type": {
                "tensor_type": {
                    "elem_type": tensor["data_type"],
                    "shape": {"dim": [{"dim_value": size} for size in tensor["dims"]]},
                }
            },
        }
        for tensor in graph["initializer"]
        if tensor["name"] in weights
    ]
    return graph | {"initializer": kept, "input": [*graph["input"], *inputs]}


def _value_info(item: Message) -> Message:
    info: Message = {"name": _name(item)}
    type_ = item.get("type", {}).get("tensor_type")
    if type_ is None:
        return info
    tensor: Message = {"elem_type": _dtype_number(type_.get("elem_type", 0))}
    if "shape" in type_:
        tensor["shape"] = {"dim": [_dimension(dim) for dim in type_["shape"].get("dim", [])]}
    return info | {"type": {"tensor_type": tensor}}


def _dimension(dim: Message) -> Message:
    size: Message = {key: dim[key] for key in ("dim_value", "dim_param") if key in dim}
    if len(size) > 1 or size.get("dim_value", 0) < 0:
        raise PolicyError(f"the acting graph is damaged: a size of {size!r:.80}")
    return size


def _node(node: Message) -> Message:
    operator, domain = node.get("op_type", ""), node.get("domain", "")
    if domain not in _STANDARD_DOMAINS or operator not in _ALLOWED:
        raise PolicyError(
            f"the acting graph uses the operator {operator[:80]!r} of {domain[:80]!r}; only the ONNX standard's on "
            "tensors are accepted"
        )
    attributes = [_attribute(item, operator) for item in node.get("attribute", [])]
    if len({attribute["name"] for attribute in attributes}) != len(attributes):
        raise PolicyError(f"the acting graph gives an attribute of {operator} twice")
    return {
        "input": node.get("input", []),
        "output": node.get("output", []),
        "name": node.get("name", ""),
        "op_type": operator,
        "attribute": attributes,
    }


def _attribute(attribute: Message, operator: str) -> Message:
    name, number = _name(attribute), attribute.get("type", 0)
    field = _ATTRIBUTES.get(number)
    if field is None or attribute.keys() - {"name", "type", field}:
        raise PolicyError(
            f"the acting graph's attribute {name[:80]!r} of {operator} has type {number} and holds "
            f"{sorted(attribute.keys() - {'name', 'type'})}"
        )
    value = attribute.get(field, [] if field in _LISTS else None)
    if value is None:
        raise PolicyError(f"the acting graph's attribute {name[:80]!r} of {operator} has no value")
    if field == "t":
        value = _tensor(value)
    elif field == "g":
        if operator not in _WITH_GRAPHS:
            raise PolicyError(f"the acting graph holds a graph in {operator}, which takes none")
        # with no weights: ONNX Runtime replaces those of the outermost graph alone, and would open files for others
        value = _graph(value, {})
    return {"name": name, "type": number, field: value}


def _tensor(tensor: Message) -> Message:
    """A tensor that holds its data, without its name; the data as raw bytes, whatever field it was in."""
    if "external_data" in tensor or tensor.get("data_location", 0):
        raise _foreign(tensor)
    shape, number = _shape(tensor), _dtype_number(tensor.get("data_type", 0))
    dtype = np.dtype(DTYPES[number])
    given = [field for field in _DATA_FIELDS if tensor.get(field)]
    data = _raw(given[0], tensor[given[0]], dtype) if len(given) == 1 else b""
    if (
        len(given) > 1
        or len(data) != math.prod(shape) * dtype.itemsize
        or (dtype.kind == "b" and max(data, default=0) > 1)
    ):
        raise PolicyError(
            f"the acting graph is damaged: a tensor {dtype} {list(shape)} of {len(data)} bytes in {given}"
        )
    return {"dims": list(shape), "data_type": number, "raw_data": data}


def _raw(field: str, data: bytes | list[int], dtype: np.dtype[np.generic]) -> bytes:
    """Return the field as little-endian bytes of the dtype; empty if the field is not one of that dtype."""
    if isinstance(data, bytes):
        return data if _FIXED_DATA.get(field, dtype) == dtype else b""
    if dtype == np.float16:
        # as the bits of each
        dtype = np.dtype(np.uint16)
    if dtype not in map(np.dtype, _INT_DATA[field]):
        return b""
    numbers: NDArray[np.int64] = np.array(data, np.int64)
    converted = numbers.astype(dtype)
    return converted.tobytes() if np.array_equal(converted, numbers) else b""


def _weight(tensor: Message, missing: dict[str, tuple[tuple[int, ...], str]]) -> Message:
    """The placeholder of a weight, which is taken out of `missing`."""
    name = _name(tensor)
    entries = [(item.get("key"), item.get("value")) for item in tensor.get("external_data", [])]
    keys = {key for key, _ in entries}
    if (
        name not in missing
        or tensor.get("data_location", 0) != _EXTERNAL
        or ("location", WEIGHTS_LOCATION) not in entries
        or len(keys) != len(entries)
        or keys - {"location", "offset", "length"}
        or any(field in tensor for field in _DATA_FIELDS)
    ):
        raise _foreign(tensor)
    shape, number = _shape(tensor), _dtype_number(tensor.get("data_type", 0))
    expected = missing.pop(name)
    if (shape, DTYPES[number]) != expected:
        raise PolicyError(
            f"weight {name[:80]!r}: the acting graph has {(shape, DTYPES[number])}, its description {expected}"
        )
    length = math.prod(shape) * np.dtype(DTYPES[number]).itemsize
    place = {"location": WEIGHTS_LOCATION, "offset": "0", "length": str(length)}
    return {
        "dims": list(shape),
        "data_type": number,
        "name": name,
        "external_data": [{"key": key, "value": value} for key, value in place.items()],
        "data_location": _EXTERNAL,
    }


def _foreign(tensor: Message) -> PolicyError:
    entries = [[*item.values()] for item in tensor.get("external_data", [])]
    return PolicyError(
        f"the acting graph takes {tensor.get('name', '')[:80]!r} from outside, by {entries!r:.120}; only weights "
        "handed over by name may come from there"
    )


def _shape(tensor: Message) -> tuple[int, ...]:
    shape = tuple(tensor.get("dims", []))
    if len(shape) > _MAX_DIMS or any(size < 0 for size in shape):
        raise PolicyError(f"the acting graph is damaged: a tensor of shape {shape!r:.80}")
    return shape


def _dtype_number(number: int) -> int:
    if number not in DTYPES:
        raise PolicyError(f"the acting graph has tensors of ONNX's type {number}; accepted are {sorted(DTYPES)}")
    return number


def _name(item: Message) -> str:
    name = item.get("name", "")
    if not isinstance(name, str) or not name:
        raise PolicyError("the acting graph is damaged: something in it has no name")
    return name
