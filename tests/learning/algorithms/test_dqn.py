"""DQN: its plans, its loss against the same formula in NumPy, and what is due of its minibatches."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from q_networks import NUM_ACTIONS, NUM_OBS, START, make_model
from restored_replays import assert_goes_on_to_the_bit, saved

from aiorl.acting.acting_graph import ActingGraph
from aiorl.acting.distributions import MASKED_LOGIT
from aiorl.data import columns as c
from aiorl.data.obs_layout import ObsLayout
from aiorl.errors import BatchError, CheckpointError, ConfigError
from aiorl.learning.algorithms.algorithm import Observations
from aiorl.learning.algorithms.compiled_update import UpdateSpec
from aiorl.learning.algorithms.dqn import DQN, DQNConfig
from aiorl.learning.algorithms.replay_algorithm import WEIGHTS, replay_spec
from aiorl.learning.models.export import export_acting_graph
from aiorl.learning.models.q_network import QNetwork

VARIANTS = [
    {"double_q": False, "dueling": False},
    {"double_q": True, "dueling": True, "dueling_hiddens": [6]},
    {"double_q": True, "dueling": True, "num_atoms": 11, "v_min": -3.0, "v_max": 4.0},
]


def make_config(**settings: Any) -> DQNConfig:
    small = {
        "env": "E", "seed": 7, "model": {"fcnet_hiddens": [8]}, "num_envs_per_worker": 2, "rollout_fragment_length": 4,
        "train_batch_size": 4, "training_intensity": 3, "learning_starts": 16, "replay_capacity": 64,
        "target_update_freq": 5, "lr": 0.01, "xla": "off",  # SAC's tests compile one
    }  # fmt: skip
    return DQNConfig(**{**small, **settings})


def make_fragment(number: int, length: int = 4, num_envs: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    shape = (length, num_envs)
    return {
        c.OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.NEW_OBS: rng.normal(size=(*shape, NUM_OBS)).astype(np.float32),
        c.ACTIONS: START + rng.integers(0, NUM_ACTIONS, shape),
        c.N_STEP_RETURNS: rng.normal(size=shape).astype(np.float32),
        c.DISCOUNTS: rng.choice([0.0, 0.9], shape).astype(np.float32),
    }


def make_minibatch(seed: int, rows: int = 6) -> dict[str, Any]:
    fragment = make_fragment(seed, rows, 1)
    batch = {name: array[:, 0] for name, array in fragment.items()}
    batch[c.ACTIONS] = batch[c.ACTIONS].astype(np.int32)
    return {**batch, WEIGHTS: np.random.default_rng(seed).random(rows).astype(np.float32)}


def feed(algorithm: DQN, numbers: Any) -> list[Any]:
    return [algorithm.update(algorithm.make_batch([make_fragment(number)]), 8 * number) for number in numbers]


def test_leases_are_kept_topped_up_within_a_bound_and_weights_go_out_at_times() -> None:
    config = make_config(
        fragments_per_update=3, max_env_steps_ahead=100, broadcast_updates=7, broadcast_interval_ms=20, n_step=3
    )
    plan = DQN.lease_plan(config)
    assert (plan.mode, plan.fragments_per_batch, plan.max_policy_lag, plan.max_under_way) == ("streaming", 3, None, 12)
    assert (plan.publish_every, plan.publish_interval_s) == (7, 0.02)
    columns = DQN.sample_plan(config)
    assert (columns.postprocess, columns.postprocess_params) == ("n_step", {"gamma": 0.99, "n": 3})
    assert c.N_STEPS in columns.columns
    assert c.N_STEPS not in DQN.sample_plan(make_config()).columns
    assert make_config(max_env_steps_ahead=1).max_fragments_under_way() == 2


def test_workers_explore_by_a_schedule_or_each_by_a_share_of_its_own() -> None:
    own = DQN.acting_settings(make_config(epsilon_schedule=[[0, 0.5], [9, 0.1]]))
    assert own == {"exploration": {"type": "EpsilonGreedy", "epsilon": [[0, 0.5], [9, 0.1]]}}
    assert DQN.acting_settings(make_config(per_worker_epsilon=True)) == {
        "exploration": {"type": "PerWorkerEpsilonGreedy"}
    }


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"learning_starts": 65}, "learning_starts"),
        ({"replay_capacity": 7, "learning_starts": 1}, "replay_capacity"),
        ({"input": "files/*.json"}, "input"),
        ({"epsilon_schedule": [[0, 2.0]]}, "epsilon_schedule"),
        ({"num_atoms": 5, "v_min": 3, "v_max": 2}, "v_min"),
        ({"v_max": 100}, "v_max"),
        ({"num_atoms": 5, "huber_delta": 2}, "huber_delta"),
        ({"dueling": False, "dueling_hiddens": [4]}, "dueling_hiddens"),
        ({"model": {"vf_share_layers": True}}, "model.vf_share_layers"),
        ({"model": {"free_log_std": True}}, "model.free_log_std"),
        ({"prioritized_replay_alpha": 0.5}, "prioritized_replay_alpha"),
        ({"per_worker_epsilon": True, "num_workers": 0}, "per_worker_epsilon"),
        ({"per_worker_epsilon": True, "num_workers": 1, "epsilon_schedule": [[0, 1.0], [9, 0.5]]}, "epsilon_schedule"),
        ({"fragments_per_update": 10**9}, "fragments_per_update"),
        ({"training_intensity": float("inf")}, "training_intensity"),
        ({"lr": float("nan")}, "lr"),
        ({"n_step": 5}, "n_step"),
        ({"worker_priorities": True}, "worker_priorities"),
        ({"worker_priorities": True, "prioritized_replay": True, "value_rescaling": True}, "worker_priorities"),
        (
            {
                "worker_priorities": True,
                "prioritized_replay": True,
                "model": {"use_lstm": True},
                "replay_sequence_length": 4,
            },
            "worker_priorities",
        ),
        ({"model": {"use_lstm": True}}, "rollout_fragment_length"),
        ({"sequence_overlap": 0}, "sequence_overlap"),
        ({"sigma0": 1.0}, "sigma0"),
        ({"noisy": True, "epsilon_schedule": [[0, 0.5]]}, "epsilon_schedule"),
        ({"sequence_priority_eta": 0.5}, "sequence_priority_eta"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**settings)
    assert caught.value.key == key


@pytest.mark.parametrize(("key", "value"), [("v_min", math.nan), ("v_min", -math.inf), ("v_max", math.inf)])
def test_atoms_have_finite_returns(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be a finite number"):
        DQNConfig.from_mapping({"env": "E", key: value})


def test_settings_that_look_alike_and_do_go_together_are_taken() -> None:
    make_config(per_worker_epsilon=True, num_workers=0, bind="tcp://127.0.0.1:5557")
    make_config(n_step=4)
    make_config(n_step=5, batch_mode="complete_episodes")
    make_config(huber_delta=math.inf)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def spec_of(config: DQNConfig, model: QNetwork, other: QNetwork) -> UpdateSpec:
    """The update of a network whose target has the weights of another."""
    algorithm = DQN(config, model)
    for name, variable in algorithm.targets["target"].variables.items():
        variable.assign(other.variables[name])
    return algorithm.update_spec()


def project(returns: Any, discounts: Any, probabilities: Any, atoms: Any) -> Any:
    """Algorithm 1 of Bellemare et al., one atom at a time."""
    out, step = np.zeros_like(probabilities), atoms[1] - atoms[0]
    for row in range(len(returns)):
        for atom, share in zip(atoms, probabilities[row], strict=True):
            place = (np.clip(returns[row] + discounts[row] * atom, atoms[0], atoms[-1]) - atoms[0]) / step
            low, high = int(np.floor(place)), int(np.ceil(place))
            if low == high:
                out[row, low] += share
            else:
                out[row, low] += share * (high - place)
                out[row, high] += share * (place - low)
    return out


@pytest.mark.parametrize("settings", VARIANTS)
def test_loss_equals_the_formula_in_numpy(settings: dict[str, Any]) -> None:
    delta = {} if "num_atoms" in settings else {"huber_delta": 0.5}
    config = make_config(**delta, **settings)
    model, other = make_model(config), make_model(config, seed=2)
    batch = make_minibatch(3)
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    total, metrics = spec_of(config, model, other).loss(tensors, {})

    def values(network: QNetwork, obs: Any) -> Any:
        return network.q(tf.constant(obs))[0].numpy()

    rows, actions = np.arange(6), batch[c.ACTIONS] - START
    now, then = values(model, batch[c.OBS]), values(other, batch[c.NEW_OBS])
    chooser = values(model, batch[c.NEW_OBS]) if config.double_q else then
    returns, discounts = batch[c.N_STEP_RETURNS], batch[c.DISCOUNTS]
    if model.atoms is None:
        errors = returns + discounts * then[rows, chooser.argmax(axis=1)] - now[rows, actions]
        size = np.abs(errors)
        losses, priorities = np.where(size <= 0.5, 0.5 * size**2, 0.5 * (size - 0.25)), size
    else:
        best = (softmax(chooser) * model.atoms).sum(axis=-1).argmax(axis=1)
        wanted = project(returns, discounts, softmax(then[rows, best]), model.atoms)
        losses = -(wanted * np.log(softmax(now[rows, actions]))).sum(axis=-1)
        priorities = losses + (wanted * np.log(np.maximum(wanted, 1e-30))).sum(axis=-1)
    assert total.numpy() == pytest.approx((losses * batch[WEIGHTS]).mean(), rel=1e-4)
    np.testing.assert_allclose(metrics["rows"].numpy(), priorities, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", VARIANTS)
def test_a_worker_acts_by_the_values_of_the_network_and_never_does_what_is_masked(settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    model = make_model(config, num_mask=NUM_ACTIONS)
    graph, spec = export_acting_graph(model)
    assert spec.distribution == "greedy"
    acting = ActingGraph(graph, spec)
    acting.set_weights(model.get_weights())
    obs = np.random.default_rng(0).normal(size=(5, NUM_ACTIONS + NUM_OBS)).astype(np.float32)
    obs[:, :NUM_ACTIONS] = [[1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 1]]
    inputs, values, _ = acting.run(obs)
    is_masked = obs[:, :NUM_ACTIONS] == 0
    assert (inputs[is_masked] == np.float32(MASKED_LOGIT)).all()
    assert (np.abs(inputs[~is_masked]) < 10).all()
    np.testing.assert_allclose(values, inputs.max(axis=1), rtol=1e-6)
    actions = model.distribution.deterministic(inputs)
    assert not is_masked[np.arange(5), actions - START].any()


@pytest.mark.parametrize(("num_frames", "frame"), [(1, (8, 8, 4)), (4, (8, 8))])
def test_only_what_is_known_as_a_stack_is_stored_frame_by_frame(num_frames: int, frame: tuple[int, ...]) -> None:
    """Else the four channels of an image would take the room of four rows."""
    layout = ObsLayout((8, 8, 4), num_frames=num_frames)
    config = make_config()
    model = DQN.build_model(config, Observations(layout.shape, "uint8", layout), spaces.Discrete(NUM_ACTIONS), 1)
    spec = replay_spec(config, model)
    assert (spec.stack, spec.frame["frame"].shape) == (num_frames, frame)


def test_the_log_says_what_the_replay_and_its_checkpoints_take(caplog: pytest.LogCaptureFixture) -> None:
    config, other = make_config(prioritized_replay=True, checkpoint_keep=2), make_config(checkpoint_replay=False)
    spec = replay_spec(config, make_model(config))
    with caplog.at_level(logging.INFO):
        DQN.check_room([(config, make_model(config)), (other, make_model(other))])
    size = 64 * spec.row.itemsize + 64 * 8
    assert (
        f"each checkpoint takes up to {size / 1e6:.3g} MB of disk for it, the 2 that are kept (checkpoint_keep) and "
        f"the one being written up to {3 * size / 1e6:.3g} MB"
    ) in caplog.messages[0]
    assert "checkpoints leave it out (checkpoint_replay: false)" in caplog.messages[1]


def test_the_log_says_that_workers_will_wait_where_too_little_may_be_sampled_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shape = {"num_envs_per_worker": 8, "rollout_fragment_length": 2, "max_env_steps_ahead": 64}
    enough, too_many = make_config(**shape, num_workers=4), make_config(**shape, num_workers=5)
    DQN.check_room([(enough, make_model(enough))])
    assert not caplog.messages
    DQN.check_room(2 * [(too_many, make_model(too_many))])  # two policies, one plan of leases
    assert caplog.messages == [
        "no more than 4 fragments are under way at a time, as max_env_steps_ahead is 64 and a fragment has 16 env "
        "steps: of 5 workers the others wait. Raise it, or set fewer workers"
    ]


def test_the_log_says_where_few_rows_have_all_their_steps(caplog: pytest.LogCaptureFixture) -> None:
    for config in (
        make_config(n_step=2, rollout_fragment_length=8),
        make_config(n_step=4, batch_mode="complete_episodes"),
    ):
        DQN.check_room([(config, make_model(config))])
    assert not caplog.messages
    config = make_config(n_step=3)
    DQN.check_room([(config, make_model(config))])
    assert caplog.messages == [
        "n_step is 3, and fragments end after 4 steps, so that only 50 % of the rows have so many. Set "
        "rollout_fragment_length to 12 or more"
    ]


@pytest.fixture(scope="module")
def trained() -> tuple[DQN, list[Any]]:
    """An algorithm that was given eight fragments of eight rows, the first of which is only stored."""
    config = make_config(prioritized_replay=True)
    algorithm = DQN(config, make_model(config))
    before = algorithm.get_state()
    algorithm.warm_up()
    for name, tensor in algorithm.get_state().tensors.items():
        np.testing.assert_array_equal(tensor, before.tensors[name], name)
    return algorithm, feed(algorithm, range(8))


def test_minibatches_are_made_as_they_become_due_and_the_rest_is_carried_over() -> None:
    """Eight rows at an intensity of 1.25 are two minibatches of four, and half a one."""
    config = make_config(training_intensity=1.25, eager=True)
    algorithm = DQN(config, make_model(config))
    results = feed(algorithm, range(6))
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, 2, 3, 2, 3, 2]
    last = results[-1].metrics
    assert (last["rows_stored"], last["rows_evicted"], last["rows_trained"]) == (48, 0, 48)
    assert last["training_intensity"] == pytest.approx(1.25, abs=0.1)


def test_in_a_hurry_minibatches_stay_due_and_are_made_after_a_restore() -> None:
    """So that what is stored is in the last checkpoint, however many minibatches an update has."""
    config = make_config(eager=True)
    first, second = (DQN(config, make_model(config)) for _ in range(2))
    feed(first, range(2))
    first.hurry()
    (result,) = feed(first, [2])
    assert (result.metrics["num_sgd_steps"], result.metrics["rows_stored"]) == (0, 24)
    state, values, pieces = saved(first)
    second.set_state(state)
    second.restore_experience(values, pieces)
    (result,) = feed(second, [3])
    assert result.metrics["num_sgd_steps"] == 12


def test_nothing_is_traced_after_warm_up_whatever_is_due(trained: tuple[DQN, list[Any]]) -> None:
    algorithm, results = trained
    assert [result.metrics["num_sgd_steps"] for result in results] == [0, *[6] * 7]
    assert algorithm.compiled.traces == 1
    algorithm.update(algorithm.make_batch([make_fragment(99, length=1), make_fragment(98, length=7)]), 64)
    algorithm.update(algorithm.make_batch([make_fragment(97, length=32, num_envs=1)]), 80)
    assert algorithm.compiled.traces == 1


def test_what_is_drawn_goes_by_the_errors_that_the_update_found(trained: tuple[DQN, list[Any]]) -> None:
    algorithm, results = trained
    assert results[-1].metrics["prioritized_replay_beta"] == pytest.approx(0.4, abs=0.01)
    assert algorithm.compiled.rows is not None
    assert algorithm.compiled.rows.shape == (6, 4)
    drawn = algorithm.replay.sample(4, num_batches=50, beta=1.0)
    assert len(np.unique(drawn.weights)) > 10


def test_the_target_follows_after_so_many_minibatches_across_calls() -> None:
    """6, 12 and 18 minibatches are made: it follows at 5, at 10 and at 15, or never."""
    name = "value/head/kernel"
    for freq, times in ((5, 3), (1000, 0)):
        config = make_config(target_update_freq=freq)
        algorithm = DQN(config, make_model(config))
        targets = [make_model(config).get_weights()[name]]
        for number in range(4):
            feed(algorithm, [number])
            targets.append(algorithm.get_state().tensors[f"target/{name}"])
        changes = [bool((one != other).any()) for one, other in pairwise(targets)]
        assert sum(changes) == times
        assert (algorithm.get_state().tensors[f"weights/{name}"] != targets[0]).any()


def test_with_a_small_tau_the_target_comes_nearer_at_each_minibatch() -> None:
    config = make_config(target_update_freq=1, tau=0.5, training_intensity=0.5, eager=True)  # one minibatch a fragment
    algorithm = DQN(config, make_model(config))
    name = "value/head/kernel"
    expected = make_model(config).get_weights()[name]
    for number in range(4):
        (result,) = feed(algorithm, [number])
        tensors = algorithm.get_state().tensors
        if result.metrics["num_sgd_steps"]:
            expected = expected + 0.5 * (tensors[f"weights/{name}"] - expected)
        np.testing.assert_allclose(tensors[f"target/{name}"], expected, rtol=1e-5, atol=1e-7)


def test_an_update_that_is_not_finite_leaves_weights_target_and_optimizer_as_they_were() -> None:
    config = make_config(eager=True, lr=1e38, target_update_freq=1)
    algorithm = DQN(config, make_model(config))
    feed(algorithm, [0])
    before = algorithm.get_state()
    (result,) = feed(algorithm, [1])
    assert (result.skipped, result.bad_column) == (True, "")
    assert result.metrics["updates_skipped"] == 1
    after = algorithm.get_state()
    for name, tensor in before.tensors.items():
        if name != "optimizer/001":  # the learning rate
            np.testing.assert_array_equal(after.tensors[name], tensor, name)


def test_columns_that_nobody_asked_for_are_refused() -> None:
    """Numbers of stored pieces among them, which would be kept for good."""
    algorithm = DQN(make_config(), make_model(make_config()))
    fragment = make_fragment(1)
    for name, column in ((c.PIECE, np.ones(fragment[c.DISCOUNTS].shape, np.int64)), ("junk", np.zeros(1))):
        with pytest.raises(BatchError, match=name):
            algorithm.check_fragment({**fragment, name: column})


PRIORITISED = {"prioritized_replay": True, "worker_priorities": True, "prioritized_replay_alpha": 1.0}


def with_priorities(number: int) -> dict[str, Any]:
    """A fragment whose second row alone has an error to speak of."""
    fragment = make_fragment(number)
    fragment[c.PRIORITIES] = np.zeros(fragment[c.ACTIONS].shape, np.float32)
    fragment[c.PRIORITIES][1, 0] = 1 + number
    return fragment


def test_rows_are_drawn_by_what_workers_sent_until_they_are_trained_on() -> None:
    config = make_config(**PRIORITISED)
    algorithm = DQN(config, make_model(config))
    fragment = with_priorities(3)
    algorithm.check_fragment(fragment)
    algorithm.make_batch([fragment])
    drawn = algorithm.replay.sample(4, num_batches=8)
    np.testing.assert_array_equal(drawn.columns[c.OBS], np.broadcast_to(fragment[c.OBS][1, 0], (8, 4, NUM_OBS)))
    feed_these(algorithm, [with_priorities(4)])
    assert len(np.unique(algorithm.replay.sample(4, num_batches=50).ids)) < 8
    feed_these(algorithm, [make_fragment(5) | {c.PRIORITIES: np.ones((4, 2), np.float32)}] * 3)
    assert len(np.unique(algorithm.replay.sample(4, num_batches=50).ids)) > 20


def feed_these(algorithm: DQN, fragments: Any) -> None:
    for fragment in fragments:
        algorithm.update(algorithm.make_batch([fragment]), 0)


@pytest.mark.parametrize(
    ("priorities", "said"),
    [
        (None, "in every fragment"),
        (np.full((4, 2), np.nan, np.float32), "finite numbers"),
        (np.full((4, 2), np.inf, np.float32), "finite numbers"),
        (np.full((4, 2), 1e39), "numbers of float32"),
        (np.full((4, 2), -0.5, np.float32), "at least 0"),
        (np.zeros((2, 4), np.float32), r"shape \(4, 2\)"),
        (np.zeros((4, 2), np.int64), "what fits float32"),
        (np.zeros((4, 2), "U3"), "what fits float32"),
    ],
)
def test_priorities_that_are_none_are_refused(priorities: Any, said: str) -> None:
    config = make_config(**PRIORITISED)
    algorithm = DQN(config, make_model(config))
    fragment = make_fragment(1) | ({} if priorities is None else {c.PRIORITIES: priorities})
    with pytest.raises(BatchError, match=f"priorities.*{said}"):
        algorithm.check_fragment(fragment)


def test_with_priorities_of_workers_too_a_restored_run_goes_on_to_the_bit() -> None:
    config = make_config(**PRIORITISED, n_step=3)
    first, second = (DQN(config, make_model(config, seed)) for seed in (1, 5))
    feed_these(first, map(with_priorities, range(6)))
    assert_goes_on_to_the_bit(first, second, lambda own: feed_these(own, map(with_priorities, range(50, 53))))


def test_the_next_update_after_a_restore_is_equal_to_the_bit(trained: tuple[DQN, list[Any]]) -> None:
    config = make_config(prioritized_replay=True)
    second = DQN(config, make_model(config, seed=5))
    assert_goes_on_to_the_bit(trained[0], second, lambda algorithm: feed(algorithm, range(50, 53)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gamma": 0.5}, "gamma 0.99 there, 0.5 here"),
        ({"n_step": 2}, "n_step 1 there, 2 here"),
        ({"clip_rewards": True}, "clip_rewards None there, True here"),
        ({"prioritized_replay_alpha": 1.0}, "prioritized_replay_alpha 0.6 there, 1.0 here"),
    ],
)
def test_rows_made_with_other_settings_are_refused(
    trained: tuple[DQN, list[Any]], changed: dict[str, Any], said: str
) -> None:
    _, values, pieces = saved(trained[0])
    config = make_config(prioritized_replay=True, **changed)
    with pytest.raises(CheckpointError, match=said):
        DQN(config, make_model(config)).restore_experience(values, pieces)


def test_rows_of_a_checkpoint_that_does_not_say_how_they_were_made_are_taken_up(trained: tuple[DQN, list[Any]]) -> None:
    """As older ones don't."""
    _, values, pieces = saved(trained[0])
    for name in ("gamma", "n_step", "clip_rewards", "prioritized_replay_alpha", "prioritized_replay_eps"):
        del values["spec"][name]
    config = make_config(prioritized_replay=True)
    algorithm = DQN(config, make_model(config))
    algorithm.restore_experience(values, pieces)
    assert len(algorithm.replay) == len(trained[0].replay)


def test_streams_behind_convolutions_are_relu_as_these_are() -> None:
    """Wang et al. 2016; fcnet_activation, tanh by default, is of networks without convolutions."""
    model = DQN.build_model(
        make_config(model={}, dueling=True, dueling_hiddens=[6]),
        Observations((84, 84, 1), "uint8", ObsLayout((84, 84, 1))), spaces.Discrete(2), 1,
    )  # fmt: skip
    assert isinstance(model, QNetwork)
    obs = np.random.default_rng(0).integers(0, 256, (3, 84, 84, 1), np.uint8)
    weights = model.get_weights()
    features = model._branches[0].step(obs, None, [])[0].numpy()
    streams = [
        np.maximum(features @ weights[f"{name}/dense_0/kernel"] + weights[f"{name}/dense_0/bias"], 0.0)
        @ weights[f"{name}/head/kernel"] + weights[f"{name}/head/bias"]
        for name in ("value", "advantage")
    ]  # fmt: skip
    expected = streams[0] + streams[1] - streams[1].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(model.q(obs)[0].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_what_a_checkpoint_holds_may_be_left_out_when_a_run_goes_on() -> None:
    config = make_config()
    algorithm = DQN(config, make_model(config))
    algorithm.make_batch([make_fragment(0)])
    held = algorithm.hold_experience()
    assert held is not None
    pieces = list(held.pieces())
    other = make_config(replay_capacity=32)
    with pytest.raises(CheckpointError, match="With checkpoint_replay false a run goes on without it"):
        DQN(other, make_model(other)).restore_experience(held.values, pieces)
    without = make_config(replay_capacity=32, checkpoint_replay=False)
    left_out = DQN(without, make_model(without))
    left_out.restore_experience(held.values, pieces)
    assert len(left_out.replay) == 0
