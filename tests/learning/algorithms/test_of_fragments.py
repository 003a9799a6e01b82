"""Algorithms that train on fragments as they arrive: plans, batches, minibatches, and changing
coefficients.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from algorithm_cases import (
    BOX,
    NUM_OBS,
    OF_FRAGMENTS,
    Case,
    config_of,
    equal,
    lease_plan_of,
    plan_of,
)

from aiorl.acting.filters import MeanStdFilter
from aiorl.acting.postprocess import gae
from aiorl.data import columns as c
from aiorl.errors import BatchError, CheckpointError, ConfigError
from aiorl.learning import experience, train_batches
from aiorl.learning.algorithm import experience_of
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.algorithms.streaming import VTrace
from aiorl.learning.batch_buffers import PACKED
from aiorl.learning.compiled import CompiledUpdate
from aiorl.learning.rows import state_columns
from aiorl.learning.steps import STEPS_BEFORE

THREE = pytest.mark.parametrize("name", ["ppo", "impala", "appo"])
RECURRENT = {"use_gru": True, "vf_share_layers": True}
OF_ROWS = [c.OBS, c.ACTIONS]
GAE = [*OF_ROWS, c.ADVANTAGES, c.VALUE_TARGETS]
SHORT = {"rollout_fragment_length": 2, "train_batch_size": 16, "sgd_minibatch_size": 8}
ONE_MINIBATCH = {"sgd_minibatch_size": 48}
PPO = [*OF_ROWS, c.ACTION_LOGP, c.ADVANTAGES, c.VALUE_TARGETS]


@pytest.mark.parametrize(
    ("name", "settings", "columns", "made"),
    [
        ("ppo", {"lambda_": 0.8}, PPO, ("gae", {"gamma": 0.9, "lam": 0.8})),
        ("ppo", {"vf_clip_param": 10.0}, [*PPO, c.VF_PREDS], ("gae", {"gamma": 0.9, "lam": 0.95})),
        (
            "ppo",
            {"kl_coeff": 0.2},
            [*PPO, c.ACTION_DIST_INPUTS],
            ("gae", {"gamma": 0.9, "lam": 0.95}),
        ),
        ("a2c", {}, GAE, ("gae", {"gamma": 0.9, "lam": 1.0})),
        ("a3c", {}, GAE, ("gae", {"gamma": 0.9, "lam": 1.0})),
        ("pg", {}, [*OF_ROWS, c.ADVANTAGES], ("returns", {"gamma": 0.9})),
        ("bc", {}, OF_ROWS, ("none", {})),
        ("marwil", {}, [*OF_ROWS, c.VALUE_TARGETS], ("gae", {"gamma": 0.9, "lam": 1.0})),
    ],
)
def test_workers_send_only_columns_that_are_used(
    name: str, settings: dict[str, Any], columns: list[str], made: tuple[str, dict[str, float]]
) -> None:
    own = {"env": "x", "input": "data" if name in ("bc", "marwil") else "sampler"}
    plan = plan_of(config_class(name)(**own, gamma=0.9, **settings))
    assert list(plan.columns) == columns
    assert (plan.postprocess, plan.postprocess_params) == made
    recurrent = {"postprocess_inputs": True} if name in ("bc", "marwil") else {}
    model = {"use_lstm": True, "lstm_use_prev_action_reward": True}
    plan = plan_of(config_class(name)(**own, **settings, **recurrent, model=model))
    assert {c.TERMINATEDS, c.TRUNCATEDS, c.PREV_ACTIONS, c.PREV_REWARDS} <= set(plan.of_rows)
    assert len(plan.of_sequences) == 4


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_workers_send_raw_transitions_for_vtrace(name: str) -> None:
    plan = plan_of(config_of(name))
    assert plan.postprocess == "none"
    assert c.ADVANTAGES not in plan.columns
    assert {c.REWARDS, c.TERMINATEDS, c.TRUNCATEDS, c.BOOTSTRAP_VALUES} <= set(plan.columns)
    assert plan.of_sequences == (c.LAST_OBS,)
    model = {"use_gru": True, "lstm_use_prev_action_reward": True}
    plan = plan_of(config_of(name, model=model, normalize_rewards=True))
    assert plan.of_sequences == (c.LAST_OBS, c.state_in(0), c.state_in(1))
    assert {c.PREV_ACTIONS, c.PREV_REWARDS, c.SCALED_REWARDS} <= set(plan.columns)


@pytest.mark.parametrize("name", OF_FRAGMENTS)
def test_leases_are_for_exactly_one_batch_or_kept_topped_up_within_a_limit(name: str) -> None:
    config = config_of(name)
    plan = lease_plan_of(config)
    if name in ("ppo", "a2c", "pg"):
        assert (plan.mode, plan.fragments_per_batch, plan.max_policy_lag) == ("on_policy", 2, 0)
        return
    assert (plan.mode, plan.fragments_per_batch) == ("streaming", 2)
    assert plan.max_policy_lag == {"bc": None, "marwil": None, "a3c": 20}.get(name, 10)
    changed: dict[str, Any] = {"outstanding_fragments_per_worker": 5}
    if name not in ("bc", "marwil"):
        changed |= {"max_policy_lag": 7, "broadcast_updates": 4, "broadcast_interval_ms": 20}
    plan = lease_plan_of(config.updated(changed))
    assert plan.outstanding_per_worker == 5
    if name not in ("bc", "marwil"):
        assert (plan.max_policy_lag, plan.publish_every, plan.publish_interval_s) == (7, 4, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", pytest.param("appo", marks=pytest.mark.nightly)])
def test_eager_updates_can_be_stepped_through_and_learn_the_same(name: str) -> None:
    runs = [
        Case(name, xla="off", **settings)
        for settings in ({"eager": False}, {}, {"eager_tracing": True})
    ]
    for it in runs:
        it.train()
    graph, eager, traced = (it.learner for it in runs)
    assert [run.compiled.mode for run in (graph, eager, traced)] == ["graph", "eager", "graph"]
    for weights in (eager.get_weights(), traced.get_weights()):
        for key, values in graph.get_weights().items():
            np.testing.assert_allclose(weights[key], values, rtol=1e-4, atol=1e-5)

    def loss(*arguments: Any) -> Any:
        assert tf.executing_eagerly()
        raise ZeroDivisionError("a debugger would stop here")

    plan = eager.update_plan
    descent = dataclasses.replace(plan.loop.step, gradients=loss)
    loop = eager.feed.fit(dataclasses.replace(plan.loop, step=descent))
    eager.compiled = CompiledUpdate(loop, [*plan.knobs_at(0), STEPS_BEFORE], xla="eager")
    with pytest.raises(ZeroDivisionError):
        runs[1].train()


def optimizer_of(case: Case) -> Any:
    (optimizer,) = case.learner.compiled.optimizers
    return optimizer


def test_options_of_the_optimizer_are_those_of_keras() -> None:
    optimizer = optimizer_of(Case("ppo", optimizer={"beta_1": 0.5, "amsgrad": True}))
    assert (optimizer.beta_1, optimizer.amsgrad) == (0.5, True)
    with pytest.raises(ConfigError, match=r"Adam.*beta_one") as caught:
        Case("ppo", optimizer={"beta_one": 0.5})
    assert caught.value.key == "optimizer"
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        Case("ppo", optimizer={"learning_rate": 0.5})
    case = Case("impala", opt_type="rmsprop", momentum=0.5)
    assert type(optimizer_of(case)).__name__ == "RMSprop"
    assert not case.train()[0].skipped


@pytest.mark.parametrize(
    ("name", "cell", "shared", "xla"),
    [
        pytest.param("ppo", "use_lstm", True, "on", marks=pytest.mark.slow),
        ("impala", "use_gru", True, "off"),
        pytest.param("appo", "use_lstm", True, "on", marks=pytest.mark.nightly),
        pytest.param("appo", "use_gru", True, "off", marks=pytest.mark.slow),
        pytest.param("impala", "use_lstm", True, "on", marks=pytest.mark.nightly),
    ],
)
def test_learns_with_recurrent_models(name: str, cell: str, shared: bool, xla: str) -> None:
    model = {cell: True, "vf_share_layers": shared}
    case = Case(name, **SHORT, model=model, eager=False, xla=xla)
    assert len(state_columns(case.config)) == len(case.model.state_shapes)
    before = case.learner.get_weights()
    assert not case.train(invalid=True)[0].skipped
    assert all((weight != before[key]).any() for key, weight in case.learner.get_weights().items())


@pytest.mark.rest_slow
@pytest.mark.parametrize(
    ("name", "model"), [("ppo", {}), ("ppo", RECURRENT), ("impala", {}), ("appo", {})]
)
def test_fragments_of_whole_episodes_are_padded_to_few_shapes(
    name: str, model: dict[str, Any]
) -> None:
    """Fragments are rows of consecutive episodes, [B, 1], at least as many as a fragment of steps
    has.
    """
    case = Case(name, **SHORT, batch_mode="complete_episodes", model=model)
    shapes = set()
    for length in (8, 10, 11):
        batch = case.learner.make_batch([case.fragment(index, length, 1) for index in range(2)])
        valid = case.learner.feed.buffers.column(batch, c.VALID)
        assert valid.sum() == 2 * length
        assert valid.size <= 4 * length
        shapes.add(valid.shape)
    assert len(shapes) <= 2
    assert not case.learner.update(batch, 0).skipped


def test_whole_episodes_come_as_one_sequence_or_as_many_of_the_length_that_was_asked_for() -> None:
    """One fragment of [1, 100_000] and one of [100_000, 1] would make 10^10 rows of padding
    together.
    """
    case = Case("ppo", batch_mode="complete_episodes", model=RECURRENT)
    for steps, num_sequences in ((24, 1), (40, 1), (24, 5)):
        case.learner.check_fragment(case.fragment(0, steps, num_sequences))
    for steps, num_sequences in ((1, 50), (25, 2), (23, 1)):
        with pytest.raises(BatchError, match="24"):
            case.learner.check_fragment(case.fragment(0, steps, num_sequences))


def test_a_batch_of_next_to_nothing_but_padding_is_made_without_the_longest_sequence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(train_batches, "_MAX_PADDED", 5000)
    case = Case("ppo", batch_mode="complete_episodes", model=RECURRENT)
    short, one, long = (case.fragment(0, *shape) for shape in ((24, 30), (40, 1), (600, 1)))
    batch = case.learner.make_batch([long, short, one])
    assert case.learner.feed.buffers.column(batch, c.VALID).sum() == 24 * 30 + 40
    assert " 600 " in caplog.text
    batch = case.learner.make_batch([long, one])
    assert case.learner.feed.buffers.column(batch, c.VALID).sum() == 640


@pytest.mark.parametrize(
    ("name", "model", "shape"),
    [
        ("ppo", {}, (0, 2)),
        ("impala", {}, (7, 2)),
        ("appo", {}, (5, 2)),
        ("ppo", {"use_lstm": True}, (5, 2)),
    ],
)
def test_fragments_without_rows_or_of_sequences_of_another_length_are_refused(
    name: str, model: dict[str, Any], shape: tuple[int, int]
) -> None:
    case = Case(name, model=model)
    with pytest.raises(BatchError):
        case.learner.check_fragment(case.fragment(0, *shape))


def test_schedules_go_by_the_env_steps_trained_on() -> None:
    schedules = {
        "lr_schedule": [[0, 1e-2], [100, 0.0]],
        "entropy_coeff_schedule": [[0, 0.1], [100, 0.3]],
    }
    clips = {
        "clip_param_schedule": [[0, 0.3], [100, 0.1]],
        "vf_clip_param_schedule": [[0, 5], [100, 1]],
    }
    case = Case("ppo", **schedules, **clips)
    assert c.VF_PREDS in case.plan.columns
    metrics = case.update(case.fragments(), 50).metrics
    wanted = {"cur_lr": 5e-3, "entropy_coeff": 0.2, "clip_param": 0.2, "vf_clip_param": 3.0}
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    before = case.learner.get_weights()
    case.update(case.fragments(), 1000)
    assert equal(before, case.learner.get_weights())


def test_a_learning_rate_that_ended_at_0_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    said = []
    for end in (0.0, 1e-3):
        schedule = [[0, 0.0], [500, 1e-2], [1000, end]]
        case = Case("ppo", **ONE_MINIBATCH, lr_schedule=schedule)
        for env_steps in (999, 1000, 1100):
            case.update(case.fragments(), env_steps)
            said.append(
                [
                    record.getMessage()
                    for record in caplog.records
                    if record.name.startswith("aiorl")
                ]
            )
    assert said[0] == []
    (sentence,) = said[1]
    assert all(part in sentence for part in ("lr_schedule", "1,000", "stop_timesteps: 1000"))
    assert said[2:] == [said[1]] * 4, "once, and only if it ends at 0"


def rows_or_sequences(name: str, size: int) -> tuple[int, int]:
    """Return the shape of a fragment with this number of rows or sequences."""
    return (size, 1) if name == "ppo" else (6, size)


@pytest.mark.rest_slow
@THREE
def test_fragments_can_have_any_number_of_rows_or_sequences(name: str) -> None:
    case, whole = Case(name), 24 if name == "ppo" else 4
    for sizes in ((1, 2), (40, 41) if name == "ppo" else (6, 7)):
        fragments = [
            case.fragment(seed, *rows_or_sequences(name, size)) for seed, size in enumerate(sizes)
        ]
        for fragment in fragments:
            case.learner.check_fragment(fragment)
        batch = case.learner.make_batch(fragments)
        valid = case.learner.feed.buffers.column(batch, c.VALID)
        assert valid.sum() == sum(sizes) * (1 if name == "ppo" else 6)
        assert len(valid) % whole == 0
        assert len(valid) <= max(2 * whole, 2 * sum(sizes))
        result = case.learner.update(batch, 0)
        assert not result.skipped
        assert result.metrics["num_sgd_steps"] == -(-sum(sizes) // whole)


def test_one_huge_batch_does_not_enlarge_later_ones() -> None:
    fitted = Case("ppo").learner.feed.fitted
    sizes = [fitted(count) for count in (10, 100_000, 10, 60)]
    assert sizes[1] >= 100_000
    assert sizes[0] == sizes[2] < 100
    assert 60 <= sizes[3] < 240


def order_of(case: Case, batch: Any) -> Any:
    """Return the minibatches [K, M] of an update."""
    feed = case.learner.feed
    order, num_minibatches = feed.order(feed.buffers.column(batch, c.VALID))
    return order[:num_minibatches]


def test_ppo_visits_each_row_once_per_epoch_in_a_new_order_unless_shuffling_is_off() -> None:
    for shuffles in (False, True):
        case = Case("ppo", shuffle_sequences=shuffles, num_sgd_iter=2)
        first, second = order_of(case, case.learner.make_batch(case.fragments())).reshape(2, 48)
        np.testing.assert_array_equal(np.sort([first, second]), [np.arange(48)] * 2)
        assert (first == second).all() == (not shuffles)
        assert (first == np.arange(48)).all() == (not shuffles)


def test_an_update_reads_the_train_batch_where_it_is() -> None:
    learner = Case("ppo").learner
    batch = learner.feed.nominal_batch()
    knobs = {**learner.update_plan.knobs_at(0), STEPS_BEFORE: 0.0}
    tensors, _ = learner.compiled.arguments.tensors(batch, knobs)
    batch[PACKED][-1, -1] = 7.0
    assert [float(tensor[-1, -1]) for tensor in tensors.values()] == [7.0]


@pytest.mark.parametrize("size", [16, 5])
def test_appo_mixes_rows_of_all_sequences_and_visits_every_transition_once_per_epoch(
    size: int,
) -> None:
    case = Case("appo", **(SHORT | {"sgd_minibatch_size": size}), num_sgd_iter=2)
    batch = case.learner.make_batch(case.fragments(invalid=True))
    order = order_of(case, batch)
    (transitions,) = np.nonzero(case.learner.feed.buffers.column(batch, c.VALID).ravel())
    assert len(order) == 2 * -(-len(transitions) // size)
    for epoch in order.reshape(2, -1):
        np.testing.assert_array_equal(np.sort(epoch[: len(transitions)]), transitions)
        assert set(epoch) <= set(transitions)
    assert len({row // 2 for row in order[0]}) > 2, "from several sequences"
    assert case.learner.update(batch, 0).metrics["num_sgd_steps"] == len(order)


@pytest.mark.parametrize(
    ("name", "model"), [("impala", {}), ("appo", RECURRENT), ("ppo", RECURRENT)]
)
def test_minibatches_are_whole_sequences_if_these_are_trained_on(
    name: str, model: dict[str, Any]
) -> None:
    case = Case(name, model=model, sgd_minibatch_size=12)
    order = order_of(case, case.learner.make_batch(case.fragments()))
    assert order.shape == (4, 2)
    assert set(order.ravel()) == set(range(8))


@THREE
def test_padding_does_not_change_the_update(name: str) -> None:
    """One minibatch of all rows: the step is the same whether half of its rows or all are
    filled.
    """
    case = Case(name, sgd_minibatch_size=48)
    state, half = (
        case.learner.get_state(),
        case.fragment(1, *rows_or_sequences(name, 24 if name == "ppo" else 4)),
    )
    blank = {key: np.zeros_like(value) for key, value in half.items()}
    blank[c.VALID] = np.zeros(half[c.ACTIONS].shape[:2], bool)
    losses, weights = [], []
    for fragments in ([half, blank], [half]):
        case.learner.set_state(state)
        losses.append(case.update(fragments).metrics["policy_loss"])
        weights.append(case.learner.get_weights())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for weight, other in zip(weights[0].values(), weights[1].values(), strict=True):
        np.testing.assert_allclose(weight, other, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "target", "factor"), [("ppo", 1e-6, 1.5), ("ppo", 1e6, 0.5), ("appo", 1e-6, 1.5)]
)
def test_the_penalty_adapts_towards_its_target_and_is_restored(
    name: str, target: float, factor: float
) -> None:
    settings = {
        "kl_coeff": 0.2,
        "kl_target": target,
        **({"target_update_freq": 9} if name == "appo" else {}),
    }
    case, other = Case(name, **settings), Case(name, **settings)
    metrics = case.train(1)[0].metrics
    assert metrics["kl"] > 1e-5
    assert metrics["cur_kl_coeff"] == pytest.approx(0.2)
    assert case.learner.update_plan.knobs_at(0)["kl_coeff"] == pytest.approx(0.2 * factor)
    state = case.learner.get_state()
    other.learner.set_state(state)
    assert other.learner.update_plan.knobs_at(0)["kl_coeff"] == pytest.approx(0.2 * factor)
    del state.values["kl_coeff"]
    with pytest.raises(CheckpointError, match="kl_coeff"):
        other.learner.set_state(state)


def test_the_penalty_depends_on_the_divergence_of_the_last_epoch() -> None:
    """Three times the mean over three epochs is twice the mean over the first two, plus the mean of
    the third.

    The policy moves away. The target is half of a number between the last mean and the mean over
    all epochs, so the latter would leave the weight unchanged.
    """

    def run(epochs: int, **more: float) -> tuple[Case, dict[str, float]]:
        case = Case("ppo", **ONE_MINIBATCH, kl_coeff=0.2, num_sgd_iter=epochs, lr=0.03, **more)
        return case, case.train()[0].metrics

    two, three = (run(epochs)[1]["kl"] for epochs in (2, 3))
    last = 3 * three - 2 * two
    assert last > 1.05 * three
    case, metrics = run(3, kl_target=(last + three) / 4)
    assert metrics["kl"] == pytest.approx(three)
    assert case.learner.update_plan.knobs_at(0)["kl_coeff"] == pytest.approx(0.2 * 1.5)
    assert metrics["kl_last_epoch"] == pytest.approx(last, rel=1e-4)


@THREE
def test_an_update_ends_once_the_policy_is_too_far_from_those_that_sampled(name: str) -> None:
    metrics = Case(name, num_sgd_iter=3, kl_stop=1e-9).train()[0].metrics
    # before APPO's first step, the policy equals the target network
    assert metrics["num_sgd_steps"] == (2 if name == "appo" else 1)
    assert metrics["kl"] > 1e-9


@pytest.mark.rest_slow
@pytest.mark.parametrize(("name", "wanted"), [("impala", "algo: "), ("appo", "kl_stop")])
def test_a_policy_far_from_those_that_sampled_causes_one_warning(
    name: str, wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(name)
    for behaviour_logp in (-1.1, 3.0, 3.0):
        fragment = case.fragment()
        fragment[c.ACTION_LOGP] = np.full_like(fragment[c.ACTION_LOGP], behaviour_logp)
        case.update([fragment, fragment])
        said = [record.getMessage() for record in caplog.records if record.name.startswith("aiorl")]
        assert len(said) == (behaviour_logp > 0)
    for key in ("mean_rho", "num_sgd_iter", "max_policy_lag", wanted):
        assert key in said[0]


def test_the_target_network_evaluates_at_most_a_minibatch_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with complete episodes, which are longer than the configured sequences."""
    case = Case(
        "appo", batch_mode="complete_episodes", rollout_fragment_length=4, num_envs_per_worker=1
    )
    judge, sizes = VTrace.judge, []

    def noting(self: Any, columns: Any, weights: Any) -> Any:
        sizes.append(tuple(columns[c.VALID].shape))
        return judge(self, columns, weights)

    monkeypatch.setattr(VTrace, "judge", noting)
    assert not case.update([case.fragment(3, 8, 1) for _ in range(6)]).skipped
    assert {length * count for length, count in sizes} == {24}


def test_the_target_network_of_appo_is_updated_at_its_interval() -> None:
    def weights(case: Case, prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix): x
            for name, x in case.tensors.items()
            if name.startswith(prefix)
        }

    every = 2
    case = Case("appo", **ONE_MINIBATCH, target_update_freq=every)
    seen = [weights(case, "weights/")]
    for number in range(1, 2 * every + 1):
        case.train(number)
        seen.append(weights(case, "weights/"))
        assert not equal(seen[-1], seen[-2])
        assert equal(weights(case, "target/"), seen[number - number % every])


@pytest.mark.parametrize("model", [{}, pytest.param({"use_gru": True}, marks=pytest.mark.slow)])
def test_an_on_policy_update_of_appo_is_that_of_ppo(model: dict[str, Any]) -> None:
    """GAE by the network that sampled, computed by the worker's code, against V-trace by the target
    network.
    """
    shared: dict[str, Any] = {
        "num_sgd_iter": 4,
        "gamma": 0.95,
        "lambda_": 0.8,
        "lr": 0.05,
        "model": model,
    }
    shared |= {"normalize_advantages": True, "sgd_minibatch_size": 48, "entropy_coeff": 0.0}
    appo, ppo = Case("appo", **shared), Case("ppo", **shared)
    raw, ready = appo.fragments(), []
    for x in raw:
        columns = {
            name: tf.constant(array)
            for name, array in {**x, c.VALID: np.ones((6, 4), np.float32)}.items()
        }
        columns |= {
            name: tf.cast(columns[name], tf.float32) for name in (c.TERMINATEDS, c.TRUNCATEDS)
        }
        seen = VTrace(appo.config, appo.model).judge(columns)
        x[c.ACTION_LOGP] = seen.logp.numpy()
        advantages, targets = gae(
            x[c.REWARDS],
            seen.values.numpy(),
            seen.last_values.numpy(),
            x[c.TERMINATEDS],
            x[c.TRUNCATEDS],
            x[c.BOOTSTRAP_VALUES],
            gamma=0.95,
            lam=0.8,
        )
        every = {**x, c.ADVANTAGES: advantages, c.VALUE_TARGETS: targets}
        ready.append({name: every[name] for name in ppo.plan.columns})
    found, expected = appo.update(raw).metrics, ppo.update(ready).metrics
    assert found["clip_fraction"] > 0
    for name in ("policy_loss", "vf_loss", "entropy", "clip_fraction", "grad_gnorm"):
        assert found[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-4), name


def test_raw_rows_are_filtered_when_they_become_a_train_batch() -> None:
    case = Case("bc", BOX, observation_filter="MeanStdFilter")
    assert case.plan.raw_obs
    case.learner.feed.merged_filter = own = MeanStdFilter((4,))
    obs = (fragment := case.fragment())[c.OBS].reshape(-1, 4)
    own.learn(5.0 + obs)
    found = case.learner.feed.buffers.column(case.learner.make_batch([fragment]), c.OBS)[:24]
    np.testing.assert_allclose(found, own(obs, update=False), atol=1e-5)


def test_marwil_divides_advantages_by_the_root_of_their_moving_mean_square_and_restores_it() -> (
    None
):
    settings = {
        "moving_average_sqd_adv_norm_start": 9.0,
        "moving_average_sqd_adv_norm_update_rate": 0.5,
    }
    case, other = Case("marwil", **settings), Case("marwil", **settings)
    assert case.learner.update_plan.knobs_at(0)["advantage_scale"] == pytest.approx(3.0)
    metrics = case.train()[0].metrics
    expected = (9.0 + metrics["vf_loss"]) / 2
    assert metrics["advantages_mean_square"] == pytest.approx(expected)
    other.learner.set_state(case.learner.get_state())
    assert other.learner.update_plan.knobs_at(0)["advantage_scale"] == pytest.approx(expected**0.5)


def test_a_train_batch_without_room_is_refused_with_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("ppo")
    policies = [(experience_of(algorithm_class("ppo"), case.config), case.model)]
    bytes_of_a_row = 4 * (NUM_OBS + 1 + 5)
    monkeypatch.setattr(experience, "available_bytes", lambda: 2 * 48 * bytes_of_a_row)
    experience.Fragments.check_room(policies)
    monkeypatch.setattr(experience, "available_bytes", lambda: 2 * 48 * bytes_of_a_row - 1)
    with pytest.raises(ConfigError, match="48") as refused:
        experience.Fragments.check_room(policies)
    assert refused.value.key == "train_batch_size"


def test_a_batch_without_transitions_reports_zeros_and_a_skipped_one_its_minibatches() -> None:
    case = Case("ppo")
    (usual,) = case.train(0)
    before = case.tensors
    fragments = case.fragments(1)
    empty = [{**part, c.VALID: np.zeros(part[c.OBS].shape[:2], bool)} for part in fragments]
    result = case.update(empty)
    assert result.metrics.keys() >= usual.metrics.keys() - {"cur_kl_coeff"}
    names = ("policy_loss", "vf_loss", "entropy", "num_sgd_steps")
    assert [result.metrics[name] for name in names] == [0.0] * 4
    assert equal(before, case.tensors)
    fragments[0][c.ADVANTAGES][0, 0] = np.nan
    result = case.update(fragments)
    assert result.skipped
    assert result.metrics["num_sgd_steps"] >= 1.0
