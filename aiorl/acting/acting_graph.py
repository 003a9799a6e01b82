"""The acting graph: an ONNX network that a worker runs, with weights replaced by name.

The learner exports the graph once and describes it by an `ActingSpec`. A worker gets both in the
handshake, and weights with each snapshot. The graph's inputs are ``obs``, ``state_in_i`` and, for a
network that looks back, ``prev_actions`` and ``prev_rewards``. Its outputs are ``dist_inputs`` [N,
P], ``vf`` [N] and ``state_out_i``. With state-dependent noise, ``dist_inputs`` is wider: the
features' shares follow the inputs of the distribution
(`aiorl.acting.distributions.DiagGaussian.num_outputs`). The first axis of each is N, any number of
rows.

Weights are external initialisers. ONNX Runtime reads them when it builds a session, which takes a
millisecond or more. A running session is therefore never changed, and new weights take effect all
together. Weights of small dense networks, and of larger ones that get new weights often, are inputs
instead: one session serves all of their weights.

A worker trusts its learner, but a graph can also come in a stranger's checkpoint. An ONNX graph
can't run code, and it reads a file only through an entry with the key ``location``. Every graph is
therefore loaded with that word altered. Its nodes are counted first, and a graph with loops has to
return once within a time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from reprlib import repr as show
from typing import Annotated, Any, NamedTuple

import numpy as np
import onnxruntime as ort
from gymnasium import spaces
from pydantic import Field
from pydantic.dataclasses import dataclass

from aiorl.acting.graph_limits import has_loops
from aiorl.data.columns import F32, Array, Columns
from aiorl.data.spaces import MAX_SPACE_ELEMENTS, space_from_dict
from aiorl.errors import PolicyError
from aiorl.process.machine import let_children_end

Outputs = tuple[F32, F32, list[F32]]
"""Inputs of the distribution [N, P] or wider, values [N], and the recurrent state after the step."""

OBS_INPUT = "obs"
_BIND_AT = 5
"""Number of runs with the same number of rows after which memory is bound for them."""
_MAX_BOUND_BYTES = 1 << 16
"""Limit of the inputs of all bound runs; with larger ones, the network takes much longer than a
copy anyway."""


class ActingSession:
    """An ONNX Runtime session with its own weights, or with weights passed as inputs.

    After several runs with the same number of rows, further ones use memory that is bound once. For
    small networks, naming and wrapping the inputs and outputs takes as long as the network itself.
    Binding takes as long as a few runs.

    Attributes:
        weights: weights by name.
    """

    __slots__ = (
        "_bindings",
        "_bytes_left",
        "_output_names",
        "_runs",
        "_session",
        "_values",
        "_weight_inputs",
        "weights",
    )

    def __init__(
        self,
        session: Any,
        output_names: Sequence[str],
        weights: dict[str, Array],
        *,
        values: object = None,
        weight_inputs: Columns | None = None,
    ) -> None:
        """Wrap a session; no memory is bound yet.

        Args:
            session: ONNX Runtime's session.
            output_names: names of distribution inputs, values and states.
            weights: weights by name; kept, because the session uses their memory.
            values: kept along with the session, which uses their memory without keeping them alive.
            weight_inputs: weights that are inputs of each run, by their names in the graph.
        """
        self._session = session
        self._output_names = output_names
        self._values = values
        self._weight_inputs = weight_inputs or {}
        self.weights = weights
        self._runs: Counter[int] = Counter()  # unbound runs by number of rows
        self._bindings: dict[int, _Binding] = {}  # by number of rows; those that no thread is using
        self._bytes_left = _MAX_BOUND_BYTES  # that inputs of further bindings can have

    def run(self, feed: Columns, out: tuple[F32, F32] | None) -> Outputs:
        """Return outputs for inputs of the right shapes and dtypes; see `ActingGraph.run`."""
        obs = feed[OBS_INPUT]
        rows = len(obs)
        # taken out while in use, so that another thread cannot write into the same memory
        binding = self._bindings.pop(rows, None)
        if binding is None:
            return self._run_unbound(rows, feed, out)
        binding.obs[...] = obs
        for name, memory in binding.further_inputs:
            memory[...] = feed[name]
        self._session.run_with_iobinding(binding.handle)
        if out is None:
            out = binding.dist_inputs.copy(), binding.values.copy()
        else:
            out[0][...] = binding.dist_inputs
            out[1][...] = binding.values
        states = [*map(np.copy, binding.states)]
        self._bindings[rows] = binding
        return out[0], out[1], states

    def _run_unbound(self, rows: int, feed: Columns, out: tuple[F32, F32] | None) -> Outputs:
        outputs = self._session.run(self._output_names, {**self._weight_inputs, **feed}, None)
        dist_inputs, values, *states = outputs
        self._runs[rows] += 1
        num_bytes = sum(array.nbytes for array in feed.values())
        if self._runs[rows] == _BIND_AT and 0 < num_bytes <= self._bytes_left:
            self._bytes_left -= num_bytes
            self._bindings[rows] = self._bind(feed, outputs)
        if out is None:
            return dist_inputs, values, states
        out[0][...] = dist_inputs
        out[1][...] = values
        return out[0], out[1], states

    def take_over(self, before: ActingSession) -> None:
        """Take over the memory that another session of the same network, with weights as inputs,
        has bound.

        Args:
            before: the other session; a thread that is running in it keeps the memory in use.
        """
        with contextlib.suppress(KeyError):  # it is empty
            while True:
                rows, binding = before._bindings.popitem()
                _bind_inputs(binding.handle, self._weight_inputs)
                self._bytes_left -= binding.num_input_bytes
                self._bindings[rows] = binding

    def _bind(self, inputs: Columns, outputs: Sequence[Array]) -> _Binding:
        """Bind memory for the number of rows in these inputs and outputs."""
        handle = self._session.io_binding()
        # in C order, whatever the order of the arrays: ONNX Runtime gets only their addresses
        read = {name: np.empty(array.shape, array.dtype) for name, array in inputs.items()}
        written = [np.empty(array.shape, array.dtype) for array in outputs]
        _bind_inputs(handle, {**self._weight_inputs, **read})
        for name, array in zip(self._output_names, written, strict=True):
            handle.bind_output(
                name,
                device_type="cpu",
                device_id=0,
                element_type=array.dtype,
                shape=array.shape,
                buffer_ptr=array.ctypes.data,
            )
        dist_inputs, values, *states = written
        return _Binding(
            handle=handle,
            obs=read.pop(OBS_INPUT),
            further_inputs=tuple(read.items()),
            dist_inputs=dist_inputs,
            values=values,
            states=states,
        )


def _bind_inputs(handle: Any, arrays: Columns) -> None:
    for name, array in arrays.items():
        handle.bind_input(
            name,
            device_type="cpu",
            device_id=0,
            element_type=array.dtype,
            shape=array.shape,
            buffer_ptr=array.ctypes.data,
        )


class _Binding(NamedTuple):
    """Memory that a session reads and writes directly, for one number of rows."""

    handle: Any
    obs: Array
    further_inputs: Sequence[tuple[str, Array]]
    dist_inputs: F32
    values: F32
    states: Sequence[F32]

    @property
    def num_input_bytes(self) -> int:
        """Bytes of the inputs besides weights."""
        return self.obs.nbytes + sum(memory.nbytes for _, memory in self.further_inputs)


# child processes of a process that has loaded ONNX Runtime would not end otherwise
let_children_end()


Previous = tuple[Array, Array]
"""Actions [N, ...] in column form and rewards [N] of the previous step."""

PREV_ACTIONS_INPUT = "prev_actions"
PREV_REWARDS_INPUT = "prev_rewards"
NOISE_INPUT = "noise"
DIST_INPUTS_OUTPUT = "dist_inputs"
VF_OUTPUT = "vf"
WEIGHTS_LOCATION = "weights"
"""File name in the external data of weights in an exported graph; the file is never opened."""
MAX_WEIGHT_BYTES = 4 << 30
"""Limit of the bytes of all weights of one policy."""

_Size = Annotated[int, Field(strict=True, ge=0, le=1 << 30)]
_Shape = Annotated[tuple[_Size, ...], Field(max_length=8)]
_Name = Annotated[str, Field(min_length=1, max_length=300)]
_MAX_INPUT_BYTES = 1 << 16
"""Limit of all weights of a small network; a session lays out larger ones for fast runs when it is
built."""
_MAX_BRIEF_BYTES = 1 << 20
_BRIEF_RUNS = 64
"""Up to this number of runs per weights, optimising the layout of up to `_MAX_BRIEF_BYTES` does not
pay off. For two towers of 256x256, building a session takes 1.7 ms, and saves 2 us of a run for one
row, 19 us of one for eight."""
_WEIGHT_DTYPES = {
    "float32": 1,
    "uint8": 2,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
}
"""ONNX's numbers of dtypes."""
_PREV_DTYPES = {"float32": 1, "int64": 7}
_LOOPS_WITHIN_S = 20.0
"""Time limit of the first run of a graph with loops, for one row of zeros."""
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Name, shape and dtype of one weight."""

    name: _Name
    shape: _Shape
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of an array of this shape and dtype."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class ActingSpec:
    """Description of an acting graph.

    Attributes:
        obs_shape: shape of one observation for the model.
        obs_dtype: "float32" or "uint8".
        state_shapes: shape of each recurrent state component of one row, float32; empty without
            recurrence.
        num_dist_inputs: P, inputs of the action distribution per row.
        distribution: name of the action distribution (`aiorl.acting.distributions.DISTRIBUTIONS`).
        action_space: the action space as plain data (`aiorl.data.spaces`).
        weights: every weight, in the model's order.
        prev_action: shape and dtype ("float32" or "int64") of the previous action for the network;
            None if it doesn't look back.
        num_features: F, features for state-dependent noise; 0 without.
        noise_size: K, standard normal numbers for noisy layers per row; 0 without.
    """

    obs_shape: _Shape
    obs_dtype: Annotated[str, Field(pattern="^(float32|uint8)$")]
    state_shapes: Annotated[tuple[_Shape, ...], Field(max_length=64)]
    num_dist_inputs: _Size
    distribution: _Name
    action_space: dict[str, Any]
    weights: Annotated[tuple[ArraySpec, ...], Field(max_length=10_000)]
    prev_action: ArraySpec | None = None
    num_features: _Size = 0
    noise_size: _Size = 0

    @property
    def state_inputs(self) -> tuple[str, ...]:
        """Names of the graph's recurrent inputs."""
        return tuple(f"state_in_{index}" for index in range(len(self.state_shapes)))

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the graph's outputs, in order."""
        states = (f"state_out_{index}" for index in range(len(self.state_shapes)))
        return (DIST_INPUTS_OUTPUT, VF_OUTPUT, *states)

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights together."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def row_elements(self) -> int:
        """Number of inputs and outputs for one row."""
        previous = () if self.prev_action is None else (self.prev_action.shape,)
        shapes = (self.obs_shape, *self.state_shapes, *previous)
        return (
            sum(map(math.prod, shapes)) + self.num_dist_inputs + self.num_features + self.noise_size
        )

    @property
    def observation_space(self) -> spaces.Box:
        """Space of the network's observations, with the full range of their dtype."""
        low, high = (0, 255) if self.obs_dtype == "uint8" else (-np.inf, np.inf)
        return spaces.Box(low, high, self.obs_shape, np.dtype(self.obs_dtype).type)

    def check_spaces(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        """Check that the learner's network fits the environment of this host.

        Raises:
            PolicyError: when it does not, for example with another version of the environment.
        """
        learner_space = space_from_dict(self.action_space)
        if learner_space != action_space:
            raise PolicyError(
                f"this host's environment has the action space {action_space}, the learner's has"
                f" {learner_space}; install the same version of the environment on both"
            )
        if tuple(observation_space.shape or ()) != tuple(self.obs_shape):
            raise PolicyError(
                f"this host's environment has observations of shape {observation_space.shape}, the"
                f" learner's {tuple(self.obs_shape)}; install the same version of the environment"
                " on both"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as strings, numbers, lists and dicts, for msgpack and JSON."""
        prev_action = None
        if self.prev_action is not None:
            prev_action = [list(self.prev_action.shape), self.prev_action.dtype]
        return {
            "format": _FORMAT,
            "obs_shape": list(self.obs_shape),
            "obs_dtype": self.obs_dtype,
            "state_shapes": [list(shape) for shape in self.state_shapes],
            "num_dist_inputs": self.num_dist_inputs,
            "distribution": self.distribution,
            "action_space": dict(self.action_space),
            "weights": [[weight.name, list(weight.shape), weight.dtype] for weight in self.weights],
            "prev_action": prev_action,
            "num_features": self.num_features,
            "noise_size": self.noise_size,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ActingSpec:
        """Return the spec described by a result of `to_dict`.

        Raises:
            PolicyError: when the description is damaged, has another format, or exceeds the limits.
        """
        try:
            if data["format"] != _FORMAT:
                raise PolicyError(
                    f"the acting graph's description has format {show(data['format'])}, not"
                    f" {_FORMAT}"
                )
            fields = {
                field.name: data[field.name]
                for field in dataclasses.fields(cls)
                if field.name in data
            }
            fields["weights"] = [_array_spec(_WEIGHT_DTYPES, *weight) for weight in data["weights"]]
            if fields.get("prev_action") is not None:
                fields["prev_action"] = _array_spec(
                    _PREV_DTYPES, PREV_ACTIONS_INPUT, *fields["prev_action"]
                )
            spec = cls(**fields)
        except PolicyError:  # which is a ValueError
            raise
        except (KeyError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise PolicyError(f"the acting graph's description is damaged: {text:.200}") from error
        if len({weight.name for weight in spec.weights}) != len(spec.weights):
            raise PolicyError("the acting graph's description names a weight twice")
        if spec.num_weight_bytes > MAX_WEIGHT_BYTES:
            raise PolicyError(
                f"{spec.num_weight_bytes} bytes of weights; at most {MAX_WEIGHT_BYTES} are accepted"
            )
        if spec.row_elements > MAX_SPACE_ELEMENTS:
            raise PolicyError(
                f"{spec.row_elements} numbers for a row; at most {MAX_SPACE_ELEMENTS} are accepted"
            )
        return spec


def _array_spec(dtypes: Mapping[str, object], name: Any, shape: Any, dtype: Any) -> ArraySpec:
    if dtype not in dtypes:
        raise ValueError(f"dtype {show(dtype)} of {show(name)}; known: {sorted(dtypes)}")
    return ArraySpec(name, shape, dtype)


class ActingGraph:
    """Exported network with the newest weights it was given.

    `set_weights` can be called from another thread than `run`: a run uses the old weights or the
    new ones, never a mixture.
    """

    def __init__(
        self,
        graph: bytes,
        spec: ActingSpec,
        *,
        threads: int = 1,
        runs_per_weights: float = math.inf,
    ) -> None:
        """Prepare the graph, which can run once it has weights.

        Args:
            graph: serialised ONNX model.
            spec: its description.
            threads: threads that a run can use.
            runs_per_weights: approximate number of runs between two updates of the weights.

        Raises:
            PolicyError: when the graph is damaged, or has too many nodes.
        """
        self.spec = spec
        self._has_untried_loops = has_loops(graph)
        max_bytes = _MAX_BRIEF_BYTES if runs_per_weights <= _BRIEF_RUNS else _MAX_INPUT_BYTES
        # convolutions are far slower if their kernels are inputs
        is_dense = all(len(weight.shape) <= 2 for weight in spec.weights)
        self._weights_are_inputs = is_dense and spec.num_weight_bytes <= max_bytes
        inputs = b"".join(map(_graph_input, spec.weights)) if self._weights_are_inputs else b""
        self._graph = without_files(graph + _field(7, inputs))
        self._shared: Any = None  # one session for all weights, if they are inputs
        self._threads = threads
        self._output_names = list(spec.output_names)
        self._obs_dtype = np.dtype(spec.obs_dtype)
        self._state_inputs = spec.state_inputs
        self._session: ActingSession | None = None

    def set_weights(self, weights: Columns) -> None:
        """Replace all weights together by copies of new ones.

        Raises:
            PolicyError: when a weight is missing, unknown, not finite, or of another shape or
                dtype, or when ONNX Runtime refuses the graph. The old weights then stay in force.
        """
        self._session = self._make_session(self._checked_copies(weights))

    def get_weights(self) -> dict[str, Array]:
        """Return the current weights by name, read-only.

        Raises:
            PolicyError: when there are none yet.
        """
        return dict(self._current().weights)

    def run(
        self,
        obs: Array,
        state: Sequence[F32] = (),
        prev: Previous | None = None,
        out: tuple[F32, F32] | None = None,
        noise: F32 | None = None,
    ) -> Outputs:
        """Evaluate the network.

        Args:
            obs: [N, *obs_shape] in the spec's dtype.
            state: recurrent state, [N, *shape] float32 for each component.
            prev: actions and rewards of the previous step, for a network that looks back; else
                None.
            out: arrays for the first two results; None returns new arrays.
            noise: [N, K] float32, for a network with noisy layers; None uses the layers' means.

        Returns:
            ``dist_inputs`` [N, P] or wider, values [N], and the recurrent state after the step.

        Raises:
            PolicyError: when the arrays don't fit, there are no weights yet, or ONNX Runtime fails.
        """
        session = self._session or self._current()
        if obs.shape[1:] != self.spec.obs_shape or obs.dtype != self._obs_dtype:
            raise PolicyError(
                f"observations are {obs.dtype} {list(obs.shape)}; the policy takes"
                f" {self._obs_dtype} [N, {', '.join(map(str, self.spec.obs_shape))}]"
            )
        feed = {OBS_INPUT: obs}
        if state or self._state_inputs:
            self._add_state(feed, state, len(obs))
        if prev is not None or self.spec.prev_action is not None:
            self._add_previous(feed, prev, len(obs))
        noise_size = self.spec.noise_size
        if noise_size:
            if noise is None:
                noise = np.zeros((len(obs), noise_size), np.float32)
            feed[NOISE_INPUT] = noise
        try:
            return session.run(feed, out)
        except Exception as error:
            # onnxruntime's own exceptions have no other common base
            raise PolicyError(f"the acting graph failed: {error!s:.500}") from error

    def _add_state(self, feed: dict[str, Array], state: Sequence[F32], rows: int) -> None:
        if len(state) != len(self._state_inputs):
            raise PolicyError(
                f"{len(state)} recurrent state components; the policy has {len(self._state_inputs)}"
            )
        for name, shape, component in zip(
            self._state_inputs, self.spec.state_shapes, state, strict=True
        ):
            if component.shape != (rows, *shape) or component.dtype != np.float32:
                raise PolicyError(
                    f"{name} is {component.dtype} {list(component.shape)}; the policy takes float32"
                    f" {[rows, *shape]}"
                )
            feed[name] = component

    def _add_previous(self, feed: dict[str, Array], prev: Previous | None, rows: int) -> None:
        spec = self.spec.prev_action
        if spec is None:
            raise PolicyError("the policy does not use previous actions and rewards")
        if prev is None:
            raise PolicyError("the policy needs previous actions and rewards; none were given")
        actions, rewards = prev
        if actions.shape != (rows, *spec.shape) or rewards.shape != (rows,):
            raise PolicyError(
                f"previous actions are {list(actions.shape)} and rewards {list(rewards.shape)}; the"
                f" policy takes {[rows, *spec.shape]} and {[rows]}"
            )
        feed[PREV_ACTIONS_INPUT] = actions.astype(spec.dtype, copy=False)
        feed[PREV_REWARDS_INPUT] = rewards.astype(np.float32, copy=False)

    def _current(self) -> ActingSession:
        if self._session is None:
            raise PolicyError("the policy has no weights yet; call set_weights first")
        return self._session

    def _checked_copies(self, weights: Columns) -> dict[str, Array]:
        # ONNX Runtime uses this memory, and a copy can't change under it
        copies = {name: np.array(array, order="C") for name, array in weights.items()}
        check_weights({spec.name: spec.shape for spec in self.spec.weights}, copies)
        for spec in self.spec.weights:
            dtype = copies[spec.name].dtype
            if str(dtype) != spec.dtype:
                raise PolicyError(f"weight {spec.name!r} is {dtype}; expected {spec.dtype}")
        return {spec.name: copies[spec.name] for spec in self.spec.weights}

    def _make_session(self, weights: dict[str, Array]) -> ActingSession:
        # `without_files` has changed the names in the graph, too
        by_name = {
            without_files(name.encode()).decode(): weight for name, weight in weights.items()
        }
        if self._weights_are_inputs and self._shared is not None:
            session = ActingSession(
                self._shared, self._output_names, weights, weight_inputs=by_name
            )
            if self._session is not None:
                session.take_over(self._session)
            return session
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(weight) for name, weight in by_name.items()
        }
        loaded = self._load(values)
        if self._has_untried_loops:
            self._try_loops(loaded, by_name if self._weights_are_inputs else {})
        if not self._weights_are_inputs:
            return ActingSession(loaded, self._output_names, weights, values=values)
        # the session uses the memory of these
        self._shared = loaded
        self._first_values = values
        return ActingSession(loaded, self._output_names, weights, weight_inputs=by_name)

    def _try_loops(self, session: Any, weight_inputs: Columns) -> None:
        """Run a graph with loops once, because one without an end could never be interrupted later.

        Raises:
            PolicyError: when it does not return in time, or fails.
        """
        spec = self.spec
        feed: dict[str, Array] = {OBS_INPUT: np.zeros((1, *spec.obs_shape), spec.obs_dtype)}
        for name, shape in zip(spec.state_inputs, spec.state_shapes, strict=True):
            feed[name] = np.zeros((1, *shape), np.float32)
        if spec.prev_action is not None:
            feed[PREV_ACTIONS_INPUT] = np.zeros(
                (1, *spec.prev_action.shape), spec.prev_action.dtype
            )
            feed[PREV_REWARDS_INPUT] = np.zeros(1, np.float32)
        if spec.noise_size:
            feed[NOISE_INPUT] = np.zeros((1, spec.noise_size), np.float32)
        options = ort.RunOptions()
        timer = threading.Timer(_LOOPS_WITHIN_S, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            session.run(self._output_names, {**weight_inputs, **feed}, options)
        except Exception as error:
            # onnxruntime's own exceptions have no other common base
            reason = f"{error!s:.500}"
            if options.terminate:
                reason = f"its loops did not end within {_LOOPS_WITHIN_S:g} s"
            raise PolicyError(f"the acting graph cannot be used: {reason}") from error
        finally:
            timer.cancel()
        self._has_untried_loops = False

    def _load(self, values: Mapping[str, Any]) -> Any:  # Any: a session
        """Return a session with these weights, which are ONNX Runtime's values."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3  # errors
        # an arena takes a megabyte, again with each set of weights: it fragments the heap and makes
        # no run faster
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        # otherwise ONNX Runtime guesses from the bytes whether they are ONNX or its own format
        options.add_session_config_entry("session.load_model_format", "ONNX")
        try:
            options.add_external_initializers([*values], [*values.values()])
            return ort.InferenceSession(self._graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            # onnxruntime's own exceptions have no other common base
            raise PolicyError(f"the acting graph cannot be loaded: {error!s:.500}") from error


def check_weights(shapes: Mapping[str, tuple[int, ...]], weights: Columns) -> None:
    """Check that weights are finite and have these names and shapes.

    Raises:
        PolicyError: when they do not.
    """
    missing = shapes.keys() - weights.keys()
    unknown = weights.keys() - shapes.keys()
    if missing or unknown:
        raise PolicyError(
            f"weights don't fit the policy: missing {sorted(missing)[:10]}, unknown"
            f" {sorted(unknown)[:10]}"
        )
    for name, shape in shapes.items():
        array = weights[name]
        if array.shape != shape:
            raise PolicyError(
                f"weight {name!r} has shape {list(array.shape)}; expected {list(shape)}"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise PolicyError(
                f"weight {name!r} contains values that are not finite; the old weights stay in"
                " force"
            )


def without_files(graph: bytes) -> bytes:
    """Return a serialised ONNX model that can refer to no file and no memory address: its
    ``location`` keys are gone.

    Tensors with external data must then be given to the session by name. Names in the graph that
    contain the word change in the same way.
    """
    return graph.replace(b"location", b"locati0n")


def _graph_input(weight: ArraySpec) -> bytes:
    """Return the field of an ONNX graph that makes a weight an input, too: a ValueInfoProto.

    A field appended to a serialised message is merged with the message.
    """
    shape = b"".join(_field(1, _number(1, size)) for size in weight.shape)
    tensor = _number(1, _WEIGHT_DTYPES[weight.dtype]) + _field(2, shape)
    return _field(11, _field(1, weight.name.encode()) + _field(2, _field(1, tensor)))


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited Protocol Buffers field: bytes, a text or a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes([value])
    return bytes([value & 0x7F | 0x80]) + _varint(value >> 7)
