"""A policy's observations and actions are the same wherever it acts, over every kind of nested
space.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from gymnasium import spaces

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from export_worlds import Shown
from policy_server import post, serving
from saved_runs import save_run

import aiorl
from aiorl.acting.acting_state import LoadedPolicy
from aiorl.data import columns as c
from aiorl.data.actions import ActionLayout
from aiorl.data.sample_batch import SampleBatch
from aiorl.data.spaces import space_to_dict
from aiorl.env.registry import register_env
from aiorl.estimate import main as estimate
from aiorl.offline.readers import FileReader, ReaderOptions
from aiorl.serving.tensors import tensors_of

# No part of a Dict is in alphabetical order.
ARM = spaces.Dict(
    [("yaw", spaces.Box(-1.0, 1.0, ())), ("bend", spaces.Box(-2.0, 2.0, (1, 2), np.float64))]
)
EVERY_KIND = spaces.Dict(
    [
        ("wheels", spaces.Box(-1.0, 1.0, (2,), np.float64)),
        ("image", spaces.Box(0, 255, (3, 4, 1), np.uint8)),
        ("gear", spaces.Discrete(3, start=2)),
        ("grid", spaces.MultiDiscrete([[2, 3], [3, 2]], start=[[1, 0], [-1, 4]])),
        ("lamps", spaces.MultiBinary((2, 1))),
        ("arms", spaces.Tuple([ARM, spaces.Dict([("z", spaces.Discrete(2)), ("a", ARM)])])),
        ("counts", spaces.Box(-3, 9, (2,), np.int16)),
    ]
)
MASKED = spaces.Dict(
    [
        ("speed", spaces.Box(-1.0, 1.0, (2,))),
        ("action_mask", spaces.MultiBinary(3 + 2 + 3)),
        ("arm", ARM),
        ("gear", spaces.Discrete(3)),
    ]
)
MOVES = spaces.Tuple(
    [
        spaces.Discrete(3, start=-1),
        spaces.Dict(
            [
                ("turn", spaces.Box(-0.1, 0.1, (2,), np.float64)),
                ("gear", spaces.MultiDiscrete([[2, 3]], start=[[4, 1]])),
                ("force", spaces.Box(-np.inf, 0.2, ())),
            ]
        ),
        spaces.MultiBinary(2),
    ]
)
CHOICES = spaces.Dict([("piece", spaces.Discrete(3)), ("at", spaces.MultiDiscrete([2, 3]))])
PUSH = spaces.Dict([("push", spaces.Box(-0.3, 0.3, (2,))), ("gear", spaces.Discrete(3))])
NETWORK = {"fcnet_hiddens": [8], "lstm_cell_size": 4}

WORLDS: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], dict[str, Any]]] = {
    "every kind": (EVERY_KIND, MOVES, {"model": NETWORK, "observation_filter": "MeanStdFilter"}),
    "masked": (MASKED, CHOICES, {"model": NETWORK}),
    "looks back": (
        spaces.Tuple([ARM, spaces.MultiBinary(3)]),
        PUSH,
        {"model": {**NETWORK, "use_gru": True, "lstm_use_prev_action_reward": True}},
    ),
}
STEPS = 6


class Noted(Shown):
    """Environment of random observations that notes them with the actions for them and the
    rewards.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        super().__init__(observation_space, action_space)
        self.steps: list[tuple[Any, Any, float]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self._next(), {}

    def step(self, action: Any) -> Any:
        reward = 0.25 * (len(self.steps) + 1)
        self.steps.append((self.shown, action, reward))
        return self._next(), reward, len(self.steps) % STEPS == 0, False, {}

    def _next(self) -> Any:
        self.shown = self.observation_space.sample()
        if self.observation_space is MASKED:
            self.shown["action_mask"][::3] = 1  # each choice has a legal alternative
            self.shown["action_mask"][5] = 1
        return self.shown


@dataclasses.dataclass(frozen=True)
class World:
    """Saved run, and what its policy did in an evaluation.

    Attributes:
        run: the run's directory.
        data: the stored rows of the evaluation.
        drawn: stored rows of another one, whose actions were drawn.
        observation_space: the environment's.
        action_space: the environment's.
        steps: observation, action and reward of each step, as the environment had them.
    """

    run: Path
    data: Path
    drawn: Path
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    steps: list[tuple[Any, Any, float]]

    @functools.cached_property
    def policy(self) -> LoadedPolicy:
        """The policy as `load_policy` returns it."""
        return aiorl.load_policy(self.run)

    def network_input(self, obs: Any) -> np.ndarray[Any, Any]:
        """Return an observation flattened by Gymnasium, the mask first."""
        if not isinstance(obs, dict) or "action_mask" not in obs:
            return np.asarray(spaces.flatten(self.observation_space, obs), np.float32)
        assert isinstance(self.observation_space, spaces.Dict)
        rest = [
            (name, part)
            for name, part in self.observation_space.spaces.items()
            if name != "action_mask"
        ]
        flat = spaces.flatten(spaces.Dict(rest), {name: obs[name] for name, _ in rest})
        return np.concatenate([obs["action_mask"], flat]).astype(np.float32)


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Each world once; read-only."""
    observation_space, action_space, settings = WORLDS[request.param]
    directory = tmp_path_factory.mktemp("world")
    made: list[Noted] = []

    def make(context: Any) -> Noted:
        made.append(Noted(observation_space, action_space))
        return made[-1]

    register_env("noted", make)
    seen = None
    if "observation_filter" in settings:
        observation_space.seed(1)
        seen = {
            aiorl.DEFAULT_POLICY_ID: np.stack(
                [
                    spaces.flatten(observation_space, observation_space.sample()).astype(np.float32)
                    for _ in range(30)
                ]
            )
        }
    save_run(directory, seen, env="noted", **settings)
    aiorl.evaluate(directory, episodes=1, seed=3, output=directory / "data")
    (steps,) = [env.steps[:STEPS] for env in made if env.steps]
    aiorl.evaluate(directory, episodes=3, seed=4, explore=True, output=directory / "drawn")
    return World(
        directory, directory / "data", directory / "drawn", observation_space, action_space, steps
    )


def assert_same_action(
    space: spaces.Space[Any], action: Any, wanted: Any, *, same_kind: bool = True
) -> None:
    """Assert that two actions are equal, and of one kind unless they have gone through JSON."""
    if same_kind:
        assert type(action) is type(wanted), f"for {space}"
    if isinstance(space, spaces.Dict):
        assert list(action) == list(wanted) == list(space.spaces)
        for name, part in space.spaces.items():
            assert_same_action(part, action[name], wanted[name], same_kind=same_kind)
    elif isinstance(space, spaces.Tuple):
        for part, one, other in zip(space.spaces, action, wanted, strict=True):
            assert_same_action(part, one, other, same_kind=same_kind)
    else:
        if same_kind:
            assert (action.dtype, action.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(action, wanted, rtol=1e-5, atol=1e-5)


def test_environments_get_actions_of_the_kind_that_their_space_samples(world: World) -> None:
    assert len(world.steps) == STEPS
    for _, action, _ in world.steps:
        assert world.action_space.contains(action)
        sample = world.action_space.sample()
        layout = ActionLayout(world.action_space)
        (as_sampled,) = layout.to_env(layout.to_row(sample)[None])
        assert_same_action(world.action_space, as_sampled, sample)
        assert type(action) is type(sample)
    rows = {
        np.round(ActionLayout(world.action_space).to_row(action), 5).tobytes()
        for _, action, _ in world.steps
    }
    assert len(rows) > 1, "actions that depend on the observation"


def test_a_loaded_policy_acts_as_in_the_evaluation(world: World) -> None:
    policy = world.policy
    assert space_to_dict(policy.observation_space) == space_to_dict(world.observation_space)
    assert space_to_dict(policy.action_space) == space_to_dict(world.action_space)
    state, before = policy.get_initial_state(), (None, None)
    for obs, wanted, reward in world.steps:
        action, after, _ = policy.compute_single_action(obs, state, *before, full_fetch=True)
        assert_same_action(world.action_space, action, wanted)
        previous, last_reward = before
        of_rows = (
            {}
            if previous is None
            else {"prev_actions": [previous] * 2, "prev_rewards": [last_reward] * 2}
        )
        pair, _, _ = policy.compute_actions(
            [obs, obs], [np.stack([part, part]) for part in state], **of_rows
        )
        for action_of_row in pair:
            assert_same_action(world.action_space, action_of_row, wanted)
        state, before = after, (action, reward)


def test_a_trainer_acts_as_in_the_evaluation(world: World, tmp_path: Path) -> None:
    trainer = aiorl.Trainer.restore(
        world.run,
        run_dir=str(tmp_path),
        num_workers=0,
        num_envs_per_worker=1,
        compilation_cache="off",
    )
    try:
        state: Any = trainer.get_policy().get_initial_state()
        previous: Any = (None, None)
        for obs, wanted, reward in world.steps:
            action, state, _ = trainer.compute_action(obs, state, *previous, full_fetch=True)
            assert_same_action(world.action_space, action, wanted)
            previous = action, reward
    finally:
        trainer.stop()


def test_stored_rows_have_the_inputs_and_the_actions_of_the_evaluation(world: World) -> None:
    rows = SampleBatch.concat(list(FileReader(str(world.data), ReaderOptions(epochs=1))))
    layout = ActionLayout(world.action_space)
    assert rows.count == STEPS
    inputs = world.policy.observe([obs for obs, _, _ in world.steps])
    np.testing.assert_allclose(rows[c.OBS], inputs, rtol=1e-6, atol=1e-6)
    wanted = np.stack([layout.to_row(action) for _, action, _ in world.steps])
    np.testing.assert_allclose(layout.clip(rows[c.ACTIONS]), wanted, rtol=1e-6, atol=1e-6)
    for action, (_, taken, _) in zip(
        layout.to_env(layout.clip(rows[c.ACTIONS])), world.steps, strict=True
    ):
        assert_same_action(world.action_space, action, taken)


def test_an_estimator_gives_stored_actions_the_probabilities_with_which_they_were_drawn(
    world: World, tmp_path: Path
) -> None:
    file = tmp_path / "judged.json"
    assert (
        estimate([str(world.run), str(world.drawn), "--methods", "is,pdis", "--json", str(file)])
        == 0
    )
    judged = json.loads(file.read_text())
    for method in ("is", "pdis"):
        assert judged["estimates"][method]["V_est"] == pytest.approx(judged["V_prev"], rel=1e-3)


def test_an_export_acts_as_in_the_evaluation(world: World, tmp_path: Path) -> None:
    path = aiorl.export_policy(world.run, tmp_path, ["onnx"])["onnx"]
    described = json.loads((path.parent / "policy.json").read_text())
    paths = [output["path"] for output in described["outputs"] if "path" in output]
    session = ort.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    inputs = {
        item.name: np.zeros((1, *item.shape[1:]), np.float32) for item in session.get_inputs()
    }
    for obs, wanted, reward in world.steps:
        inputs["obs"] = world.network_input(obs)[None]
        outputs = dict(zip(names, session.run(names, inputs), strict=True))
        parts = [outputs[f"action_{index}"][0] for index in range(len(paths))]
        for part, keys in zip(parts, paths, strict=True):
            np.testing.assert_allclose(
                part, functools.reduce(operator.getitem, keys, wanted), rtol=1e-5, atol=1e-5
            )
        inputs = {
            name: outputs.get(name.replace("_in_", "_out_"), value)
            for name, value in inputs.items()
        }
        if "prev_actions" in inputs:
            inputs["prev_actions"] = np.concatenate([part.ravel() for part in parts]).astype(
                np.float32
            )[None]
            inputs["prev_rewards"] = np.array([reward], np.float32)


def test_servers_answer_as_in_the_evaluation_by_every_protocol(
    world: World, tmp_path: Path
) -> None:
    aiorl.export_policy(world.run, tmp_path, ["onnx"])
    for served in (world.run, tmp_path):
        with serving(served) as port:
            session = post(port, "/sessions", {})["session"]
            with aiorl.PolicyClient(f"http://127.0.0.1:{port}") as client, client.session() as game:
                before = 0.0
                for obs, wanted, reward in world.steps:
                    request = {"session": session, "observation": obs, "reward": before}
                    over_http = post(port, "/act", request)["action"]
                    assert_same_action(world.action_space, over_http, wanted, same_kind=False)
                    over_websocket = game.act(obs, reward=before)
                    assert_same_action(world.action_space, over_websocket, wanted, same_kind=False)
                    before = reward
            assert_same_tensors(port, world)


def assert_same_tensors(port: int, world: World) -> None:
    """Assert that the Open Inference Protocol gives the actions of all first steps of episodes."""
    observations = [obs for obs, _, _ in world.steps]
    actions, _, _ = world.policy.compute_actions(observations)
    inputs = []
    for name, tensor in tensors_of("obs", world.observation_space).items():
        rows = np.array(
            [functools.reduce(operator.getitem, tensor.path, obs) for obs in observations],
            tensor.dtype,
        )
        inputs.append(
            {
                **tensor.described(),
                "name": name,
                "shape": list(rows.shape),
                "data": rows.ravel().tolist(),
            }
        )
    answer = post(port, f"/v2/models/{aiorl.DEFAULT_POLICY_ID}/infer", {"inputs": inputs[::-1]})
    outputs = {output["name"]: output for output in answer["outputs"]}
    for name, tensor in tensors_of("action", world.action_space).items():
        wanted = np.array(
            [functools.reduce(operator.getitem, tensor.path, action) for action in actions]
        )
        data = np.array(outputs[name]["data"]).reshape(outputs[name]["shape"])
        np.testing.assert_allclose(data, wanted, rtol=1e-5, atol=1e-5)
