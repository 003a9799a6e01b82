"""ExportedActor: a policy exported to ONNX, with the interface of an Actor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from aiorl.acting.acting_graph import without_files
from aiorl.acting.distributions import make_named_distribution
from aiorl.acting.preprocessors import make_preprocessor
from aiorl.config.files import parse_json, read_regular
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.arrays import all_finite
from aiorl.data.spaces import space_from_dict
from aiorl.errors import AiorlError, CheckpointError, PolicyError
from aiorl.serving.values import joined

Array = NDArray[Any]

DESCRIPTION = "policy.json"
_MAX_DESCRIPTION, _MAX_GRAPH = 16 << 20, 2 << 30
_ORT_ERRORS = 3  # log severity


def export_in(path: Path) -> Path | None:
    """Return the directory of an ONNX export, given as such, as its parent or as its file; None if there is none."""
    for directory in (path, path / "onnx", path.parent if path.suffix == ".onnx" else path):
        if (directory / DESCRIPTION).is_file():
            return directory
    return None


class ExportedActor:
    """Policy of an export; it takes the most likely actions, and its steps around the network are in the file.

    Attributes:
        policy_id: the policy's name.
        env: name of the environment that it was trained on.
        env_steps: env steps that it was trained on.
        number: number of its checkpoint.
        layout: column form and environment form of the actions.
        observation_space: space of the environment's observations.
        initial_state: recurrent state of one row at an episode's start.
        looks_back: True if it uses previous actions and rewards.
        num_dist_inputs: inputs of its action distribution per row.
    """

    def __init__(self, directory: Path, *, threads: int = 1) -> None:
        """Load an export from its directory.

        Raises:
            CheckpointError: it can't be used.
        """
        try:
            said = parse_json(read_regular(directory / DESCRIPTION, max_bytes=_MAX_DESCRIPTION))
            if said["format"] != "onnx":
                raise CheckpointError(directory, f"it is an export to {said['format']}; only ONNX can be served")
            graph = read_regular(directory / "policy.onnx", max_bytes=_MAX_GRAPH)
            self.policy_id, self.env, self.env_steps = str(said["policy_id"]), str(said["env"]), int(said["env_steps"])
            self.number = int(str(said["checkpoint"]).rpartition("-")[2] or 0)
            self.observation_space = space_from_dict(said["observation_space"])
            action_space = space_from_dict(said["action_space"])
            self._preprocessor = make_preprocessor(self.observation_space, action_space=action_space)
            if type(self._preprocessor).__name__ != said["preprocessor"]["name"]:
                raise PolicyError(f"its preprocessor {said['preprocessor']['name']} is the user's own")
            self._distribution = make_named_distribution(said["distribution"], action_space)
            options = ort.SessionOptions()
            options.log_severity_level, options.intra_op_num_threads = _ORT_ERRORS, threads
            self._session = ort.InferenceSession(without_files(graph), options, providers=["CPUExecutionProvider"])
        except (AiorlError, OSError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(directory, f"its export can't be used: {error!s:.300}") from error
        except Exception as error:  # onnxruntime's exceptions have no narrower common base
            raise CheckpointError(directory, f"ONNX Runtime can't load its export: {error!s:.300}") from error
        self.layout = ActionLayout(action_space)
        self._inputs = {one.name: tuple(one.shape[1:]) for one in self._session.get_inputs()}
        self._outputs = [one.name for one in self._session.get_outputs()]
        states = [name for name in self._inputs if name.startswith("state_in_")]
        self.initial_state = [np.zeros(self._inputs[name], np.float32) for name in states]
        self.looks_back = "prev_actions" in self._inputs
        self.num_dist_inputs = self._distribution.num_inputs

    def observe(self, observations: Sequence[Any], *, update: bool = False) -> Array:
        """Return the file's inputs [N, ...] for observations; see `Actor.observe`."""
        rows = self._preprocessor.transform_rows(observations)
        if rows.dtype.kind == "f" and not all_finite(rows):
            raise ValueError("observation holds NaN or infinity")
        return rows

    def rows_without_action(self, obs: Array) -> Array:
        """Return [K], the rows with an action mask that forbids everything."""
        size = self._preprocessor.layout.num_mask
        return np.flatnonzero(~obs[:, :size].any(axis=1)) if size else np.zeros(0, np.int64)

    def compute_actions(
        self,
        observations: Sequence[Any],
        states: Sequence[Array] = (),
        prev_actions: Sequence[Any] | None = None,
        prev_rewards: Sequence[float] | None = None,
        *,
        explore: bool = False,
        with_logp: bool = True,
    ) -> tuple[list[Any], list[Array], dict[str, Array]]:
        """Return actions, states [N, ...] and further outputs [N, ...]; see `Actor.compute_actions`."""
        if explore:
            raise ValueError("an export takes the most likely actions, so it can't explore; serve the checkpoint")
        rows = self.observe(observations)
        if len(stuck := self.rows_without_action(rows)):
            raise PolicyError(f"the action mask of observation {stuck[0]} forbids every action")
        feed = {"obs": rows}
        for index, one in enumerate(self.initial_state):
            feed[f"state_in_{index}"] = states[index] if states else np.zeros((len(rows), *one.shape), np.float32)
        if self.looks_back:
            given = [] if prev_actions is None else [self.layout.to_row(action) for action in prev_actions]
            column = np.stack(given) if given else self.layout.zeros(len(rows))
            feed["prev_actions"] = column.astype(np.int64 if column.dtype.kind in "iub" else np.float32)
            feed["prev_rewards"] = np.asarray([0.0] * len(rows) if prev_rewards is None else prev_rewards, np.float32)
        found = dict(zip(self._outputs, self._session.run(self._outputs, feed), strict=True))
        space, leaves = self.layout.space, self.layout.leaves
        names = [f"action_{index}" for index in range(len(leaves))] if self.layout.is_nested else ["action"]
        column = self.layout.to_column(joined(space, iter([found[name] for name in names])))
        dist_inputs = found["dist_inputs"]
        logp = self._distribution.logp(dist_inputs, self._distribution.deterministic(dist_inputs))
        outputs = {c.ACTIONS: column, c.ACTION_LOGP: logp, c.ACTION_DIST_INPUTS: dist_inputs, c.VF_PREDS: found["vf"]}
        states_out = [found[f"state_out_{index}"] for index in range(len(self.initial_state))]
        return self.layout.to_env(column), states_out, outputs
