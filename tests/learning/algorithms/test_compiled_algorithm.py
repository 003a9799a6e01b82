"""What holds for every algorithm with a compiled update: guard, state, determinism, one compilation."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

from aiorl.data import columns as c
from aiorl.errors import BatchError, CheckpointError, ConfigError, TrainingDiverged
from aiorl.learning.algorithms import compiled_algorithm
from aiorl.learning.algorithms.algorithm import Algorithm, AlgorithmState
from aiorl.learning.algorithms.compiled_base import MAX_SKIPS_IN_A_ROW
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.algorithms.rows import state_columns

SHAPE = {
    "rollout_fragment_length": 6, "num_envs_per_worker": 4, "train_batch_size": 48, "sgd_minibatch_size": 12,
    "xla": "off",  # compiling takes the longest here; test_compiled_update holds both kinds equal
}  # fmt: skip
ONE_STEP = {"eager": True, "num_sgd_iter": 1, "sgd_minibatch_size": 48}
"""For what one step shows, which tracing takes ten times as long as."""
ALL = pytest.mark.parametrize("name", ["ppo", "impala", "appo"])
ONE = pytest.mark.parametrize("name", ["ppo"])
"""For what the base class does alone."""


class Setup:
    """An algorithm and the fragments it asks for."""

    def __init__(self, make_model: Any, make_fragment: Any, name: str, net: Any = None, **settings: Any) -> None:
        self.config = config_class(name).from_mapping({"env": "x", "seed": 3, "num_sgd_iter": 2, **SHAPE, **settings})
        cls = algorithm_class(name)
        self.model = net or make_model(**settings.get("model", {}))
        self.plan = cls.sample_plan(self.config)
        self.algorithm: Algorithm = cls(self.config, self.model)
        self.make_fragment = make_fragment
        self.beginning = self.algorithm.get_state()

    def fragments(self, seed: int = 0, count: int = 2, **options: Any) -> list[dict[str, Any]]:
        return [self.make_fragment(self.plan, self.model, 6, 4, 10 * seed + index, **options) for index in range(count)]

    def train(self, seed: int = 0, **options: Any) -> Any:
        return self.algorithm.update(self.algorithm.make_batch(self.fragments(seed, **options)), 0)


@pytest.fixture(scope="module")
def kept() -> dict[str, list[Setup]]:
    """By their settings, with what they have compiled."""
    return {}


@pytest.fixture
def setup(kept: dict[str, list[Setup]], make_model: Callable[..., Any], make_fragment: Callable[..., Any]) -> Any:
    """Builds setups, or takes those of other tests as they were at first, which then need not compile again.

    ``is_new`` is for what asks how often it was compiled, or for which sizes.
    """
    taken: Counter[str] = Counter()

    def build(name: str, *, is_new: bool = False, **options: Any) -> Setup:
        if is_new or "net" in options:
            return Setup(make_model, make_fragment, name, **options)
        key = f"{name} {sorted((SHAPE | options).items(), key=lambda item: item[0])}"
        alike = kept.setdefault(key, [])
        if taken[key] == len(alike):
            alike.append(Setup(make_model, make_fragment, name, **options))
        it = alike[taken[key]]
        taken[key] += 1
        it.algorithm.set_state(it.beginning)
        return it

    return build


def equal(x: dict[str, Any], y: dict[str, Any]) -> bool:
    return x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)


@pytest.mark.slow
@ALL
def test_one_batch_is_one_compilation_whatever_is_in_it(setup: Callable[..., Setup], name: str) -> None:
    it = setup(name, is_new=True, lr_schedule=[[0, 1e-2], [100, 1e-3]], xla="auto")
    it.algorithm.warm_up()
    for seed in range(3):
        before = it.algorithm.get_weights()
        result = it.train(seed, invalid=seed == 1)
        assert not result.skipped
        assert all(np.isfinite(value) for value in result.metrics.values())
        assert not equal(before, it.algorithm.get_weights())
    assert it.algorithm.compiled.traces == 1  # type: ignore[attr-defined]


@pytest.mark.slow
@ALL
def test_eager_updates_can_be_stepped_through_and_learn_the_same(setup: Callable[..., Setup], name: str) -> None:
    runs = [setup(name, **settings) for settings in ({}, {"eager": True}, {"eager": True, "eager_tracing": True})]
    for it in runs:
        it.algorithm.warm_up()
        it.train()
    graph, eager, traced = (it.algorithm for it in runs)
    assert [run.compiled.mode for run in (graph, eager, traced)] == ["graph", "eager", "graph"]  # type: ignore[attr-defined]
    for weights in (eager.get_weights(), traced.get_weights()):
        for key, values in graph.get_weights().items():
            np.testing.assert_allclose(weights[key], values, rtol=1e-4, atol=1e-5)

    def loss(*arguments: Any) -> Any:
        assert tf.executing_eagerly()
        raise ZeroDivisionError("a debugger would stop here")

    eager.compiled._spec = dataclasses.replace(eager.compiled._spec, loss=loss)  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        runs[1].train()


@ONE
def test_options_of_the_optimizer_are_keras_own(setup: Callable[..., Setup], name: str) -> None:
    plain, slow = setup(name), setup(name, **ONE_STEP, optimizer={"beta_1": 0.5, "amsgrad": True})
    optimizer = slow.algorithm.compiled.optimizer  # type: ignore[attr-defined]
    assert (optimizer.beta_1, optimizer.amsgrad) == (0.5, True)
    state = slow.algorithm.get_state()
    slow.train()
    slow.algorithm.set_state(state)
    assert equal(slow.algorithm.get_weights(), plain.algorithm.get_weights())
    with pytest.raises(ConfigError, match=r"Keras makes no Adam with these options: .*beta_one") as caught:
        setup(name, optimizer={"beta_one": 0.5})
    assert caught.value.key == "optimizer"
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate can't be set: the algorithm has a key of its own"):
        setup(name, optimizer={"learning_rate": 0.5})


@ONE
def test_warming_up_changes_neither_weights_nor_optimiser_nor_random_states(
    setup: Callable[..., Setup], name: str
) -> None:
    it = setup(name, is_new=True)
    before = it.algorithm.get_state()
    it.algorithm.warm_up()
    after = it.algorithm.get_state()
    assert equal(before.tensors, after.tensors)
    assert before.values == after.values


@ONE
def test_the_same_seed_and_batches_give_bit_equal_weights(setup: Callable[..., Setup], name: str) -> None:
    first, second, other = setup(name), setup(name), setup(name, seed=99)
    for seed in range(3):
        first.train(seed)
        second.train(seed)
        other.train(seed)
    assert equal(first.algorithm.get_weights(), second.algorithm.get_weights())
    assert not equal(first.algorithm.get_weights(), other.algorithm.get_weights())


@ALL
def test_a_run_that_is_resumed_goes_on_as_if_never_interrupted(setup: Callable[..., Setup], name: str) -> None:
    """State goes through JSON, as in a checkpoint; random order and optimiser come back too."""
    through, first = setup(name), setup(name)
    for seed in range(4):
        through.train(seed)
    first.train(0)
    first.train(1)
    state = first.algorithm.get_state()
    stored = AlgorithmState(state.tensors, json.loads(json.dumps(state.values)))
    resumed = setup(name, seed=99)
    resumed.algorithm.set_state(stored)
    resumed.train(2)
    resumed.train(3)
    expected, got = through.algorithm.get_state(), resumed.algorithm.get_state()
    assert equal(expected.tensors, got.tensors)
    assert expected.values == got.values


@ONE
def test_state_that_does_not_fit_is_refused_before_any_of_it_is_taken(
    setup: Callable[..., Setup], make_model: Callable[..., Any], name: str
) -> None:
    it = setup(name)
    before = it.algorithm.get_state()
    other = setup(name, model={"fcnet_hiddens": (5,)}).algorithm.get_state()
    with pytest.raises(CheckpointError, match="don't fit this model"):
        it.algorithm.set_state(other)
    values = {key: value for key, value in before.values.items() if key != "rng"}
    with pytest.raises(CheckpointError, match="rng"):
        it.algorithm.set_state(AlgorithmState(before.tensors, values))
    assert equal(before.tensors, it.algorithm.get_state().tensors)


@ALL
@pytest.mark.parametrize("column", [c.ACTION_LOGP, c.OBS])
def test_a_number_that_is_not_finite_skips_the_update_and_names_the_column(
    setup: Callable[..., Setup], name: str, column: str
) -> None:
    it = setup(name)
    it.train(0)
    before = it.algorithm.get_state()
    fragments = it.fragments(1)
    fragments[1][column][2, 1] = np.nan
    result = it.algorithm.update(it.algorithm.make_batch(fragments), 0)
    assert result.skipped
    assert result.bad_column == column
    assert result.metrics["updates_skipped"] == 1.0
    assert equal(before.tensors, it.algorithm.get_state().tensors)
    result = it.train(2)
    assert not result.skipped
    assert result.metrics["updates_skipped"] == 1.0


@ONE
def test_training_ends_after_many_skipped_updates_in_a_row(setup: Callable[..., Setup], name: str) -> None:
    it = setup(name)
    fragments = it.fragments()
    fragments[0][c.ACTION_LOGP][0, 0] = np.nan
    for _ in range(MAX_SKIPS_IN_A_ROW - 1):
        assert it.algorithm.update(it.algorithm.make_batch(fragments), 0).skipped
    with pytest.raises(TrainingDiverged, match=c.ACTION_LOGP):
        it.algorithm.update(it.algorithm.make_batch(fragments), 0)
    assert all(np.isfinite(weight).all() for weight in it.algorithm.get_weights().values())


@ALL
def test_rows_that_are_no_transitions_teach_nothing(setup: Callable[..., Setup], name: str) -> None:
    """Whatever stands in them: one epoch over one minibatch, so that the order doesn't matter either."""
    it = setup(name, **ONE_STEP)
    weights = []
    for noise in (0.0, 5.0):
        it.algorithm.set_state(it.beginning)
        fragments = it.fragments(invalid=True)
        for fragment in fragments:
            invalid = ~fragment[c.VALID]
            assert invalid.any()
            for column in (c.TERMINATEDS, c.TRUNCATEDS):  # an episode never goes on across such a row
                if column in fragment:
                    fragment[column] &= fragment[c.VALID]
                    fragment[column][:-1] |= invalid[1:]
            for column in (c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS, c.REWARDS, c.OBS):
                if column in fragment:
                    fragment[column][invalid] += noise
        it.algorithm.update(it.algorithm.make_batch(fragments), 0)
        weights.append(it.algorithm.get_weights())
    for key, weight in weights[0].items():
        np.testing.assert_allclose(weight, weights[1][key], rtol=1e-5, atol=1e-7)


@ALL
@pytest.mark.parametrize(
    "space",
    [spaces.MultiDiscrete([2, 3]), spaces.Box(-2.0, 2.0, (2,), np.float32), spaces.Box(-1.0, 1.0, (), np.float64)],
)
def test_learns_with_every_kind_of_action(
    setup: Callable[..., Setup], make_model: Callable[..., Any], name: str, space: Any
) -> None:
    it = setup(name, net=make_model(space), **ONE_STEP)
    assert not it.train().skipped


@ONE
def test_learns_from_images_with_a_plain_graph(
    setup: Callable[..., Setup], make_model: Callable[..., Any], name: str
) -> None:
    it = setup(name, net=make_model(obs_shape=(10, 10, 1)), xla="auto")
    before = it.algorithm.get_weights()
    assert not it.train().skipped
    assert it.algorithm.compiled.mode == "graph"  # type: ignore[attr-defined]
    assert not equal(before, it.algorithm.get_weights())


@pytest.mark.parametrize(
    ("name", "cell", "shared", "xla"),
    [
        ("ppo", "use_lstm", True, "on"),
        ("ppo", "use_gru", False, "off"),
        ("impala", "use_lstm", False, "off"),
        ("appo", "use_gru", True, "off"),
        pytest.param("appo", "use_lstm", True, "on", marks=pytest.mark.slow),
        pytest.param("impala", "use_lstm", True, "on", marks=pytest.mark.slow),
        pytest.param("impala", "use_gru", False, "off", marks=pytest.mark.slow),
    ],
)
def test_learns_with_recurrent_models(
    setup: Callable[..., Setup], name: str, cell: str, shared: bool, xla: str
) -> None:
    it = setup(name, is_new=True, model={cell: True, "vf_share_layers": shared}, xla=xla)
    assert len(state_columns(it.config)) == len(it.model.state_shapes)
    it.algorithm.warm_up()
    before = it.algorithm.get_weights()
    assert not it.train(invalid=True).skipped
    after = it.algorithm.get_weights()
    assert all(not np.array_equal(before[key], after[key]) for key in before)
    assert it.algorithm.compiled.traces == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "recurrent"),
    [
        ("ppo", False),
        ("ppo", True),
        pytest.param("impala", False, marks=pytest.mark.slow),
        pytest.param("impala", True, marks=pytest.mark.slow),
        ("appo", False),
    ],
)
def test_fragments_of_whole_episodes_are_padded_to_few_shapes(
    setup: Callable[..., Setup], name: str, recurrent: bool
) -> None:
    """They are rows of episodes one after the other, [B, 1], at least as many as a fragment of steps has."""
    it = setup(name, is_new=True, batch_mode="complete_episodes", model={"use_gru": recurrent, "vf_share_layers": True})
    for length in (24, 30, 33):
        fragments = [it.make_fragment(it.plan, it.model, length, 1, index) for index in range(2)]
        batch = it.algorithm.make_batch(fragments)
        valid = it.algorithm.buffers.column(batch, c.VALID)  # type: ignore[attr-defined]
        assert valid.sum() == 2 * length
        assert valid.size <= 4 * length
        assert not it.algorithm.update(batch, 0).skipped
    assert it.algorithm.compiled.traces <= 2  # type: ignore[attr-defined]


def test_whole_episodes_come_as_one_sequence_or_as_many_of_the_length_that_was_asked_for(
    setup: Callable[..., Setup],
) -> None:
    """One of [1, 100_000], and one of [100_000, 1], would be 10^10 rows of padding together."""
    it = setup("ppo", batch_mode="complete_episodes", model={"use_gru": True, "vf_share_layers": True})
    for steps, num_sequences in ((24, 1), (40, 1), (24, 5)):
        it.algorithm.check_fragment(it.make_fragment(it.plan, it.model, steps, num_sequences, 0))
    for steps, num_sequences in ((1, 50), (25, 2), (23, 1)):
        with pytest.raises(BatchError, match="sequences of 24 steps"):
            it.algorithm.check_fragment(it.make_fragment(it.plan, it.model, steps, num_sequences, 0))


def test_a_batch_of_next_to_nothing_but_padding_is_made_without_the_longest_sequence(
    setup: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_algorithm, "_MAX_PADDED", 5000)
    it = setup("ppo", batch_mode="complete_episodes", model={"use_gru": True, "vf_share_layers": True})
    short, one, long = (it.make_fragment(it.plan, it.model, *shape, 0) for shape in ((24, 30), (40, 1), (600, 1)))
    batch = it.algorithm.make_batch([long, short, one])
    assert it.algorithm.buffers.column(batch, c.VALID).sum() == 24 * 30 + 40  # type: ignore[attr-defined]
    assert "a sequence of 600 steps is left out" in caplog.text
    batch = it.algorithm.make_batch([long, one])
    assert it.algorithm.buffers.column(batch, c.VALID).sum() == 640  # type: ignore[attr-defined]


@ONE
def test_a_missing_column_is_named(setup: Callable[..., Setup], name: str) -> None:
    it = setup(name)
    fragments = it.fragments()
    del fragments[1][c.ACTIONS]
    with pytest.raises(BatchError, match=c.ACTIONS):
        it.algorithm.make_batch(fragments)


@ONE
def test_schedules_go_by_the_env_steps_trained_on(setup: Callable[..., Setup], name: str) -> None:
    schedules = {"lr_schedule": [[0, 1e-2], [100, 0.0]], "entropy_coeff_schedule": [[0, 0.1], [100, 0.3]]}
    it = setup(name, **ONE_STEP, **schedules)
    batch = it.algorithm.make_batch(it.fragments())
    metrics = it.algorithm.update(batch, 50).metrics
    assert metrics["cur_lr"] == pytest.approx(5e-3)
    assert metrics["entropy_coeff"] == pytest.approx(0.2)
    before = it.algorithm.get_weights()
    it.algorithm.update(batch, 1000)
    assert equal(before, it.algorithm.get_weights())


@ONE
def test_a_learning_rate_that_has_ended_at_0_is_said_once(
    setup: Callable[..., Setup], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for end in (0.0, 1e-3):
        it = setup(name, **ONE_STEP, lr_schedule=[[0, 0.0], [500, 1e-2], [1000, end]])
        batch = it.algorithm.make_batch(it.fragments())
        for env_steps in (0, 999, 1000, 1100):
            it.algorithm.update(batch, env_steps)
            said.append([record.getMessage() for record in caplog.records if record.name.startswith("aiorl")])
    assert said[0] == said[1] == []
    assert len(said[2]) == 1
    assert all(part in said[2][0] for part in ("lr_schedule", "1,000 env steps", "stop_timesteps: 1000"))
    assert said[3:] == [said[2]] * 5, "once, and not where it ends elsewhere"


@ALL
def test_fragments_may_hold_any_number_of_rows_or_sequences(setup: Callable[..., Setup], name: str) -> None:
    it = setup(name, is_new=True)
    by_row = name == "ppo"
    for sizes in ((1, 2), (40, 41)):
        fragments = []
        for seed, size in enumerate(sizes):
            shape = (size, 1) if by_row else (6, size)
            fragment = it.make_fragment(it.plan, it.model, *shape, seed, invalid=not by_row)
            it.algorithm.check_fragment(fragment)
            fragments.append(fragment)
        batch = it.algorithm.make_batch(fragments)
        valid = it.algorithm.buffers.column(batch, c.VALID)  # type: ignore[attr-defined]
        assert valid.sum() == (sum(sizes) if by_row else sum(fragment[c.VALID].sum() for fragment in fragments))
        places, whole = len(valid), 12 if by_row else 2
        assert places % whole == 0
        assert places <= max(48 if by_row else 8, 2 * sum(sizes))
        result = it.algorithm.update(batch, 0)
        assert not result.skipped
        assert np.isfinite(list(result.metrics.values())).all()
        filled = int(np.flatnonzero(valid.reshape(places, -1).any(axis=1))[-1]) + 1
        num_epochs = it.algorithm.num_epochs  # type: ignore[attr-defined]
        steps = -(-int(valid.sum()) // 12) if name == "appo" else -(-filled // whole)
        assert result.metrics["num_sgd_steps"] == num_epochs * steps


@ONE
def test_one_huge_batch_does_not_make_those_after_it_as_large(setup: Callable[..., Setup], name: str) -> None:
    it = setup(name, is_new=True)
    sizes = []
    for count in (10, 100_000, 10, 60):
        sizes.append(it.algorithm.fitted(count))  # type: ignore[attr-defined]
    assert sizes[1] >= 100_000
    assert sizes[0] == sizes[2] < 100
    assert 60 <= sizes[3] < 240


@ALL
def test_smaller_batches_need_no_other_compilation(setup: Callable[..., Setup], name: str) -> None:
    it = setup(name, is_new=True)
    for seed, size in enumerate((41, 40, 15, 23, 12)):
        shape = (size, 1) if name == "ppo" else (6, size)
        batch = it.algorithm.make_batch([it.make_fragment(it.plan, it.model, *shape, seed)])
        assert not it.algorithm.update(batch, 0).skipped
    assert it.algorithm.compiled.traces == 1  # type: ignore[attr-defined]
    order, num_minibatches = it.algorithm._order(batch)  # type: ignore[attr-defined]
    used = range(72 if name == "appo" else 12)  # rows, of 12 sequences where it judges these first
    for epoch in order[:num_minibatches].reshape(it.algorithm.num_epochs, -1):  # type: ignore[attr-defined]
        assert sorted(epoch.tolist()) == list(used)


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("ppo", {}, (0, 2)),
        ("impala", {}, (7, 2)),
        ("impala", {}, (5, 2)),
        ("appo", {}, (5, 2)),
        ("ppo", {"model": {"use_lstm": True}}, (5, 2)),
    ],
)
def test_fragments_without_rows_or_of_sequences_of_another_length_are_refused(
    setup: Callable[..., Setup], name: str, settings: dict[str, Any], shape: tuple[int, int]
) -> None:
    it = setup(name, **settings)
    with pytest.raises(BatchError):
        it.algorithm.check_fragment(it.make_fragment(it.plan, it.model, *shape))


@ALL
def test_padding_changes_nothing_that_is_learned(setup: Callable[..., Setup], name: str) -> None:
    """One minibatch of all rows: the same step whether 30 places of 48 are filled or all of the batch's."""
    it = setup(name, **ONE_STEP)
    shape = (48, 1) if name == "ppo" else (6, 8)
    whole = it.make_fragment(it.plan, it.model, *shape, 1)
    half = {key: value[: 24 if name == "ppo" else None, : None if name == "ppo" else 4] for key, value in whole.items()}
    if name != "ppo":
        half |= {key: whole[key][:4] for key in (c.LAST_OBS,)}
        blank = {key: np.zeros_like(value) for key, value in half.items()}
        blank[c.VALID] = np.zeros((6, 4), bool)
    else:
        blank = {key: np.zeros_like(value) for key, value in half.items()} | {c.VALID: np.zeros((24, 1), bool)}
    losses, weights = [], []
    for fragments in ([half, blank], [half]):
        it.algorithm.set_state(it.beginning)
        losses.append(it.algorithm.update(it.algorithm.make_batch(fragments), 0).metrics["policy_loss"])
        weights.append(it.algorithm.get_weights())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for weight, other in zip(weights[0].values(), weights[1].values(), strict=True):
        np.testing.assert_allclose(weight, other, atol=1e-6)


@ALL
def test_previous_actions_and_rewards_are_asked_for_where_the_cell_sees_them(
    setup: Callable[..., Setup], name: str
) -> None:
    model = {"use_gru": True, "vf_share_layers": True, "lstm_use_prev_action_reward": True}
    cls = algorithm_class(name)
    config = config_class(name).from_mapping({"env": "x", **SHAPE, "model": model})
    assert {c.PREV_ACTIONS, c.PREV_REWARDS} <= set(cls.sample_plan(config).columns)
    plain = config_class(name).from_mapping({"env": "x", **SHAPE, "model": {"use_gru": True}})
    assert not {c.PREV_ACTIONS, c.PREV_REWARDS} & set(cls.sample_plan(plain).columns)
    it = setup(name, **ONE_STEP, model=model)
    assert not it.train().skipped


def test_a_state_that_is_held_stays_as_it_was_whatever_is_learned_after_it(setup: Callable[..., Setup]) -> None:
    it = setup("ppo", xla="on")
    it.train(1)
    held, copied = it.algorithm.hold_state(), it.algorithm.get_state()
    it.train(2)
    assert equal(held().tensors, copied.tensors)
    assert held().values == copied.values
    assert not equal(it.algorithm.get_state().tensors, copied.tensors)
    assert all(isinstance(array, np.ndarray) for array in held().tensors.values())


def test_a_state_of_another_dtype_is_refused(setup: Callable[..., Setup]) -> None:
    it = setup("ppo")
    state = it.algorithm.get_state()
    name = next(name for name in state.tensors if name.startswith("weights/"))
    state.tensors[name] = state.tensors[name].astype(np.float64)
    with pytest.raises(CheckpointError, match=r"is float64 .* there and float32"):
        it.algorithm.set_state(state)
