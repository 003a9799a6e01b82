"""State-dependent noise (gSDE) in a worker's rows, in lockstep and polled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from units import entry, make_unit

from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.env.multi_agent_env import MultiAgentEnv
from aiorl.run.worker.sampler_unit import SamplerUnit
from benchmarks.acting_mlp import NumpyActor, make_acting_graph, mlp_weights

FEATURES, HELD, LENGTH = 2, 4, 9
BOX = spaces.Box(-1.0, 1.0, (1,))
NUM_OUTPUTS = 2 + FEATURES
WEIGHTS = mlp_weights(3, NUM_OUTPUTS)
WEIGHTS["pi_w2"] = 50.0 * WEIGHTS["pi_w2"]
COLUMNS = (c.OBS, c.ACTIONS, c.ACTION_DIST_INPUTS, c.ACTION_LOGP)


class Wandering(gymnasium.Env[Any, Any]):
    """Environment with random observations and episodes of 9 steps."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (3,)), BOX

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return (
            self.np_random.uniform(-1, 1, 3).astype(np.float32),
            1.0,
            self.steps == LENGTH,
            False,
            {},
        )


class WanderingPair(MultiAgentEnv):
    """Environment with two agents."""

    observation_space, action_space = Wandering.observation_space, BOX

    def __init__(self, context: Any = None) -> None:
        self.envs = {"a": Wandering(), "b": Wandering()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        made = {name: env.reset(seed=index) for index, (name, env) in enumerate(self.envs.items())}
        return {name: obs for name, (obs, _) in made.items()}, {}

    def step(self, action_dict: Any) -> Any:
        made = {name: env.step(action_dict[name]) for name, env in self.envs.items()}
        obs, rewards = ({name: parts[at] for name, parts in made.items()} for at in (0, 1))
        over = made["a"][2]
        return obs, rewards, {"__all__": over}, {"__all__": False}, {}


def make(**settings: Any) -> SamplerUnit:
    graph, spec = make_acting_graph(3, BOX, NUM_OUTPUTS, WEIGHTS)
    spec = dataclasses.replace(
        spec, distribution="diag_gaussian", num_dist_inputs=2, num_features=FEATURES
    )
    config = {"exploration": {"type": "StateDependentNoise", "sample_freq": HELD}}
    policies = {DEFAULT_POLICY_ID: entry(SamplePlan(columns=COLUMNS), config=config)}
    own = {
        "env": f"{__name__}:Wandering",
        "num_envs_per_worker": 2,
        "rollout_fragment_length": LENGTH,
        "seed": 3,
    }
    return make_unit(policies, (graph, spec, WEIGHTS), **{"vectorize": "serial", **own, **settings})


def tracks_of(
    unit: SamplerUnit, fragments: int
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return shares [S, F] and noise [S] of the steps of each agent, after checking the recorded
    probabilities.
    """
    found: list[list[Any]] = []
    for _ in range(fragments):
        columns = dict(unit.sample().batches[DEFAULT_POLICY_ID])
        found.append([columns[name] for name in COLUMNS])
    obs, actions, inputs, logp = (np.concatenate(parts) for parts in zip(*found, strict=True))
    outputs = NumpyActor(WEIGHTS)(obs)[0]
    # shares are not sent
    np.testing.assert_allclose(inputs, outputs[..., :2], rtol=1e-3, atol=1e-4)
    deviations = np.exp(inputs[..., 1])
    noise = (actions[..., 0] - inputs[..., 0]) / deviations
    np.testing.assert_allclose(
        logp, -0.5 * noise**2 - np.log(deviations) - 0.5 * np.log(2 * np.pi), atol=1e-3
    )
    return [(outputs[:, seat, 2:], noise[:, seat]) for seat in range(noise.shape[1])]


def have_one_matrix(shares: Any, noise: Any) -> bool:
    """Return True if a single matrix explains the noise of these steps, which are more than it has
    numbers.
    """
    assert len(noise) > FEATURES
    matrix = np.linalg.lstsq(shares, noise, rcond=None)[0]
    return bool(np.allclose(shares @ matrix, noise, atol=1e-4))


def check(tracks: Sequence[Any], begins: Sequence[int]) -> None:
    """Check that a track has one matrix from each step in `begins` to the next and no longer, and
    no other track's.
    """
    for shares, noise in tracks:
        for begin, end in itertools.pairwise(begins):
            if end - begin > FEATURES:
                assert have_one_matrix(shares[begin:end], noise[begin:end])
            if end < len(noise):
                assert not have_one_matrix(
                    shares[begin : end + FEATURES], noise[begin : end + FEATURES]
                )
    joined = [np.concatenate([track[part][: begins[1]] for track in tracks]) for part in range(2)]
    assert not have_one_matrix(*joined)


def test_in_lockstep_a_matrix_lasts_beyond_fragments_and_episodes() -> None:
    unit = make()
    tracks = tracks_of(unit, 3)
    assert unit.worker.sampler.lockstep is not None
    unit.close()
    check(tracks, range(0, 3 * LENGTH, HELD))


@pytest.mark.parametrize(
    ("settings", "agents"),
    [({"callbacks": "general_parts:Watching"}, 2), ({"env": f"{__name__}:WanderingPair"}, 4)],
)
def test_polled_turn_by_turn_each_agent_has_its_own_matrix_within_an_episode(
    settings: dict[str, Any], agents: int
) -> None:
    """Episodes are as long as fragments, which contain the rows of one agent after the other."""
    unit = make(**settings)
    ((shares, noise),) = tracks_of(unit, 1)
    assert unit.worker.sampler.lockstep is None
    unit.close()
    check(
        list(zip(np.split(shares, agents), np.split(noise, agents), strict=True)),
        range(0, LENGTH, HELD),
    )


def test_equal_seeds_give_equal_rows() -> None:
    found = []
    for _ in range(2):
        unit = make()
        found.append(tracks_of(unit, 2))
        unit.close()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one[1], other[1])
