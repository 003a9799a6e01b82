"""Algorithms with tiny networks, and fragments in the form that workers send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from aiorl.acting.distributions import make_distribution
from aiorl.data import columns as c
from aiorl.data.fragment import SamplePlan
from aiorl.data.obs_layout import ObsLayout
from aiorl.learning.algorithm import (
    AlgorithmState,
    LeasePlan,
    Observations,
    UpdateResult,
    experience_of,
)
from aiorl.learning.algorithms.registry import algorithm_class
from aiorl.learning.learner import Learner
from aiorl.learning.models.actor_critic import ActorCritic
from aiorl.learning.models.catalog import build_model
from aiorl.learning.steps import Descent

Fragment = dict[str, NDArray[Any]]

NUM_OBS, START = 4, 5
BOX = spaces.Box(np.array([-2.0, 1.0], np.float32), np.array([2.0, 5.0], np.float32))
CHOICES = spaces.Discrete(3, start=START)

_ONE_STEP = {
    "rollout_fragment_length": 6,
    "num_envs_per_worker": 4,
    "train_batch_size": 48,
    "sgd_minibatch_size": 48,
}
_STEPS = {**_ONE_STEP, "sgd_minibatch_size": 24, "num_sgd_iter": 1}
_REPLAY = {
    "rollout_fragment_length": 4,
    "num_envs_per_worker": 2,
    "train_batch_size": 4,
    "training_intensity": 1,
    "learning_starts": 8,
    "replay_capacity": 64,
}
_OFFLINE = {"input": "data"}
SETTINGS: dict[str, dict[str, Any]] = {
    "a2c": _ONE_STEP,
    "a3c": {**_ONE_STEP, "gradients": "learner"},
    "apex": {**_REPLAY, "num_workers": 2, "prioritized_replay": True, "n_step": 1},
    "appo": _STEPS,
    "bc": {**_STEPS, **_OFFLINE},
    "cql": {**_REPLAY, **_OFFLINE, "cql_actions": 3},
    "dqn": {**_REPLAY, "prioritized_replay": True},
    "impala": _STEPS,
    "iql": {**_REPLAY, **_OFFLINE},
    "marwil": {**_STEPS, **_OFFLINE},
    "pg": {**_ONE_STEP, "batch_mode": "complete_episodes"},
    "ppo": _STEPS,
    "sac": _REPLAY,
    "td3": _REPLAY,
}
"""Sizes at which an update takes a step or two."""
WITH_REPLAY = ("apex", "cql", "dqn", "iql", "sac", "td3")
OF_FRAGMENTS = ("a2c", "a3c", "appo", "bc", "impala", "marwil", "pg", "ppo")


class Case:
    """An algorithm and its network of 8 tanh units, eager unless settings say otherwise.

    Attributes:
        learner: learner of the algorithm.
        config: its settings.
        model: its network.
        plan: the data that workers send to it.
    """

    def __init__(
        self,
        name: str,
        space: spaces.Space[Any] | None = None,
        *,
        obs_shape: tuple[int, ...] = (NUM_OBS,),
        num_mask: int = 0,
        net_seed: int = 1,
        **settings: Any,
    ) -> None:
        """Build the algorithm; the space is BOX if the algorithm does not support choices,
        otherwise CHOICES.
        """
        kind = algorithm_class(name)
        self.config: Any = config_of(name, **settings)
        layout = ObsLayout(obs_shape, num_mask=num_mask)
        seen = Observations(
            layout.array_shape, "uint8" if len(obs_shape) == 3 else "float32", layout
        )
        self.model: Any = kind.build_model(
            self.config, seen, space or (BOX if name == "td3" else CHOICES), net_seed
        )
        self.plan = experience_of(kind, self.config).sample_plan
        self.learner: Any = Learner(kind, self.config, self.model)

    def fragment(
        self,
        seed: int = 0,
        length: int | None = None,
        num_envs: int | None = None,
        *,
        invalid: bool = False,
    ) -> Fragment:
        """Return a fragment [T, N], of the usual size by default."""
        length = self.config.rollout_fragment_length if length is None else length
        num_envs = self.config.num_envs_per_worker if num_envs is None else num_envs
        return make_fragment(self.plan, self.model, length, num_envs, seed, invalid=invalid)

    def fragments(self, seed: int = 0, **options: Any) -> list[Fragment]:
        """Return the fragments of one train batch."""
        count = lease_plan_of(self.config).fragments_per_batch
        return [self.fragment(10 * seed + index, **options) for index in range(count)]

    def update(self, fragments: Sequence[Fragment], env_steps: int = 0) -> UpdateResult:
        """Train on fragments."""
        result: UpdateResult = self.learner.update(self.learner.make_batch(fragments), env_steps)
        return result

    def train(self, *seeds: int, **options: Any) -> list[UpdateResult]:
        """Train on the train batch of each seed."""
        return [self.update(self.fragments(seed, **options)) for seed in seeds or (0,)]

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the tensors of the state."""
        found: dict[str, NDArray[Any]] = self.learner.get_state().tensors
        return found

    def saved(self) -> tuple[AlgorithmState, dict[str, Any], list[Any]]:
        """Return the state, and the stored values and pieces, in the form that a checkpoint
        returns.
        """
        state, held = self.learner.get_state(), self.learner.hold_experience()
        pieces = (
            []
            if held is None
            else [(name, first, rows.copy()) for name, first, rows in held.pieces()]
        )
        values = {} if held is None else json.loads(json.dumps(held.values))
        return AlgorithmState(state.tensors, json.loads(json.dumps(state.values))), values, pieces

    def restore(self, state: AlgorithmState, values: dict[str, Any], pieces: list[Any]) -> None:
        """Restore a state of `saved`."""
        self.learner.set_state(state)
        if values:
            self.learner.restore_experience(values, pieces)


def config_of(name: str, **settings: Any) -> Any:
    """Return the settings of a `Case`, without its network."""
    model = {
        "fcnet_hiddens": [8],
        "fcnet_activation": "tanh",
        "lstm_cell_size": 4,
        **settings.pop("model", {}),
    }
    small = {"env": "x", "seed": 3, "eager": True, "lr": 0.01, **SETTINGS[name], "model": model}
    return algorithm_class(name).config_class.from_mapping(small | settings)


def lease_plan_of(config: Any) -> LeasePlan:
    """Return the leases that the algorithm of a config wants."""
    return experience_of(algorithm_class(config.algo), config).lease_plan()


def plan_of(config: Any) -> SamplePlan:
    """Return the data that workers send with a config."""
    return experience_of(algorithm_class(config.algo), config).sample_plan


def descents_of(step: Any) -> list[Descent]:
    """Return the steps against gradients that a step is made of, in order."""
    if isinstance(step, Descent):
        return [step]
    return [each for part in getattr(step, "steps", ()) for each in descents_of(part)]


def loss_of_batch(learner: Any, batch: Any, knobs: Any) -> Any:
    """Return the loss of a laid-out train batch as one minibatch, and its further tensors."""
    begin, unpack = learner.feed.reading(learner.update_plan.loop)
    if begin is not None:
        batch = begin(batch, knobs)
    (descent,) = descents_of(learner.update_plan.loop.step)
    return descent.loss(unpack(batch), knobs)


def shapes_written(learner: Any) -> list[tuple[int, ...]]:
    """Return a list that grows by the shape of the priorities of each call of a learner's update."""
    shapes: list[tuple[int, ...]] = []
    take_back = learner.feed.take_back

    def noting(made: Any, written: Any) -> None:
        shapes.append(written[c.PRIORITIES].shape)
        take_back(made, written)

    learner.feed.take_back = noting
    return shapes


def gradients_of(learner: Any, *, xla: Any = "eager") -> Any:
    """Return what computes gradients at the weights of a learner, as its workers do."""
    experience: Any = experience_of(algorithm_class(learner.config.algo), learner.config)
    return experience.gradients(learner.model, learner.update_plan, xla=xla)


def equal(x: dict[str, Any], y: dict[str, Any]) -> bool:
    """Return True if tensors by name are identical."""
    return x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)


def make_model(
    space: spaces.Space[Any] | None = None, obs_shape: tuple[int, ...] = (3,), **settings: Any
) -> ActorCritic:
    """Make a network of 8 hidden units for 3-vectors and, by default, two actions."""
    config = {"fcnet_hiddens": (8,), "lstm_cell_size": 4, **settings}
    distribution = make_distribution(space or spaces.Discrete(2))
    return build_model(
        obs_shape, "uint8" if len(obs_shape) == 3 else "float32", distribution, config, seed=1
    )


def make_fragment(
    plan: SamplePlan,
    model: ActorCritic,
    length: int,
    num_envs: int,
    seed: int = 0,
    *,
    invalid: bool = False,
) -> Fragment:
    """Return a fragment [T, N] with all parts of a sample plan, as a worker with that network would
    send it.
    """
    rng, kind, shape = np.random.default_rng(seed), model.distribution, (length, num_envs)

    def normal(*leading: int) -> NDArray[np.float32]:
        return rng.normal(size=leading).astype(np.float32)

    def obs(*leading: int) -> NDArray[Any]:
        return (rng.random((*leading, *model.obs_shape)) * 4).astype(model.obs_dtype)

    inputs = 0.3 * normal(length * num_envs, kind.num_inputs)
    actions = kind.sample(inputs, rng)
    columns: Fragment = {
        c.OBS: obs(*shape),
        c.NEW_OBS: obs(*shape),
        c.LAST_OBS: obs(num_envs),
        c.ACTIONS: actions.reshape(*shape, *kind.action_shape),
        c.ACTION_DIST_INPUTS: inputs.reshape(*shape, kind.num_inputs),
        c.TERMINATEDS: rng.random(shape) < 0.1,
        c.TRUNCATEDS: rng.random(shape) < 0.1,
        c.DISCOUNTS: rng.choice([0.0, 0.9], shape).astype(np.float32),
        c.N_STEPS: np.ones(shape, np.int32),
        c.PIECE: np.full(shape, seed + 1, np.int64),
        c.PRIORITIES: rng.random(shape).astype(np.float32),
    }
    columns[c.ACTION_LOGP] = kind.logp(inputs, actions).reshape(shape)
    columns[c.PREV_ACTIONS] = np.roll(columns[c.ACTIONS], 1, axis=0)
    for name in (
        c.REWARDS,
        c.PREV_REWARDS,
        c.ADVANTAGES,
        c.VALUE_TARGETS,
        c.VF_PREDS,
        c.N_STEP_RETURNS,
    ):
        columns[name] = normal(*shape)
    columns[c.BOOTSTRAP_VALUES] = np.where(columns[c.TRUNCATEDS], normal(*shape), np.float32(0))
    for index, state in enumerate(model.state_shapes):
        times = (-(-length // plan.state_every),) if plan.state_every else ()
        columns[c.state_in(index)] = normal(num_envs, *times, *state)
    fragment = {name: columns[name] for name in plan.columns}
    if invalid:
        fragment[c.VALID] = rng.random(shape) < 0.8
        fragment[c.VALID][-1] = True
    return fragment
