"""New runs that begin with the weights and filter statistics of another run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_runs import save_run

import aiorl
from aiorl.acting.checkpoint import find_checkpoint
from aiorl.errors import CheckpointError
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.build import build_learning
from aiorl.run.restoring import begin_with

DEFAULT = aiorl.DEFAULT_POLICY_ID
SMALL = {"fcnet_hiddens": [8]}
SETTINGS: dict[str, Any] = {"env": "CartPole-v1", "seed": 1, "eager": True, "model": SMALL}


def test_only_weights_and_filters_come_from_the_other_run(tmp_path: Path) -> None:
    seen = np.random.default_rng(2).normal(1.0, 3.0, (30, 4)).astype(np.float32)
    settings = {**SETTINGS, "observation_filter": "MeanStdFilter"}
    theirs = save_run(tmp_path, {DEFAULT: seen}, **settings)
    for algo in ("ppo", "impala"):  # with equal networks
        ours = build_learning(config_class(algo).from_mapping(settings))
        before = ours.group.get_state()
        begin_with(find_checkpoint(tmp_path), ours)
        for name, weight in theirs.group.get_weights()[DEFAULT].items():
            np.testing.assert_array_equal(ours.group.get_weights()[DEFAULT][name], weight)
        state = ours.filters[DEFAULT].state()
        assert state["n"] == 30
        np.testing.assert_allclose(state["mean"], seen.mean(0), rtol=1e-5)
        after = ours.group.get_state()
        assert after.values == before.values
        for name, tensor in before.tensors.items():
            if "/weights/" not in name:
                np.testing.assert_array_equal(after.tensors[name], tensor)


@pytest.mark.parametrize("fits", [True, False])
def test_critics_are_taken_along_with_their_actor_if_they_fit(
    tmp_path: Path, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aiorl")
    settings = {
        "env": "Pendulum-v1",
        "algo": "sac",
        "replay_capacity": 2000,
        "checkpoint_replay": False,
        "eager": True,
        "model": SMALL,
    }
    theirs = save_run(tmp_path, **settings, twin_q=fits)
    ours = build_learning(config_class("sac").from_mapping({**settings, "seed": 1}))
    before = ours.group.get_state().tensors
    begin_with(find_checkpoint(tmp_path), ours)
    after, wanted = ours.group.get_state().tensors, theirs.group.get_state().tensors
    critics = [name for name in before if "/critics/" in name]
    assert any("/target/critics/" in name for name in critics)
    for name in critics:
        np.testing.assert_array_equal(after[name], wanted[name] if fits else before[name])
    assert any((before[name] != after[name]).any() for name in critics) is fits
    assert (str(tmp_path) in caplog.text) is not fits


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with these settings and return its directory; do not change it."""
    directory = tmp_path_factory.mktemp("plain")
    save_run(directory, **SETTINGS)
    return directory


def with_policies(*policy_ids: str, **more: Any) -> dict[str, Any]:
    """Return settings with these policies, of which the first one acts."""
    mapping = dict.fromkeys(("a0", "a1"), policy_ids[0])
    settings = {
        "env": "aiorl.testing.multi_agent_envs:CountingMultiAgentEnv",
        "observation_filter": "MeanStdFilter",
    }
    own = {"policies": dict.fromkeys(policy_ids), "policy_mapping_fn": mapping}
    return {**SETTINGS, **settings, "multiagent": own, **more}


def test_policies_that_the_other_run_lacks_stay_new_and_warnings_name_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = np.ones((5, 3), np.float32)
    theirs = save_run(tmp_path, {"old": seen, "gone": seen}, **with_policies("old", "gone"))
    ours = build_learning(config_class("ppo").from_mapping(with_policies("old", "new")))
    before = ours.group.get_weights()["new"]
    caplog.set_level(logging.WARNING, "aiorl")
    begin_with(find_checkpoint(tmp_path), ours)
    for name, weight in ours.group.get_weights()["old"].items():
        np.testing.assert_array_equal(weight, theirs.group.get_weights()["old"][name])
    for name, weight in ours.group.get_weights()["new"].items():
        np.testing.assert_array_equal(weight, before[name])
    assert [ours.filters[name].state()["n"] for name in ("old", "new")] == [5, 0]
    said = [record.getMessage() for record in caplog.records]
    assert [("'new'" in text, "'gone'" in text) for text in said] == [(True, False), (False, True)]
    others = build_learning(config_class("ppo").from_mapping(with_policies("other")))
    with pytest.raises(CheckpointError, match="'other'"):
        begin_with(find_checkpoint(tmp_path), others)


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {**SMALL, "fcnet_activation": "relu"}}, "model.fcnet_activation"),
        ({"algo": "dqn", "num_atoms": 5, "v_max": 20.0}, "v_max"),
        (
            {
                "model": {**SMALL, "initial_log_std": -1.0, "free_log_std": True},
                "env": "Pendulum-v1",
            },
            "",
        ),
        ({"lr": 0.5}, ""),
    ],
)
def test_settings_by_which_the_same_weights_mean_something_else_cause_a_warning(
    tmp_path: Path, settings: dict[str, Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    run_settings = {**SETTINGS, **settings}
    before = {
        "model.fcnet_activation": {"model": SMALL},
        "v_max": {"v_max": 10.0},
        "": {"lr": 0.25, "model": {**run_settings.get("model", {}), "initial_log_std": 0.0}},
    }
    save_run(tmp_path, **{**run_settings, **before[key]})
    ours = build_learning(config_class(run_settings.get("algo", "ppo")).from_mapping(run_settings))
    caplog.set_level(logging.WARNING, "aiorl")
    begin_with(find_checkpoint(tmp_path), ours)
    assert [key in record.getMessage() for record in caplog.records] == [True] * bool(key)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {"model": {"fcnet_hiddens": [8, 8]}}),
        ({}, {"env": "Acrobot-v1"}),
        ({}, {"model": {**SMALL, "use_lstm": True, "lstm_cell_size": 4}}),
        ({}, {"observation_filter": "MeanStdFilter"}),
        ({"observation_filter": "MeanStdFilter"}, {}),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    plain: Path, tmp_path: Path, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    if theirs:
        save_run(tmp_path, {DEFAULT: np.ones((5, 4), np.float32)}, **SETTINGS | theirs)
    learning = build_learning(config_class("ppo").from_mapping(SETTINGS | ours))
    before = learning.group.get_weights()[DEFAULT]
    with pytest.raises(CheckpointError):
        begin_with(find_checkpoint(tmp_path if theirs else plain), learning)
    for name, weight in learning.group.get_weights()[DEFAULT].items():
        np.testing.assert_array_equal(weight, before[name])
