"""Acting graphs and their descriptions: refused with a PolicyError, or written anew as `onnx` reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgpack
from graph_oracle import check_against_onnx, make_small_graph

from aiorl.acting.acting_graph import ActingSpec, ArraySpec
from aiorl.acting.onnx_wire import read_model
from aiorl.errors import PolicyError
from fuzz_targets.source import Source

EXPORTED = Path(__file__).parents[2] / "acting" / "graphs"
SPEC = ActingSpec(
    (4,), "float32", ((2,),), 2, "Categorical", {"type": "Discrete", "n": 2, "start": 0},
    (ArraySpec("w", (2, 3), "float32"), ArraySpec("b", (), "int64")), ArraySpec("prev_actions", (2,), "int64"),
).to_dict()  # fmt: skip


def seeds() -> Iterable[bytes]:
    yield b"\0" + make_small_graph()
    for name in ("mlp", "layer_cond", "layer_while"):
        yield b"\0" + (EXPORTED / f"{name}.onnx").read_bytes()
    yield b"\1" + msgpack.packb(SPEC)
    for number in range(len(SPEC)):
        yield bytes([2, number, 2, 3, number, 8, 1, 2, 3])


def run(data: bytes) -> None:
    source = Source(data)
    match source.below(3):
        case 0:
            graph = source.rest()
            weights = _weights(graph)
            if weights is not None:
                check_against_onnx(graph, weights)
        case 1:
            try:
                description = msgpack.unpackb(source.rest())
            except Exception:  # whatever msgpack raises
                return
            if isinstance(description, dict):
                _check_spec(description)
        case _:
            spec = dict(SPEC)
            names = [*spec, "more"]
            while not source.is_empty:
                spec[source.choice(names)] = source.plain()
            _check_spec(spec)


def _weights(graph: bytes) -> dict[str, tuple[tuple[int, ...], str]] | None:
    """The weights that the graph itself names, so that it is not refused for them; None where it can't be read."""
    try:
        tensors = read_model(graph).get("graph", {}).get("initializer", [])
    except PolicyError:
        return None
    return {
        tensor.get("name", ""): (tuple(tensor.get("dims", [])), "float32" if tensor.get("data_type") == 1 else "int64")
        for tensor in tensors
        if tensor.get("data_location")
    }


def _check_spec(description: Any) -> None:
    try:
        spec = ActingSpec.from_dict(description)
    except PolicyError:
        return
    again = ActingSpec.from_dict(spec.to_dict())
    with contextlib.suppress(RecursionError):  # two spaces nested deeper than can be compared
        assert again == spec
