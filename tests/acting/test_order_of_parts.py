"""Parts of Dict spaces keep one order, that of the environment, and older checkpoints that of their
samplers.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_worlds import Shown
from gymnasium import spaces
from hypothesis import given, strategies as st
from saved_runs import save_run

import aiorl
from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from aiorl.acting.older_order import sampled_action_space, sampled_observation_space
from aiorl.acting.preprocessors import make_preprocessor, preprocessor_for
from aiorl.config.schema import CommonConfig
from aiorl.data.nested_codec import pack, unpack
from aiorl.data.spaces import space_from_dict, space_to_dict
from aiorl.env.registry import register_env
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.build import build_learning
from aiorl.run.restoring import take_up
from aiorl.serving.models import Models

DEFAULT = aiorl.DEFAULT_POLICY_ID
TWO = spaces.Box(-1.0, 1.0, (2,), np.float32)
INNER = spaces.Dict([("yaw", spaces.Box(-1.0, 1.0, (1,), np.float32)), ("bend", TWO)])
ROBOT = spaces.Dict([("wheels", TWO), ("arm", INNER), ("camera", spaces.Discrete(3, start=2))])
"""Its parts, and those of a part, are not in alphabetical order."""
MOVES = spaces.Dict(
    OrderedDict([("turn", spaces.Box(-9.0, 9.0, (2,), np.float32)), ("gear", spaces.Discrete(3))])
)


def order_of(space: Any) -> list[Any]:
    """Return the names of the parts of a space and of its parts, in order."""
    names: list[Any] = []
    for name, part in getattr(space, "spaces", {}).items():
        names.append(name)
        names.extend(order_of(part) if isinstance(part, spaces.Dict) else [])
    return names


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a robot's policy; read-only."""
    directory = tmp_path_factory.mktemp("robot")
    register_env("robot", lambda context: Shown(ROBOT, MOVES))
    save_run(directory, env="robot")
    return directory


def without_order(run: Path, directory: Path) -> Path:
    """Write a checkpoint like those from before the order was kept."""
    checkpoint = load_checkpoint(run / "checkpoints" / "checkpoint-000007")
    content = unpack(checkpoint.tensors["acting"].tobytes())
    del content["keeps_order"]
    tensors = {**checkpoint.tensors, "acting": np.frombuffer(pack(content), np.uint8)}
    return save_checkpoint(directory, 8, tensors, checkpoint.meta)


simple_spaces = st.sampled_from(
    [
        TWO,
        spaces.Box(-1.0, 1.0, ()),
        spaces.Box(-2.0, 2.0, (1, 2), np.float64),
        spaces.Box(0, 255, (2, 3, 1), np.uint8),
        spaces.Box(-3, 9, (2,), np.int16),
        spaces.Discrete(3, start=2),
        spaces.MultiBinary((2, 1)),
        spaces.MultiDiscrete([[2, 3], [3, 2]], start=[[1, 0], [-1, 4]]),
    ]
)
any_spaces = st.recursive(
    simple_spaces,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple)
        # pairs keep their order
        | st.lists(
            st.tuples(st.sampled_from("zaMb_"), inner),
            min_size=1,
            max_size=3,
            unique_by=lambda pair: pair[0],
        ).map(spaces.Dict)
    ),
    max_leaves=6,
)


@given(space=any_spaces, seed=st.integers(0, 1 << 31))
def test_a_rebuilt_space_flattens_observations_like_the_environments(
    space: spaces.Space[Any], seed: int
) -> None:
    space.seed(seed)
    observations = [space.sample() for _ in range(3)]
    expected = np.array([spaces.flatten(space, obs) for obs in observations], np.float32)
    for described in (space, space_from_dict(space_to_dict(space))):
        preprocessor = preprocessor_for(described)
        np.testing.assert_array_equal(
            preprocessor.transform_rows(observations).reshape(3, -1), expected
        )
        assert preprocessor.observation_space.shape == preprocessor.shape


def test_a_loaded_policy_gets_the_parts_of_an_observation_in_the_order_of_the_environment(
    robot: Path,
) -> None:
    policy = aiorl.load_policy(robot)
    assert order_of(policy.observation_space) == ["wheels", "arm", "yaw", "bend", "camera"]
    assert order_of(policy.action_space) == ["turn", "gear"]
    ROBOT.seed(3)
    for _ in range(5):
        obs = ROBOT.sample()
        np.testing.assert_array_equal(policy.observe([obs])[0], spaces.flatten(ROBOT, obs))


def test_the_rest_of_a_masked_observation_keeps_its_order() -> None:
    mask = spaces.MultiBinary(2)
    masked = spaces.Dict(
        [("wheels", TWO), ("action_mask", mask), ("camera", spaces.Discrete(3)), ("arm", INNER)]
    )
    rest = spaces.Dict(
        [(name, part) for name, part in masked.spaces.items() if name != "action_mask"]
    )
    masked.seed(3)
    obs = masked.sample()
    preprocessor = make_preprocessor(masked, action_space=spaces.Discrete(2))
    without = {name: part for name, part in obs.items() if name != "action_mask"}
    expected = [*obs["action_mask"], *spaces.flatten(rest, without)]
    np.testing.assert_array_equal(
        preprocessor.transform_rows([obs])[0], np.array(expected, np.float32)
    )
    assert list(preprocessor.layout.parts) == ["wheels", "camera", "arm.yaw", "arm.bend"]


def test_policies_of_older_checkpoints_act_on_the_order_that_their_samplers_had(
    robot: Path, tmp_path: Path
) -> None:
    older = aiorl.load_policy(without_order(robot, tmp_path))
    # the sampler had the environment's own space of observations, and a rebuilt one of actions
    assert order_of(older.observation_space) == order_of(ROBOT)
    assert order_of(older.action_space) == ["gear", "turn"]
    ROBOT.seed(4)
    obs = ROBOT.sample()
    np.testing.assert_array_equal(older.observe([obs])[0], spaces.flatten(ROBOT, obs))


MASKED = spaces.Dict([("z", TWO), ("action_mask", spaces.MultiBinary(2)), ("a", INNER)])


@pytest.mark.parametrize(
    ("space", "was_rebuilt", "order"),
    [
        (ROBOT, False, ["wheels", "arm", "yaw", "bend", "camera"]),
        (ROBOT, True, ["arm", "bend", "yaw", "camera", "wheels"]),
        (MASKED, False, ["a", "yaw", "bend", "action_mask", "z"]),
        (MASKED, True, ["a", "bend", "yaw", "action_mask", "z"]),
    ],
)
def test_the_order_that_older_samplers_had_depends_on_where_they_had_the_space_from(
    space: spaces.Dict, was_rebuilt: bool, order: list[str]
) -> None:
    described = sampled_observation_space(space_to_dict(space), was_rebuilt=was_rebuilt)
    names = []
    for name, part in described["spaces"]:
        names += [name, *(inner for inner, _ in part.get("spaces", ()))]
    assert names == order


def test_actions_of_older_samplers_were_in_alphabetical_order() -> None:
    nested = spaces.Tuple([spaces.Discrete(2), MOVES])
    described = sampled_action_space(space_to_dict(nested))
    assert [name for name, _ in described["spaces"][1]["spaces"]] == ["gear", "turn"]


def config_of_robot(**settings: Any) -> CommonConfig:
    return config_class("ppo").from_mapping({"seed": 5, "eager": True, "env": "robot", **settings})


@pytest.mark.parametrize("is_resumed", [True, False], ids=["resumed", "init_from"])
def test_a_run_takes_over_the_order_of_the_weights_that_it_begins_with(
    robot: Path, tmp_path: Path, is_resumed: bool
) -> None:
    path = without_order(robot, tmp_path)
    checkpoint: Checkpoint = load_checkpoint(path)
    config = config_of_robot() if is_resumed else config_of_robot(init_from=str(path))
    learning = build_learning(config, resumed=checkpoint if is_resumed else None)
    stored = ActingState.from_checkpoint(checkpoint).spaces
    assert learning.spaces == stored
    part = learning.worker_part.policies[DEFAULT]
    assert part.observation_space == stored[DEFAULT]["observation"]
    assert part.action_space == stored[DEFAULT]["action"]
    assert learning.graphs[DEFAULT]["spec"]["action_space"] == stored[DEFAULT]["action"]
    take_up(checkpoint, learning)


def test_a_run_whose_environment_lists_its_parts_in_another_order_keeps_the_order_of_its_weights(
    robot: Path, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(robot / "checkpoints" / "checkpoint-000007")
    register_env("robot", lambda context: Shown(spaces.Dict(dict(ROBOT.spaces)), MOVES))
    try:
        config = config_of_robot()
        learning = build_learning(config, resumed=checkpoint)
    finally:
        register_env("robot", lambda context: Shown(ROBOT, MOVES))
    assert learning.spaces[DEFAULT] == {
        "observation": space_to_dict(ROBOT),
        "action": space_to_dict(MOVES),
    }
    take_up(checkpoint, learning)


def test_an_export_is_served_in_the_order_of_the_environment(robot: Path, tmp_path: Path) -> None:
    aiorl.export_policy(robot, tmp_path, ["onnx"])
    (model,) = Models([str(tmp_path)]).values()
    assert order_of(model.observation_space) == order_of(ROBOT)
    assert order_of(model.action_space) == order_of(MOVES)
    ROBOT.seed(5)
    obs = ROBOT.sample()
    (served,), _, _ = model.arms[0].actor.compute_actions([obs], explore=False)
    action = aiorl.load_policy(robot).compute_single_action(obs)
    assert served["gear"] == action["gear"]
    np.testing.assert_allclose(served["turn"], action["turn"], atol=1e-5)
