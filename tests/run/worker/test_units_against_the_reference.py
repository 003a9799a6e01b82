"""Samples of a worker process equal those of the plain sampler in `reference_sampler` in the same
world.

The policy is a deterministic acting graph, so that the order of random draws does not matter.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from plain_graph import load_policy, make_graph
from random_cases import Case, Comparison, cases
from random_worlds import ACTION_SPACES, NATIVE_ID, OBS_SPACES, World
from reference_sampler import NothingComes, ReferenceSampler, Settings

from aiorl.acting.filters import make_filter
from aiorl.acting.preprocessors import preprocessor_for
from aiorl.config.worker import WorkerPart
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan, new_obs
from aiorl.net.wire.messages import Samples, Snapshot
from aiorl.run.worker.sampler_unit import SamplerUnit, UnitPlace

SAMPLES = 3
GAE = {"gamma": 0.9, "lam": 0.7}
IN_COLUMNS = (c.ADVANTAGES, c.VALUE_TARGETS, c.BOOTSTRAP_VALUES)
"""Columns that depend on the places where trajectories were cut."""

REMOTE = {
    "remote_worker_envs": True,
    "remote_env_batch_wait_ms": 60_000.0,
    "max_env_restarts_per_hour": 1000,
}

IN_LOCKSTEP = (
    c.OBS,
    c.NEW_OBS,
    c.ACTIONS,
    c.REWARDS,
    c.TERMINATEDS,
    c.TRUNCATEDS,
    c.ACTION_LOGP,
    c.ACTION_DIST_INPUTS,
    c.VF_PREDS,
    *IN_COLUMNS,
)
WHOLE = (*IN_LOCKSTEP, c.PREV_ACTIONS, c.PREV_REWARDS, c.DONES, c.EPS_ID, c.AGENT_INDEX, c.T)
"""Columns of whole rows, which need polled environments."""

FAST = settings(
    max_examples=12,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@st.composite
def unit_cases(draw: Any, vectorize: str, polled: bool) -> Case:
    """Worlds with one agent, all rows of which are trained on, as lockstep requires."""
    is_remote = vectorize == "remote"
    case = draw(cases("gym", remote=is_remote, may_break=is_remote))
    rnd = draw(st.randoms(use_true_random=False))
    config = case.config
    config["obs"] = rnd.choice(["box", "matrix", "discrete", "dict" if polled else "box"])
    config["action"] = "discrete"
    case.explores = case.no_done = case.soft = False
    case.clip_rewards = rnd.choice([None, True, False])
    case.observation_fn = None
    case.more = {
        "vectorize": vectorize,
        "polled": polled,
        "uses_previous_step": polled and rnd.random() < 0.5,
    }
    for play in config["plays"]:
        for episode in play:
            for shown in episode:
                shown["infos"] = {}
    if vectorize == "native":
        case.horizon = None
        config.pop("limit", None)
        config["autoreset"] = rnd.choice(["NextStep", "SameStep", "Disabled"])
        config["resets"] = "later" if config["autoreset"] == "NextStep" else "same"
        config["obs"] = rnd.choice(["box", "matrix"])
    if case.complete or config["resets"] == "later":
        # rows are then compared by episode, and an episode is identified by its rows
        config["obs"], case.filter = "box", "NoFilter"
    return case


def make_unit_of(case: Case, graph: Any) -> SamplerUnit:
    encoded, spec, weights = graph
    columns = WHOLE if case.more["polled"] else IN_LOCKSTEP
    part = WorkerPart.from_dict(
        {
            "env": (
                f"random_worlds:{NATIVE_ID}"
                if case.more["vectorize"] == "native"
                else "random_worlds:GymStage"
            ),
            "env_config": case.config,
            "num_envs_per_worker": case.num_envs,
            "rollout_fragment_length": case.fragment,
            "batch_mode": "complete_episodes" if case.complete else "truncate_episodes",
            "horizon": case.horizon,
            "observation_filter": case.filter,
            "clip_rewards": case.clip_rewards,
            "clip_actions": case.clip_actions,
            **(
                REMOTE
                if case.more["vectorize"] == "remote"
                else {"vectorize": case.more["vectorize"]}
            ),
            "policies": {
                DEFAULT_POLICY_ID: {
                    "sample_plan": dataclasses.asdict(SamplePlan("gae", GAE, columns))
                }
            },
        }
    )
    graphs = {DEFAULT_POLICY_ID: {"graph": encoded, "spec": spec.to_dict()}}
    return SamplerUnit(
        part, graphs, Snapshot(0, {DEFAULT_POLICY_ID: weights}, {}, {}, {}), UnitPlace(1, "ab12")
    )


def make_reference(case: Case, graph: Any) -> ReferenceSampler:
    encoded, spec, weights = graph
    preprocessor = preprocessor_for(OBS_SPACES[case.config["obs"]])
    policy = load_policy(
        encoded,
        spec.to_dict(),
        config={"postprocess": "gae", "postprocess_params": GAE, "bootstrap_values": True},
    )
    policy.set_weights(weights)
    return ReferenceSampler(
        World(case.config, case.config["resets"]),
        {DEFAULT_POLICY_ID: policy},
        None,
        {DEFAULT_POLICY_ID: preprocessor},
        {DEFAULT_POLICY_ID: make_filter(case.filter, preprocessor.shape)},
        Settings(
            fragment_length=math.inf if case.complete else case.fragment,
            pack=not case.complete,
            horizon=case.horizon,
            clip_rewards=float(case.clip_rewards or 0.0),
            clip_actions=case.clip_actions,
            num_envs=case.num_envs,
            target=case.fragment * case.num_envs,
        ),
    )


def rows_of(produced: Samples) -> dict[str, np.ndarray]:
    """Return a fragment's transitions, environment after environment."""
    arrays = dict(produced.batches[DEFAULT_POLICY_ID])
    valid = arrays.pop(c.VALID, np.ones(arrays[c.OBS].shape[:2], np.bool_))
    arrays[c.NEW_OBS] = new_obs(arrays)
    arrays = {name: arrays[name] for name in WHOLE if name in arrays}
    keep = valid.swapaxes(0, 1).reshape(-1)
    return {
        name: column.swapaxes(0, 1).reshape(-1, *column.shape[2:])[keep]
        for name, column in arrays.items()
    }


def run(case: Case) -> None:
    """Sample on both sides, and compare by fragment if both cut at the same rows, else by
    episode.
    """
    action_space = ACTION_SPACES[case.config["action"]]
    shape = preprocessor_for(OBS_SPACES[case.config["obs"]]).shape
    graph = make_graph(
        shape,
        action_space,
        recurrent=case.recurrent,
        uses_previous_step=case.more["uses_previous_step"],
    )
    reference = make_reference(case, graph)
    unit = make_unit_of(case, graph)
    try:
        if not case.more["polled"] and (case.complete or case.config["resets"] == "later"):
            compare_episodes(case, unit, reference)
        else:
            compare_fragments(unit, reference)
    finally:
        unit.close()


def compare_fragments(unit: SamplerUnit, reference: ReferenceSampler) -> None:
    same = Comparison()
    for number in range(SAMPLES):
        try:
            expected = reference.sample()
        except NothingComes:
            return
        produced = unit.sample()
        rows, where = rows_of(produced), f"sample {number}"
        assert (produced.env_steps, produced.agent_steps) == (
            expected.env_steps,
            expected.env_steps,
        )
        for name, column in expected.by_policy[DEFAULT_POLICY_ID].items():
            if name in rows:
                same.column(rows[name], column, name, f"{where}, {name}")
        found = sorted(
            zip(
                produced.episodes["lengths"].tolist(),
                produced.episodes["rewards"].tolist(),
                strict=True,
            )
        )
        same.check(
            found,
            sorted(tuple(metrics[:2]) for metrics in reference.get_metrics()),
            f"{where}, metrics",
        )


def compare_episodes(case: Case, unit: SamplerUnit, reference: ReferenceSampler) -> None:
    """Check that rows of an episode are equal, as far as both have sampled it."""
    sides: list[dict[Any, dict[str, list[Any]]]] = [{}, {}]
    is_whole = case.complete
    for _ in range(SAMPLES):
        collect(sides[0], rows_of(unit.sample()))
    for _ in range(8 * SAMPLES):
        collect(sides[1], reference.get_data().by_policy[DEFAULT_POLICY_ID])
    same, compared = Comparison(), 0
    for key, rows in sides[0].items():
        expected = sides[1].get(key)
        if expected is None:
            continue
        compared += 1
        for name in IN_LOCKSTEP:
            if name in IN_COLUMNS and not is_whole:
                continue
            count = min(len(rows[name]), len(expected[name]))
            assert not is_whole or count == len(rows[name]) == len(expected[name]), key
            got, wanted = (np.array(side[name][:count]) for side in (rows, expected))
            same.column(got, wanted, name, f"{name} of (copy, episode) {key}")
    assert compared


def collect(by_episode: dict[Any, dict[str, list[Any]]], rows: dict[str, np.ndarray]) -> None:
    for row, obs in enumerate(rows[c.OBS]):
        columns = by_episode.setdefault(
            (int(obs[0]), int(obs[1])), {name: [] for name in IN_LOCKSTEP}
        )
        for name, values in columns.items():
            values.append(rows[name][row])


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("vectorize", "polled"),
    [
        ("serial", False),
        ("native", False),
        pytest.param("serial", True, marks=pytest.mark.slow),
    ],
)
def test_a_worker_process_samples_as_the_reference_does(vectorize: str, polled: bool) -> None:
    @FAST
    @given(unit_cases(vectorize, polled))
    def play(case: Case) -> None:
        run(case)

    play()


@pytest.mark.slow
def test_ended_environment_processes_cost_the_rows_that_the_reference_predicts() -> None:
    """The processes are replaced, and rows packed before are kept."""

    @settings(FAST, max_examples=3, phases=[Phase.generate])
    @given(unit_cases("remote", True))
    def play(case: Case) -> None:
        run(case)

    play()
