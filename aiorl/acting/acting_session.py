"""Some weights of an acting graph in a session of ONNX Runtime, and the memory that its runs work on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["OBS_INPUT", "ActingSession"]

F32 = NDArray[np.float32]

OBS_INPUT = "obs"
_BIND_AT = 5
"""Runs of as many rows after which memory is bound for them."""
_MAX_BOUND_BYTES = 1 << 16
"""Inputs of bound runs together; the network takes long beside a copy of larger ones anyway."""


class ActingSession:
    """Runs an ONNX Runtime session with its own weights, or with some that it is given as inputs.

    Runs of as many rows as some before go by memory that is bound once: for small networks, naming and wrapping what
    goes in and out takes as long as the network itself. Binding takes as long as some runs.

    Attributes:
        weights: by name.
    """

    __slots__ = ("_bound", "_given", "_output_names", "_room", "_runs", "_session", "_values", "weights")

    def __init__(
        self,
        session: Any,
        output_names: Sequence[str],
        weights: dict[str, NDArray[Any]],
        *,
        values: object = None,
        given: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Nothing is bound yet.

        Args:
            session: ONNX Runtime's.
            output_names: distribution inputs, values and states.
            weights: by name; kept, as the session works on this memory.
            values: kept along with the session, which works on their memory and doesn't keep them alive.
            given: weights that are inputs of each run, by their names in the graph.
        """
        self._session = session
        self._output_names = output_names
        self._values = values
        self._given = given or {}
        self.weights = weights
        self._runs: Counter[int] = Counter()  # not bound, by the number of rows
        self._bound: dict[int, _Bound] = {}  # those that no thread uses now
        self._room = _MAX_BOUND_BYTES

    def run(self, feed: Mapping[str, NDArray[Any]], out: tuple[F32, F32] | None) -> tuple[F32, F32, list[F32]]:
        """Outputs for inputs of the right shapes and dtypes; see `ActingGraph.run`."""
        obs = feed[OBS_INPUT]
        rows = len(obs)
        bound = self._bound.pop(rows, None)
        if bound is None:
            return self._run_unbound(rows, feed, out)
        bound.obs[...] = obs
        for name, place in bound.others:
            place[...] = feed[name]
        self._session.run_with_iobinding(bound.binding)
        if out is None:
            out = bound.dist_inputs.copy(), bound.values.copy()
        else:
            out[0][...], out[1][...] = bound.dist_inputs, bound.values
        states = [*map(np.copy, bound.states)]
        self._bound[rows] = bound
        return out[0], out[1], states

    def _run_unbound(
        self, rows: int, feed: Mapping[str, NDArray[Any]], out: tuple[F32, F32] | None
    ) -> tuple[F32, F32, list[F32]]:
        made = self._session.run(self._output_names, {**self._given, **feed}, None)
        dist_inputs, values, *states = made
        self._runs[rows] += 1
        size = sum(array.nbytes for array in feed.values())
        if self._runs[rows] == _BIND_AT and 0 < size <= self._room:
            self._room -= size
            self._bound[rows] = self._bind(feed, dict(zip(self._output_names, made, strict=True)))
        if out is None:
            return dist_inputs, values, states
        out[0][...], out[1][...] = dist_inputs, values
        return out[0], out[1], states

    def _bind(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> _Bound:
        """Bind memory for as many rows as there are in these inputs and outputs."""
        binding = self._session.io_binding()
        read = {name: np.empty(array.shape, array.dtype) for name, array in inputs.items()}
        written = {name: np.empty(array.shape, array.dtype) for name, array in outputs.items()}
        for name, array in {**self._given, **read}.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in written.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        dist_inputs, values, *states = written.values()
        return _Bound(binding, read.pop(OBS_INPUT), tuple(read.items()), dist_inputs, values, states)


class _Bound(NamedTuple):
    """Memory that a session reads and writes by itself, for some number of rows."""

    binding: Any
    obs: NDArray[Any]
    others: Sequence[tuple[str, NDArray[Any]]]
    dist_inputs: F32
    values: F32
    states: Sequence[F32]
