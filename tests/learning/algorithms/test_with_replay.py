"""Algorithms with a replay: stored rows, due minibatches, draws, and log messages."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import (
    BOX,
    CHOICES,
    NUM_OBS,
    Case,
    Fragment,
    lease_plan_of,
    plan_of,
    shapes_written,
)
from costs import by_cost

from aiorl.acting.filters import MeanStdFilter
from aiorl.data import columns as c
from aiorl.data.columns import ColumnSpec
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import BatchError, CheckpointError, ConfigError
from aiorl.learning.algorithm import Observations, Update
from aiorl.learning.algorithms.apex import Apex, ApexConfig
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.learner import Learner
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.replay import spec as memory
from aiorl.learning.replay.episodes import EpisodeReplay
from aiorl.learning.replay.replay import Sample
from aiorl.learning.replayed import Replayed, replay_knobs, replay_spec, replayed
from aiorl.learning.steps import chain, descend, drawn, every


class SequenceReplay(EpisodeReplay):
    """Draws rows along with the two that follow them in their episode, as sequences [.., 3, ...]."""

    @property
    def sampled_columns(self) -> tuple[ColumnSpec, ...]:
        columns = [
            ColumnSpec(column.name, (3, *column.shape), column.dtype)
            for column in self.spec.columns
        ]
        return (*columns, ColumnSpec("is_row", (3,)))

    def sample(self, *args: Any, **options: Any) -> Sample:
        sample = super().sample(*args, **options)
        numbers = self.following(sample.ids, 3)
        is_row = numbers >= 0
        columns = self.read(np.where(is_row, numbers, sample.ids[..., None]))
        return sample._replace(columns={**columns, "is_row": is_row.astype(np.float32)})


DUE: dict[str, Any] = {"learning_starts": 16}
"""Eight rows of a fragment make two minibatches of four due; the first fragment is only stored."""


def of(case: Case) -> tuple[Any, Any]:
    """Return the experience and the model of a policy."""
    return DQN.experience(case.config), case.model


def steps(results: Any) -> list[float]:
    return [result.metrics["num_sgd_steps"] for result in results]


def pieces(case: Case, numbers: list[int]) -> list[Any]:
    """Train on numbered pieces of stored experience with eight rows each."""
    fragments = [
        {**case.fragment(number, 8, 1), c.PIECE: np.full((8, 1), number)} for number in numbers
    ]
    return [case.update([fragment]) for fragment in fragments]


def test_leases_are_kept_topped_up_within_a_limit_and_weights_are_sent_at_intervals() -> None:
    settings = {"fragments_per_update": 3, "max_env_steps_ahead": 100, "n_step": 3}
    case = Case("dqn", **settings, broadcast_updates=7, broadcast_interval_ms=20)
    plan = lease_plan_of(case.config)
    assert (plan.mode, plan.fragments_per_batch, plan.max_policy_lag, plan.max_under_way) == (
        "streaming",
        3,
        None,
        12,
    )
    assert (plan.publish_every, plan.publish_interval_s) == (7, 0.02)
    assert (case.plan.postprocess, case.plan.postprocess_params) == (
        "n_step",
        {"gamma": 0.99, "n": 3},
    )
    assert c.N_STEPS in case.plan.columns
    assert c.N_STEPS not in Case("dqn").plan.columns
    assert Case("dqn", max_env_steps_ahead=1).config.max_fragments_under_way() == 2


def test_apex_is_dqn_with_other_defaults_that_can_each_be_switched_off() -> None:
    config = ApexConfig(env="E")
    same = DQNConfig(**{**config.to_dict(), "algo": "dqn"})
    assert lease_plan_of(config) == lease_plan_of(same)
    assert plan_of(config) == plan_of(same)
    assert Apex.acting_settings(config) == {"exploration": {"type": "PerWorkerEpsilonGreedy"}}
    assert plan_of(config).postprocess_params == {"gamma": 0.99, "n": 3}
    parts = ("double_q", "dueling", "prioritized_replay", "worker_priorities", "per_worker_epsilon")
    assert all(getattr(config, name) for name in parts)
    off: dict[str, Any] = dict.fromkeys(parts, False)
    assert c.PRIORITIES in plan_of(config).columns
    assert c.PRIORITIES not in plan_of(ApexConfig(env="E", **off, n_step=1)).columns


def test_a_periodic_step_counts_the_minibatches_of_all_calls() -> None:
    """Whatever the other periods are: the target network moves after each minibatch."""
    rare = tf.Variable(0.0)

    class Mine(DQN):
        @staticmethod
        def update(config: Any, networks: Any) -> Any:
            update = DQN.update(config, networks)
            sgd = keras.optimizers.SGD()
            adds = descend([rare], lambda columns, knobs: (-rare, {}), sgd, name="rare")
            step = chain(update.loop.step, every(3, adds))
            return dataclasses.replace(update, loop=dataclasses.replace(update.loop, step=step))

    # one minibatch per fragment
    case = Case("dqn", target_update_freq=1, training_intensity=0.5, learning_starts=8, lr=1.0)
    learner = Learner(Mine, case.config, case.model)
    moves = []
    for number in range(6):
        learner.update(learner.make_batch(case.fragments(number)), 0)
        moves.append(float(rare.numpy()))
    assert moves == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("num_frames", "frame"), [(1, (8, 8, 4)), (4, (8, 8))])
def test_only_known_stacks_are_stored_frame_by_frame(
    num_frames: int, frame: tuple[int, ...]
) -> None:
    """Otherwise the four channels of an image would take the room of four rows."""
    config, layout = Case("dqn").config, ObsLayout((8, 8, 4), num_frames=num_frames)
    spec = replay_spec(
        config, DQN.build_model(config, Observations(layout.shape, "uint8", layout), CHOICES, 1)
    )
    assert (spec.stack, spec.frame["frame"].shape) == (num_frames, frame)


def test_the_log_has_the_size_of_the_replay_and_its_checkpoints(
    caplog: pytest.LogCaptureFixture,
) -> None:
    case, other = Case("dqn", checkpoint_keep=2), Case("dqn", checkpoint_replay=False)
    with caplog.at_level(logging.INFO):
        Replayed.check_room([of(case), of(other)])
    size = 64 * replay_spec(case.config, case.model).row.itemsize + 64 * 8
    assert f" {3 * size / 1e6:.3g} MB" in caplog.messages[0]
    assert " 0 MB" in caplog.messages[1]


def test_the_log_warns_of_waiting_workers_and_of_rows_without_all_n_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said(**settings: Any) -> list[str]:
        case = Case("dqn", **settings)
        caplog.clear()
        Replayed.check_room(2 * [of(case)])  # two policies, one lease plan
        return [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]

    shape = {"num_envs_per_worker": 8, "rollout_fragment_length": 2, "max_env_steps_ahead": 64}
    assert said(**shape, num_workers=4) == []
    (waiting,) = said(**shape, num_workers=5)
    assert all(number in waiting for number in (" 4 ", " 5 "))
    assert (
        said(n_step=2, rollout_fragment_length=8)
        == said(n_step=4, batch_mode="complete_episodes")
        == []
    )
    assert all(fact in said(n_step=3)[0] for fact in (" 50 %", "rollout_fragment_length", " 12 "))


def test_a_replay_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("dqn")
    needed = replay_spec(case.config, case.model).bytes_needed
    monkeypatch.setattr(memory, "available_bytes", lambda: needed)
    Replayed.check_room([of(case)])
    with pytest.raises(ConfigError, match=f" {2 * needed:,} "):
        Replayed.check_room(2 * [of(case)])


def test_minibatches_are_made_as_they_become_due_and_the_rest_is_carried_over() -> None:
    """Eight rows at an intensity of 1.25 make two and a half minibatches of four due."""
    results = Case("dqn", learning_starts=16, training_intensity=1.25).train(*range(6))
    assert steps(results) == [0, 2, 3, 2, 3, 2]
    last = results[-1].metrics
    assert (last["rows_stored"], last["rows_evicted"], last["rows_trained"]) == (48, 0, 48)
    assert last["training_intensity"] == pytest.approx(1.25, abs=0.1)


def test_remaining_minibatches_of_a_hurried_update_are_made_after_a_restore() -> None:
    """So the last checkpoint contains the replay, however many minibatches an update has."""
    first, second = Case("dqn", **DUE), Case("dqn", **DUE)
    first.train(0, 1)
    first.learner.hurry()
    (result,) = first.train(2)
    assert (result.metrics["num_sgd_steps"], result.metrics["rows_stored"]) == (0, 24)
    second.restore(*first.saved())
    assert steps(second.train(3)) == [4]


def test_nothing_is_traced_after_warm_up_and_rows_are_drawn_by_their_errors() -> None:
    case = Case("dqn", **DUE, eager=False, xla="off")
    case.learner.warm_up()
    written = shapes_written(case.learner)
    results = case.train(0, 1, 2)
    assert steps(results) == [0, 2, 2]
    case.update([case.fragment(98, 1), case.fragment(99, 7)])
    case.update([case.fragment(97, 32, 1)])
    assert case.learner.compiled.traces == 1
    assert results[-1].metrics["prioritized_replay_beta"] == pytest.approx(0.4, abs=0.01)
    assert set(written) == {(2, 4)}
    assert len(np.unique(case.learner.feed.replay.sample(4, num_batches=50, beta=1.0).weights)) > 10


def test_the_interval_of_target_updates_spans_calls() -> None:
    """2, 4 and 6 minibatches are made: the target follows at 3 and 6, or never."""
    name = "value/head/kernel"
    for freq, times in ((3, 2), (1000, 0)):
        case = Case("dqn", **DUE, target_update_freq=freq)
        targets = [case.tensors[f"target/{name}"]]
        for number in range(4):
            case.train(number)
            targets.append(case.tensors[f"target/{name}"])
        assert sum(bool((one != other).any()) for one, other in pairwise(targets)) == times
        assert (case.tensors[f"weights/{name}"] != targets[0]).any()


def test_an_update_can_train_on_sequences_of_rows_that_stay_within_an_episode() -> None:
    """Two environments, with episodes of 5 steps."""
    lengths = []

    class Mine(DQN):
        @staticmethod
        def experience(config: Any) -> Any:
            columns = SequenceReplay.fragment_columns
            return replayed(config, columns=columns, make_replay=SequenceReplay)

        @staticmethod
        def update(config: Any, networks: Any) -> Any:
            weight = tf.Variable(0.0)

            def loss(columns: Any, knobs: Any) -> Any:
                assert columns[c.OBS].shape == (4, 3, NUM_OBS)
                lengths.extend(tf.reduce_sum(columns["is_row"], axis=1).numpy().tolist())
                steps = columns[c.N_STEP_RETURNS]
                is_next = tf.abs(steps[:, 1] - steps[:, 0] - 1) < 0.1
                are_next = tf.reduce_all(is_next | (columns["is_row"][:, 1] < 1))
                return weight, {"are_next": tf.cast(are_next, tf.float32)}

            step = descend([weight], loss, keras.optimizers.SGD())
            return Update(loop=drawn(step, write_back=()), knobs=replay_knobs(config))

    case = Case("dqn", **DUE)
    learner = Learner(Mine, case.config, case.model)
    learner.warm_up()
    for first in range(0, 40, 4):
        steps = np.tile(np.arange(first, first + 4)[:, None], 2)
        episodes = {c.EPS_ID: steps // 5, c.AGENT_INDEX: steps * 0 + [0, 1], c.T: steps % 5}
        returns = {c.N_STEP_RETURNS: (steps % 5).astype(np.float32)}
        fragment = {**case.fragment(first), **episodes, **returns}
        learner.check_fragment(fragment)
        result = learner.update(learner.make_batch([fragment]), 0)
    assert result.metrics["are_next"] == 1
    assert set(lengths) == {1, 2, 3}


def test_with_a_small_tau_the_target_moves_a_little_in_each_minibatch() -> None:
    # one minibatch a fragment
    case = Case("dqn", target_update_freq=1, tau=0.5, training_intensity=0.5)
    name = "value/head/kernel"
    expected = case.tensors[f"target/{name}"]
    for number in range(3):
        case.train(number)
        expected = expected + 0.5 * (case.tensors[f"weights/{name}"] - expected)
        np.testing.assert_allclose(case.tensors[f"target/{name}"], expected, rtol=1e-5, atol=1e-7)


PRIORITISED = {
    "prioritized_replay": True,
    "worker_priorities": True,
    "prioritized_replay_alpha": 1.0,
}


def with_priorities(case: Case, number: int) -> Fragment:
    """Return a fragment in which only the second row has a large error."""
    fragment = case.fragment(number)
    fragment[c.PRIORITIES][:] = 0
    fragment[c.PRIORITIES][1, 0] = 1 + number
    return fragment


def test_rows_are_drawn_by_workers_priorities_until_they_are_trained_on() -> None:
    case = Case("dqn", **PRIORITISED, **DUE)
    fragment = with_priorities(case, 3)
    case.learner.make_batch([fragment])
    drawn = case.learner.feed.replay.sample(4, num_batches=8)
    np.testing.assert_array_equal(
        drawn.columns[c.OBS], np.broadcast_to(fragment[c.OBS][1, 0], (8, 4, NUM_OBS))
    )
    case.update([with_priorities(case, 4)])
    assert len(np.unique(case.learner.feed.replay.sample(4, num_batches=50).ids)) < 12
    for number in range(3):
        case.update([case.fragment(number) | {c.PRIORITIES: np.ones((4, 2), np.float32)}])
    assert len(np.unique(case.learner.feed.replay.sample(4, num_batches=50).ids)) > 20


@pytest.mark.parametrize(
    "priorities",
    [
        np.full((4, 2), np.inf, np.float32),
        np.full((4, 2), 1e39),
        np.zeros((2, 4), np.float32),
        np.zeros((4, 2), "U3"),
    ],
)
def test_invalid_priorities_are_refused(priorities: Any) -> None:
    case = Case("dqn", **PRIORITISED)
    fragment = {**case.fragment(), c.PRIORITIES: priorities}
    with pytest.raises(BatchError, match="priorities"):
        case.learner.check_fragment(fragment)


def test_rows_stored_with_other_settings_are_refused_unless_the_checkpoint_lacks_these() -> None:
    """Older checkpoints don't say; or the replay is left out."""
    case = Case("dqn")
    case.train(0, 1)
    _, values, stored = case.saved()
    for changed, facts in (
        ({"gamma": 0.5}, "gamma .*0.99 .*0.5"),
        ({"n_step": 2}, "n_step .*1 .*2"),
        ({"clip_rewards": True}, "clip_rewards .*None .*True"),
        ({"prioritized_replay_alpha": 1.0}, "prioritized_replay_alpha .*0.6 .*1.0"),
        ({"replay_capacity": 32}, "checkpoint_replay: false"),
    ):
        with pytest.raises(CheckpointError, match=facts):
            Case("dqn", **changed).learner.restore_experience(values, stored)
    without = Case("dqn", replay_capacity=32, checkpoint_replay=False)
    without.learner.restore_experience(values, stored)
    assert len(without.learner.feed.replay) == 0
    for name in (
        "gamma",
        "n_step",
        "clip_rewards",
        "prioritized_replay_alpha",
        "prioritized_replay_eps",
    ):
        del values["spec"][name]
    older = Case("dqn")
    older.learner.restore_experience(values, stored)
    assert len(older.learner.feed.replay) == 16


STORED: dict[str, Any] = {
    "learning_starts": None,
    "rollout_fragment_length": 8,
    "num_envs_per_worker": 1,
}
STORED["training_intensity"] = 0.5


def test_each_piece_is_stored_once_and_training_begins_when_one_is_read_again() -> None:
    """Rows that are read again make minibatches due, so the training intensity holds."""
    results = pieces(Case("cql", **STORED), [1, 2, 3, 2, 1, 3, 3])
    assert [result.metrics["replay_rows"] for result in results] == [8, 16, 24, 24, 24, 24, 24]
    assert steps(results) == [0, 0, 0, 1, 1, 1, 1]
    assert results[-1].metrics["training_intensity"] == pytest.approx(0.5)
    assert results[-1].metrics["rows_evicted"] == 0


def test_uneven_reading_makes_the_same_number_of_minibatches_due() -> None:
    """G7: one of two workers reads pieces 1 and 2 twice before the other brings 3 and 4."""
    results = pieces(Case("cql", **STORED), [1, 2, 1, 2, 3, 4, 3, 4])
    assert steps(results) == [0, 0, 1, 1, 0, 0, 1, 1]
    last = pieces(Case("cql", **STORED), [1, 2, 3, 4, 1, 2, 3, 4])[-1]
    assert results[-1].metrics["rows_trained"] == last.metrics["rows_trained"] == 16


def test_experience_larger_than_the_replay_is_stored_repeatedly() -> None:
    """Training begins when the replay is full."""
    results = pieces(Case("cql", **STORED, replay_capacity=16), [1, 2, 3, 1, 2, 3])
    assert steps(results) == [0, 1, 1, 1, 1, 1]
    assert [result.metrics["rows_stored"] for result in results] == [8, 16, 24, 32, 40, 48]


def test_a_replay_full_of_images_counts_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that follow no other have two images each, so not all rows have room; training begins
    then.
    """
    monkeypatch.setattr(memory, "_SPARE_FRAMES", 0)
    monkeypatch.setattr(memory, "RECENT_FRAMES", 0)
    model = {"conv_filters": [[2, [4, 4], 4]], "fcnet_hiddens": [4]}
    few = {**STORED, "rollout_fragment_length": 1, "replay_capacity": 32}
    case = Case("cql", **few, obs_shape=(4, 4, 2), model=model)
    for number in 2 * list(range(1, 21)):
        images = np.full((1, 1, 4, 4, 2), number, np.uint8)
        result = case.update([{**case.fragment(number), c.OBS: images, c.NEW_OBS: images + 100}])
    assert result.metrics["rows_evicted"] > 0
    assert result.metrics["rows_trained"] == pytest.approx(0.5 * 24, abs=4), (
        "there is room for 16 rows"
    )


def test_rows_without_a_piece_are_always_stored_and_count_for_learning_starts() -> None:
    """For example rows of a mixture."""
    results = pieces(Case("cql", **{**STORED, "learning_starts": 16}), [0, 0, 0])
    assert [result.metrics["rows_stored"] for result in results] == [8, 16, 24]
    assert steps(results) == [0, 1, 1]


def test_after_a_checkpoint_without_the_replay_everything_is_read_again() -> None:
    first, second = (Case("cql", **STORED, checkpoint_replay=False) for _ in range(2))
    pieces(first, [1, 2, 1])
    second.learner.set_state(first.learner.get_state())
    assert steps(pieces(second, [1, 2, 1])) == [0, 0, 1]
    assert len(second.learner.feed.replay) == 16


@pytest.mark.parametrize("name", ["cql", "iql"])
def test_missing_stored_experience_is_an_error_with_a_hint(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lease_plan_of(Case(name, input="sampler").config)
    assert caught.value.key == "input"
    assert "--input" in str(caught.value.hint)


def test_a_fragment_whose_pieces_do_not_fit_is_refused_and_where_nobody_asked_for_them() -> None:
    for name, column in (("cql", np.zeros((4, 2), np.float32)), ("dqn", np.ones((4, 2), np.int64))):
        case = Case(name)
        with pytest.raises(BatchError, match="piece"):
            case.learner.check_fragment({**case.fragment(), c.PIECE: column})


def test_raw_rows_are_filtered_by_the_current_merged_filter_when_drawn() -> None:
    own = MeanStdFilter((NUM_OBS,))
    filtered, plain = Case("dqn", observation_filter="MeanStdFilter"), Case("dqn")
    filtered.learner.feed.merged_filter = own
    assert filtered.plan.raw_obs
    assert not plain.plan.raw_obs
    raw = filtered.fragment()
    for column in (c.OBS, c.NEW_OBS):
        raw[column] = 100.0 + 5.0 * raw[column]
    stored = filtered.learner.make_batch([raw])
    own.learn(raw[c.OBS].reshape(-1, NUM_OBS))  # after the rows were stored
    shape = raw[c.OBS].shape
    changed = {
        key: own(raw[key].reshape(-1, NUM_OBS), update=False).reshape(shape)
        for key in (c.OBS, c.NEW_OBS)
    }
    filtered.learner.update(stored, 0)
    plain.update([{**raw, **changed}])
    for key, tensor in plain.tensors.items():
        np.testing.assert_allclose(filtered.tensors[key], tensor, atol=1e-4, err_msg=key)


def normalised(obs_shape: Any, num_outputs: int, settings: Any) -> Any:
    """Return features from layers with untrained weights and counts."""
    dense = keras.layers.Dense(settings.get("width", num_outputs), activation="tanh")
    return keras.Sequential(
        [keras.layers.Input(obs_shape), keras.layers.BatchNormalization(), dense]
    )


def with_values(obs_shape: Any, num_outputs: int, _: Any) -> Any:
    obs = keras.layers.Input(obs_shape)
    return keras.Model(obs, [keras.layers.Dense(num_outputs)(obs), keras.layers.Dense(1)(obs)])


@pytest.fixture
def users_models(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = keras.Sequential([keras.layers.Input((NUM_OBS,)), keras.layers.Dense(4)])

    def flat(shape: tuple[int, ...], *_: object) -> keras.Model:
        return keras.Sequential([keras.layers.Input(shape), keras.layers.Reshape([4, 1])])

    module = types.SimpleNamespace(
        normalised=normalised, with_values=with_values, flat=flat, shared=lambda *_: shared
    )
    monkeypatch.setitem(sys.modules, "users_models", module)


@pytest.mark.usefixtures("users_models")
@pytest.mark.parametrize(
    "name", by_cost(["dqn", "sac", "cql", "iql", "td3"], quick=("dqn", "sac"), nightly=())
)
def test_features_of_a_custom_model_are_trained_exported_and_used_for_acting(name: str) -> None:
    model = {"custom_model": "users_models:normalised", "width": 5, "fcnet_hiddens": [7]}
    more = {"dqn": {"num_atoms": 11, "dueling_hiddens": [4]}, "td3": {"policy_delay": 1}}.get(
        name, {}
    )
    case = Case(name, BOX if name in ("cql", "iql", "td3") else CHOICES, model=model, **more)
    before = case.tensors
    case.train()
    after = case.tensors
    own = [key for key in after if "custom/" in key and "optimizer" not in key and "/kernel" in key]
    assert own
    assert all((before[key] != after[key]).any() for key in own if "target" not in key)
    frozen = [key for key in after if "custom/" in key and "moving_mean" in key]
    assert frozen
    assert all((before[key] == after[key]).all() for key in frozen)
    export_acting_graph(case.model)  # compares the graph with the model


@pytest.mark.usefixtures("users_models")
def test_each_network_has_its_own_custom_model_with_seeded_initial_weights() -> None:
    model = {"custom_model": "users_models:normalised"}
    first, again = (Case("sac", model=model).tensors for _ in range(2))
    kernels = [name for name in first if name.endswith("custom/4/kernel") and "target" not in name]
    assert kernels == [
        f"{net}/custom/4/kernel"
        for net in ("weights/policy", "critics/critic_0", "critics/critic_1")
    ]
    assert len({first[name].tobytes() for name in kernels}) == 3
    assert all((first[name] == again[name]).all() for name in kernels)


@pytest.mark.usefixtures("users_models")
@pytest.mark.parametrize("name", ["with_values", "flat", "shared"])
def test_a_custom_model_without_its_own_features_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Case("sac", model={"custom_model": f"users_models:{name}"})
    assert caught.value.key == "model.custom_model"
