"""Policies of every kind to export (spaces, networks, filters, masks), and functions that run
exported files.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from masked_env import ForbiddingEnv
from saved_runs import save_run

import aiorl
from aiorl.env.registry import register_env
from aiorl.run.build import Learning

BOX = spaces.Box(-2.0, 2.0, (3,))
SMALL_FRAMES = spaces.Box(0, 255, (10, 12, 2), np.uint8)
PARTS = spaces.Dict(
    {"room": spaces.Discrete(3, start=1), "at": BOX, "lamps": spaces.MultiBinary(2)}
)
CAMERAS = spaces.Dict(
    {
        "at": BOX,
        "eyes": spaces.Tuple(
            [spaces.Box(0, 255, (1, 8, 9), np.uint8), spaces.Box(0.0, 1.0, (8, 7, 2))]
        ),
    }
)
FOUR, TORQUE = spaces.Discrete(4), spaces.Box(-0.1, 0.1, (2,))
UNEVEN = spaces.Box(np.array([0.1, -1.0]), np.array([np.inf, 0.3]), dtype=np.float64)
MANY = spaces.Tuple(
    [
        spaces.Discrete(3, start=1),
        spaces.Box(-1.0, np.float64(0.1), (2, 2), np.float64),
        spaces.Dict(
            {"bits": spaces.MultiBinary(2), "numbers": spaces.MultiDiscrete([2, 3], start=[4, 1])}
        ),
    ]
)
SMALL = {"fcnet_hiddens": [8], "lstm_cell_size": 5}
FILTERED = {"observation_filter": "MeanStdFilter"}
OF_VALUES = {"algo": "dqn", "model": SMALL}
OF_RETURNS = {**OF_VALUES, "num_atoms": 5, "v_min": -3.0}
OF_MANY_WORKERS = {
    "algo": "apex",
    "num_workers": 2,
    "replay_capacity": 1000,
    "learning_starts": 1000,
}
IN_SEQUENCES = {"rollout_fragment_length": 8}


class Shown(gymnasium.Env[Any, Any]):
    """Environment that shows samples of a space."""

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, False, {}


def sequential(obs_shape: Any, num_outputs: int, model_config: Any) -> Any:
    """Make a user's own model without values."""
    keras = importlib.import_module("keras")
    return keras.Sequential(
        [keras.layers.Input(obs_shape), keras.layers.Dense(num_outputs, activation="tanh")]
    )


def two_headed(obs_shape: Any, num_outputs: int, model_config: Any, *, obs_parts: Any) -> Any:
    """Make a user's own model that takes parts of the observation and returns values."""
    keras = importlib.import_module("keras")
    at = keras.Input(obs_parts["at"], name="at")
    lamps = keras.Input(obs_parts["lamps"], name="lamps")
    features = keras.layers.Dense(6, activation="relu")(keras.layers.Concatenate()([at, lamps]))
    outputs = [keras.layers.Dense(num_outputs)(features), keras.layers.Dense(1)(features)]
    return keras.Model({"at": at, "lamps": lamps}, outputs)


def features(obs_shape: Any, num_outputs: int, model_config: Any) -> Any:
    """Make a user's own model that returns features, two more than the hidden layer would."""
    keras = importlib.import_module("keras")
    layer = keras.layers.Dense(num_outputs + 2, activation=model_config["fcnet_activation"])
    return keras.Sequential([keras.layers.Input(obs_shape), layer])


FEATURES = {**SMALL, "custom_model": f"{__name__}:features", "custom_features": True}
WORLDS: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], dict[str, Any]]] = {
    "box": (BOX, FOUR, {}),
    "filtered": (BOX, TORQUE, FILTERED),
    "unclipped": (
        spaces.Box(-np.inf, np.inf, (3,), np.float64),
        TORQUE,
        {"clip_actions": False, "model": SMALL},
    ),
    "filtered frames": (
        SMALL_FRAMES,
        FOUR,
        {**FILTERED, "model": {**SMALL, "conv_filters": [[4, 3, 2]]}},
    ),
    "parts": (PARTS, FOUR, {**FILTERED, "model": SMALL}),
    "images in parts": (CAMERAS, FOUR, {"model": {**SMALL, "use_lstm": True}}),
    "room": (spaces.Discrete(5, start=-2), spaces.MultiBinary((2, 2)), {"model": SMALL}),
    "rooms": (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([4, 4]), {"model": SMALL}),
    "free deviations": (BOX, UNEVEN, {"model": {**SMALL, "free_log_std": True}}),
    "noise of the state": (
        BOX,
        TORQUE,
        {**FILTERED, "use_sde": True, "model": {**SMALL, "use_gru": True}},
    ),
    "memory": (
        BOX,
        spaces.Discrete(2, start=3),
        {**FILTERED, "model": {**SMALL, "use_lstm": True}},
    ),
    "looks back": (
        BOX,
        MANY,
        {"model": {**SMALL, "use_gru": True, "lstm_use_prev_action_reward": True}},
    ),
    "layers of values": (BOX, FOUR, {"model": {**SMALL, "vf_hiddens": [6, 5]}}),
    "custom features": (
        BOX,
        UNEVEN,
        {**FILTERED, "model": {**FEATURES, "free_log_std": True, "vf_hiddens": [6]}},
    ),
    "custom features with memory": (
        BOX,
        TORQUE,
        {"use_sde": True, "model": {**FEATURES, "use_lstm": True, "vf_share_layers": True}},
    ),
    "custom parts": (PARTS, FOUR, {"model": {**SMALL, "custom_model": f"{__name__}:two_headed"}}),
    "values": (BOX, FOUR, OF_VALUES),
    "values of frames": (SMALL_FRAMES, FOUR, {**OF_MANY_WORKERS, "dueling_hiddens": [6]}),
    "values with memory": (
        BOX,
        FOUR,
        {**OF_VALUES, **IN_SEQUENCES, "dueling": False, "model": {**SMALL, "use_lstm": True}},
    ),
    "returns": (
        BOX,
        spaces.Discrete(4, start=2),
        {**OF_RETURNS, "noisy": True, "dueling_hiddens": [6, 5]},
    ),
    "squashed": (BOX, TORQUE, {"algo": "sac", "model": {"fcnet_hiddens": [8]}}),
    "without chance": (BOX, TORQUE, {"algo": "td3", "model": {"fcnet_hiddens": [8]}}),
    **{
        f"masked {name}": (BOX, FOUR, {"model": SMALL, "env_config": {"actions": name}})
        for name in ("tuple", "dict")
    },
    "masked values": (BOX, FOUR, {**OF_VALUES, "env_config": {"actions": "discrete"}}),
    "masked returns, looks back": (
        BOX,
        FOUR,
        {
            **OF_RETURNS,
            **IN_SEQUENCES,
            "dueling_hiddens": [6],
            "env_config": {"actions": "discrete"},
            "model": {**SMALL, "use_gru": True, "lstm_use_prev_action_reward": True},
        },
    ),
}
"""Observation space, action space and settings of worlds; "masked" ones are of ForbiddingEnv."""


_first: dict[str, Path] = {}
_folder = tempfile.TemporaryDirectory(prefix="worlds-")


def save_world(name: str, directory: Path) -> None:
    """Save a run of a world in the form that policies get; its filter has seen observations.

    The same world is built once, and copied from then on.
    """
    key = repr((name, WORLDS[name]))
    if key not in _first:
        made = Path(tempfile.mkdtemp(dir=_folder.name))
        save_new_world(name, made)
        _first[key] = made
    _register(name)
    shutil.copytree(_first[key], directory, dirs_exist_ok=True)


def save_new_world(name: str, directory: Path, seen: Any = None) -> Learning:
    """Save a run of a world as `save_world` does, and return its learners; `seen` are observations
    that its filter has seen instead.
    """
    settings = WORLDS[name][2]
    make = _register(name)
    if seen is None and "observation_filter" in settings:
        space = make(settings.get("env_config", {})).observation_space
        seen = model_inputs(space, observations_of(space, 20, seed=3))
    return save_run(
        directory,
        None if seen is None else {aiorl.DEFAULT_POLICY_ID: seen},
        env="world",
        **settings,
    )


def _register(name: str) -> Callable[[Any], gymnasium.Env[Any, Any]]:
    observation_space, action_space, _ = WORLDS[name]
    is_masked = name.startswith("masked")

    def make(context: Any) -> gymnasium.Env[Any, Any]:
        return ForbiddingEnv(**context) if is_masked else Shown(observation_space, action_space)

    register_env("world", make)
    return make


def observations_of(space: spaces.Space[Any], number: int, *, seed: int = 1) -> list[Any]:
    """Return samples of an observation space; a mask allows at least one action."""
    space.seed(seed)
    observations = [space.sample() for _ in range(number)]
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        for index, obs in enumerate(observations):
            for mask in _arrays(obs["action_mask"]):
                mask[:] = np.arange(len(mask)) != index % len(mask)
    return observations


def _arrays(nested: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(nested, np.ndarray):
        yield nested
    else:
        for part in nested.values() if isinstance(nested, dict) else nested:
            yield from _arrays(part)


def model_inputs(space: spaces.Space[Any], observations: list[Any]) -> np.ndarray[Any, Any]:
    """Return observations preprocessed by Gymnasium."""
    if isinstance(space, spaces.Dict) and "action_mask" in space.spaces:
        (rest,) = (name for name in space.spaces if name != "action_mask")
        masks = [spaces.flatten(space["action_mask"], obs["action_mask"]) for obs in observations]
        return np.array(
            [[*mask, *obs[rest]] for mask, obs in zip(masks, observations, strict=True)], np.float32
        )
    if isinstance(space, spaces.Box):
        return np.array(observations, np.uint8 if space.dtype == np.uint8 else np.float32)
    return np.array([spaces.flatten(space, obs) for obs in observations], np.float32)


def run_onnx(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Run a file with ONNX Runtime only."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))
