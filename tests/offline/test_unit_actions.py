"""Stored actions of a Box that are scaled to [-1, 1]: scaled back on request, otherwise noticed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium import spaces

from aiorl.acting.distributions import make_distribution
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import ConfigError
from aiorl.offline.commands import main
from aiorl.offline.io import InputReader, IOContext
from aiorl.offline.readers import PreparedReader
from aiorl.offline.sources import InputSettings, input_creator

BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
NARROW = spaces.Box(-1.0, 1.0, (2,))
WITHIN_UNIT = np.linspace(-1.0, 1.0, 600).reshape(300, 2)


def stored(path, actions, **columns):
    """Return a file as RLlib writes it."""
    actions = np.asarray(actions, np.float32)
    line = {
        "type": "SampleBatch",
        "obs": [[0.0]] * len(actions),
        "actions": actions.tolist(),
        **columns,
    }
    path.write_text(json.dumps(line) + "\n")
    return str(path)


def read(path, space, times=1, **settings):
    """Return the batches that a worker with a policy of that action space reads."""
    worker = SimpleNamespace(
        policy_map={"default_policy": SimpleNamespace(action_space=space)}, filters={}
    )
    reader = input_creator(path, InputSettings(**settings))(IOContext(None, {}, 0, worker))
    return [reader.next() for _ in range(times)][-1]


def test_scaled_actions_become_those_of_the_environment_with_their_densities(tmp_path):
    unit, logp = np.array([[-1.0, 0.5], [0.25, 1.5]], np.float32), np.array([-1.0, 0.3], np.float32)
    columns = {
        "prev_actions": unit.tolist(),
        "action_logp": logp.tolist(),
        "action_prob": np.exp(logp).tolist(),
    }
    rows = read(stored(tmp_path / "a.json", unit, **columns), BOX, actions_normalized=True)
    np.testing.assert_allclose(rows["actions"], [[-2.0, 7.5], [0.5, 10.0]])
    np.testing.assert_allclose(rows["prev_actions"], rows["actions"])
    # the density of a Gaussian is equal
    low, high = make_distribution(NARROW), make_distribution(BOX)
    inputs = np.array([[0.1, 0.2, -0.5, 0.0]], np.float32)
    wide = np.array([[0.2, 6.0, -0.5 + np.log(2.0), np.log(5.0)]], np.float32)
    change = high.logp(wide, np.array([[0.5, 7.5]], np.float32)) - low.logp(
        inputs, np.array([[0.25, 0.5]], np.float32)
    )
    np.testing.assert_allclose(rows["action_logp"] - logp, np.repeat(change, 2), rtol=1e-4)
    np.testing.assert_allclose(rows["action_prob"], np.exp(rows["action_logp"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("space", "actions", "warns"),
    [
        (BOX, WITHIN_UNIT, True),
        (BOX, 1.1 * WITHIN_UNIT, False),
        (NARROW, WITHIN_UNIT, False),
        (spaces.Discrete(3), np.ones(300), False),
    ],
)
def test_a_run_warns_if_all_actions_of_a_wider_box_lie_within_unit_bounds(
    space, actions, warns, tmp_path, caplog
):
    path = stored(tmp_path / "a.json", actions)
    read(path, space, times=5)
    assert ("actions_in_input_normalized" in caplog.text) == warns
    assert len(caplog.records) == warns


def test_a_reader_that_returns_the_same_batch_again_finds_it_unchanged():
    class Same(InputReader):
        batch = SampleBatch(
            obs=np.zeros((1, 1), np.float32), actions=np.array([[0.5, 0.5]], np.float32)
        )

        def next(self):
            return self.batch

    def take_in(policy_id, rows):
        rows["actions"] = rows["actions"] * 2

    reader = PreparedReader([Same()], take_in=take_in)
    assert reader.next()["actions"].tolist() == reader.next()["actions"].tolist() == [[1.0, 1.0]]


def test_actions_of_an_unbounded_space_cannot_be_scaled_back(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(stored(tmp_path / "a.json", [[0.0]]), spaces.Discrete(3), actions_normalized=True)
    assert caught.value.key == "actions_in_input_normalized"


def test_commands_show_the_action_space_and_scale_actions_back(tmp_path, capsys):
    path = stored(tmp_path / "a.json", [[-0.977], [0.9755]])
    assert main(["inspect", path, "--env", "Pendulum-v1"]) == 0
    output = capsys.readouterr().out
    assert "Box(-2.0, 2.0, (1,), float32)" in output
    assert "actions_in_input_normalized" in output
    out = str(tmp_path / "b.json")
    assert (
        main(
            ["convert", path, "--out", out, "--env", "Pendulum-v1", "--actions-in-input-normalized"]
        )
        == 0
    )
    np.testing.assert_allclose(
        read(out, spaces.Box(-1.0, 1.0, (1,)))["actions"], [[-1.954], [1.951]]
    )
    assert main(["inspect", out, "--env", "Pendulum-v1"]) == 0
    assert "actions_in_input_normalized" not in capsys.readouterr().out
    assert (
        main(["convert", path, "--out", str(tmp_path / "c.json"), "--actions-in-input-normalized"])
        == 2
    )
