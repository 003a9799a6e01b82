"""Samplers that send initial priorities: the errors of their rows by the network's own values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from units import sent, unit_of

from aiorl.acting.postprocess import n_step_new_obs
from aiorl.data import columns as c
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.learning.algorithms.apex import ApexConfig
from aiorl.learning.losses.q_learning import expected_q
from aiorl.run.build import Learning, build_learning
from aiorl.run.ingest import check_samples

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_envs_per_worker": 3,
    "rollout_fragment_length": 40,
    "train_batch_size": 8,
    "seed": 3,
    "model": {"fcnet_hiddens": [8]},
    "eager": True,
    "compilation_cache": "off",
    "replay_capacity": 500,
    "learning_starts": 400,
    "horizon": 15,
    "prioritized_replay_alpha": 1.0,
}
WAYS: dict[str, dict[str, Any]] = {
    "copies": {},
    "vectorised": {"vectorize": "native", "horizon": None},
    "whole episodes": {"batch_mode": "complete_episodes"},
    "polled": {"env": "general_runs:Poles"},
    "one step": {"n_step": 1},
    "distributions": {"num_atoms": 7, "v_min": 0.0, "v_max": 20.0},
    "masked": {"env": "masked_env:ForbiddingEnv"},
}


SLOW = {"vectorised", "whole episodes", "one step"}


@pytest.fixture(
    params=[pytest.param(way, marks=pytest.mark.slow) if way in SLOW else way for way in WAYS]
)
def sampled(request: pytest.FixtureRequest) -> tuple[Learning, dict[str, Any]]:
    """Return a learner, and a fragment that it received over the wire."""
    learning = build_learning(ApexConfig(**{**SMALL, **WAYS[request.param]}))
    unit = unit_of(learning)
    message = sent(unit)
    unit.close()
    learning.group.check_fragment(message.batches)
    check_samples(message)
    return learning, message.batches[DEFAULT_POLICY_ID]


@pytest.mark.rest_slow
def test_a_rows_priority_is_the_acting_networks_error_and_the_replay_uses_it(
    sampled: tuple[Learning, dict[str, Any]],
) -> None:
    learning, fragment = sampled
    learner: Any = learning.group.learners[DEFAULT_POLICY_ID]
    model = learner.model

    def values(obs: Any) -> Any:
        """Q values of all actions, without illegal ones."""
        found, mask = model.q(tf.constant(obs.reshape(-1, *obs.shape[2:])))
        found = found if model.atoms is None else expected_q(found, model.atoms)
        found = (
            found.numpy() if mask is None else np.where(mask.numpy() > 0, found.numpy(), -np.inf)
        )
        return found.reshape(*obs.shape[:2], -1)

    discounts, following = fragment[c.DISCOUNTS], values(n_step_new_obs(fragment)).max(axis=2)
    actions = fragment[c.ACTIONS].astype(int) - model.distribution.start
    taken = np.take_along_axis(values(fragment[c.OBS]), actions[..., None], axis=2)[..., 0]
    behind = np.multiply(discounts, following, out=np.zeros_like(following), where=discounts > 0)
    expected = np.abs(fragment[c.N_STEP_RETURNS] + behind - taken)
    valid = fragment.get(c.VALID, np.ones(expected.shape, bool))
    found = fragment[c.PRIORITIES]
    np.testing.assert_allclose(found[valid], expected[valid], rtol=1e-4, atol=1e-5)
    assert not found[~valid].any()
    assert len(np.unique(found[valid].round(3))) > 10
    assert (discounts == 0).any()

    replay = learner.feed.replay
    learning.group.make_batch([{DEFAULT_POLICY_ID: fragment}])
    num_rows = len(replay)
    # the learner has computed larger errors than these
    replay.update_priorities(np.array([0]), np.array([100.0]))
    learning.group.make_batch([{DEFAULT_POLICY_ID: fragment}])
    stored = replay._priorities.tree.priorities[num_rows : 2 * num_rows]
    np.testing.assert_allclose(stored, found[valid] + 1e-6, rtol=1e-6)
