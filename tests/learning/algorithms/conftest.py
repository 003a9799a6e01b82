"""Small models and made-up fragments for the algorithms' tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import make_distribution
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.learning.models.actor_critic import ActorCritic
from aiorl.learning.models.catalog import build_model

Fragment = dict[str, NDArray[Any]]


@pytest.fixture(scope="module", autouse=True)
def unoptimised_graphs() -> Iterator[None]:
    """Graphs run once or twice here: to optimise them takes longer than they do."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture(scope="session")
def make_model() -> Callable[..., ActorCritic]:
    """Builds a model of 8 hidden units for 3-vectors and two actions, unless told otherwise."""

    def make(action_space: spaces.Space[Any] | None = None, obs_shape: tuple[int, ...] = (3,), **settings: Any) -> Any:
        distribution = make_distribution(action_space or spaces.Discrete(2))
        dtype = "uint8" if len(obs_shape) == 3 else "float32"
        config = {"fcnet_hiddens": (8,), "lstm_cell_size": 4, **settings}
        return build_model(obs_shape, dtype, distribution, config, seed=1)

    return make


@pytest.fixture(scope="session")
def make_fragment() -> Callable[..., Fragment]:
    """Builds a fragment [T, N] with all that a sample plan asks for, as a worker of that model would send it."""

    def make(
        plan: SamplePlan, model: ActorCritic, length: int, num_envs: int, seed: int = 0, *, invalid: bool = False
    ) -> Fragment:
        rng = np.random.default_rng(seed)
        distribution = model.distribution
        shape = (length, num_envs)
        obs = (rng.random((*shape, *model.obs_shape)) * 4).astype(model.obs_dtype)
        inputs = rng.normal(size=(*shape, distribution.num_inputs)).astype(np.float32) * 0.3
        flat = inputs.reshape(-1, distribution.num_inputs)
        actions, logp = distribution.sample_with_logp(flat, distribution.draw_noise(rng, len(flat)))
        columns: Fragment = {
            c.OBS: obs,
            c.ACTIONS: actions.reshape(*shape, *distribution.action_shape),
            c.ACTION_LOGP: logp.reshape(shape),
            c.ACTION_DIST_INPUTS: inputs,
            c.TERMINATEDS: rng.random(shape) < 0.1,
            c.TRUNCATEDS: rng.random(shape) < 0.1,
        }
        columns[c.PREV_ACTIONS] = np.roll(columns[c.ACTIONS], 1, axis=0)
        for name in (c.REWARDS, c.PREV_REWARDS, c.ADVANTAGES, c.VALUE_TARGETS, c.VF_PREDS):
            columns[name] = rng.normal(size=shape).astype(np.float32)
        columns[c.BOOTSTRAP_VALUES] = np.where(columns[c.TRUNCATEDS], rng.normal(size=shape), 0).astype(np.float32)
        columns[c.LAST_OBS] = (rng.random((num_envs, *model.obs_shape)) * 4).astype(model.obs_dtype)
        for index, state in enumerate(model.state_shapes):
            columns[c.state_in(index)] = rng.normal(size=(num_envs, *state)).astype(np.float32)
        fragment = {name: columns[name] for name in plan.columns}
        if invalid:
            fragment[c.VALID] = rng.random(shape) < 0.8
            fragment[c.VALID][-1] = True
        return fragment

    return make
