from __future__ import annotations

import json

import numpy as np
import pytest
from gymnasium import spaces

from benchmarks import sampler as bench
from benchmarks.acting_mlp import NumpyActor, make_onnx_policy, mlp_weights


def test_subject_and_baseline_hold_the_same_network():
    weights = mlp_weights(4, 2, seed=3)
    policy = make_onnx_policy(4, spaces.Discrete(2), 2, weights)
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    logits, values = NumpyActor(weights)(obs)
    result = policy.act(obs)
    np.testing.assert_allclose(result.columns["action_dist_inputs"], logits, atol=1e-6)
    np.testing.assert_allclose(policy.values(obs), values, atol=1e-6)


@pytest.mark.parametrize(("vectorize", "num_envs"), [("serial", 2), ("native", 3)])
def test_a_measurement_runs_and_prints_two_rates(vectorize, num_envs, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROUND_S", 0.01)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "pin_to_one_core", lambda: None)
    monkeypatch.setattr("sys.argv", ["sampler", vectorize, str(num_envs)])
    bench.main()
    value, baseline = json.loads(capsys.readouterr().out)
    assert value > 0
    assert baseline > 0
