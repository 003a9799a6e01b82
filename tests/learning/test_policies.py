"""Policies under RLlib's names: they act, and learn by an algorithm's update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import aiorl
from aiorl.compat.optimizers import SyncSamplesOptimizer
from aiorl.compat.rollout_worker import RolloutWorker
from aiorl.compat.worker_set import WorkerSet
from aiorl.data.sample_batch import SampleBatch
from aiorl.errors import BatchError, ConfigError, PolicyError
from aiorl.learning.steps import Descent

SMALL: dict[str, Any] = {
    "model": {"fcnet_hiddens": [8]},
    "lr": 0.01,
    "eager": True,
    "no_eager_on_workers": True,  # would stay for other tests
}
GRADIENT_NAMES = [
    "PGTFPolicy",
    "PPOTFPolicy",
    "VTraceTFPolicy",
    pytest.param("AsyncPPOTFPolicy", marks=pytest.mark.slow),
]
REPLAY_NAMES = ["DQNTFPolicy", pytest.param("SACTFPolicy", marks=pytest.mark.slow)]

Make = Callable[..., RolloutWorker]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RolloutWorker] = []

    def worker(name: str, settings: dict[str, Any] | None = None, **arguments: Any) -> Any:
        policy_config = {**SMALL, **(settings or {})}
        made.append(
            RolloutWorker(
                "CartPole-v1",
                getattr(aiorl, name),
                policy_config=policy_config,
                **{"rollout_fragment_length": 32, "seed": 1, **arguments},
            )
        )
        return made[-1]

    yield worker
    for one in made:
        one.stop()


def weights_of(worker: RolloutWorker) -> dict[str, Any]:
    weights: dict[str, Any] = worker.get_weights()["default_policy"]
    return weights


def are_equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(np.array_equal(array, right[name]) for name, array in left.items())


@pytest.mark.parametrize("name", GRADIENT_NAMES)
def test_a_policy_learns_from_its_samples_by_its_gradients(make: Make, name: str) -> None:
    """R254."""
    worker, twin = make(name), make(name)
    rows = worker.sample()
    before = weights_of(worker)
    gradients, _ = worker.compute_gradients(rows)
    assert are_equal(before, weights_of(worker))
    assert worker.apply_gradients(gradients)["cur_lr"] == pytest.approx(0.01)
    info = twin.learn_on_batch(rows)
    assert info["num_rows"] == 32
    after = weights_of(worker)
    assert not are_equal(before, after)
    for weight, array in weights_of(twin).items():
        np.testing.assert_allclose(array, after[weight], rtol=1e-5, atol=1e-6)


def test_the_step_with_gradients_is_traced_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = []
    apply = Descent.apply
    monkeypatch.setattr(Descent, "apply", lambda *arguments: traced.append(1) or apply(*arguments))
    worker = make("A3CTFPolicy", {"eager": False})
    before = weights_of(worker)
    for _ in range(3):
        worker.learn_on_batch(worker.sample())
        after = weights_of(worker)
        assert not are_equal(before, after)
        before = after
    assert len(traced) == 1


@pytest.mark.parametrize("name", REPLAY_NAMES)
def test_a_policy_with_a_replay_learns_from_rows_and_returns_their_errors(
    make: Make, name: str
) -> None:
    """R254."""
    worker = make(name)
    rows = worker.sample()
    before = weights_of(worker)
    info = worker.learn_on_batch(rows)
    assert not are_equal(before, weights_of(worker))
    assert info["td_error"].shape == (32,)
    assert info["td_error"].min() >= 0 < info["td_error"].max()
    with pytest.raises(NotImplementedError, match="learn_on_batch"):
        worker.compute_gradients(rows)
    del rows["new_obs"]
    with pytest.raises(BatchError, match="new_obs"):
        worker.learn_on_batch(rows)


def q_of(worker: RolloutWorker, obs: Any) -> Any:
    _, _, columns = worker.get_policy().compute_actions(obs)  # type: ignore[union-attr]
    return columns["action_dist_inputs"]


def test_errors_of_q_learning_are_those_of_the_rows_after_n_steps(make: Make) -> None:
    worker = make("DQNTFPolicy", {"n_step": 3, "gamma": 0.9, "double_q": False})
    one_step = make("DQNTFPolicy", {"double_q": False}).sample()
    rows = worker.sample()
    assert "n_steps" not in rows
    places = np.flatnonzero(one_step["t"] == 0)[0] + np.arange(3)
    assert (np.diff(one_step["t"][places]) == 1).all()
    np.testing.assert_array_equal(rows["obs"], one_step["obs"])
    np.testing.assert_array_equal(rows["new_obs"][0], one_step["new_obs"][2])
    assert rows["n_step_returns"][0] == pytest.approx(1 + 0.9 + 0.81)
    taken = q_of(worker, rows["obs"])[np.arange(32), rows["actions"]]
    following = q_of(worker, rows["new_obs"]).max(1)
    expected = np.abs(rows["n_step_returns"] + rows["discounts"] * following - taken)
    np.testing.assert_allclose(worker.learn_on_batch(rows)["td_error"], expected, rtol=1e-4)


def test_rows_of_small_weight_make_small_steps(make: Make) -> None:
    worker, twin = make("DQNTFPolicy", {"grad_clip": None}), make("DQNTFPolicy")
    rows = worker.sample()
    whole = worker.learn_on_batch(rows)["grad_gnorm"]
    rows["weights"] = np.full(32, 0.5, np.float32)
    assert twin.learn_on_batch(rows)["grad_gnorm"] == pytest.approx(whole / 2, rel=1e-3)


def test_target_networks_follow_at_their_time_or_when_asked(make: Make) -> None:
    worker = make("DQNTFPolicy", {"target_update_freq": 2})
    policy: Any = worker.get_policy()
    (target,) = policy.learning.updates.plan.targets.values()
    rows = worker.sample()

    def follows() -> bool:
        return all(
            np.array_equal(variable.numpy(), policy.get_weights()[name])
            for name, variable in target.variables.items()
        )

    has_followed = []
    for _ in range(4):
        worker.learn_on_batch(rows)
        has_followed.append(follows())
    assert has_followed == [False, True, False, True]
    worker.learn_on_batch(rows)
    policy.update_target()
    assert follows()


@pytest.mark.parametrize(
    "name",
    [
        "PPOTFPolicy",
        pytest.param("AsyncPPOTFPolicy", marks=pytest.mark.slow),
        pytest.param("DQNTFPolicy", marks=pytest.mark.slow),
        pytest.param("SACTFPolicy", marks=pytest.mark.slow),
    ],
)
def test_a_restored_policy_learns_on_as_the_saved_one(make: Make, name: str) -> None:
    """Optimisers, target networks and penalties are part of the state."""
    settings = {"kl_coeff": 1.0} if "PPO" in name else {}
    first, second = make(name, settings), make(name, settings)
    rows = first.sample()
    for _ in range(2):
        first.learn_on_batch(rows)
    second.restore(first.save())
    one, other = first.learn_on_batch(rows), second.learn_on_batch(rows)
    assert one.get("cur_kl_coeff") == other.get("cur_kl_coeff")
    assert are_equal(weights_of(first), weights_of(second))
    other_network = make(name, {**settings, "model": {"fcnet_hiddens": [4]}})
    with pytest.raises(PolicyError):
        other_network.restore(first.save())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(make: Make) -> None:
    policy = make("PPOTFPolicy", {"kl_coeff": 1.0}).get_policy()
    policy.learn_on_batch(make("PPOTFPolicy").sample())
    before = policy.get_state()
    learning = before["learning"]
    optimizer = {**learning["variables"], "optimizer/002": np.zeros(3)}
    other_weights = {name: array + 1.0 for name, array in before["weights"].items()}
    unfit: list[tuple[str, dict[str, Any]]] = [
        ("learning", {name: before[name] for name in before if name != "learning"}),
        ("weights", {name: before[name] for name in before if name != "weights"}),
        ("updates", {**before, "learning": {"variables": {}, "adapted": {}}}),
        ("kl_coeff", {**before, "learning": {**learning, "adapted": {}}}),
        ("optimizer/000", {**before, "learning": {**learning, "variables": {}}}),
        ("optimizer/002", {**before, "learning": {**learning, "variables": optimizer}}),
    ]
    for name, state in unfit:
        if "weights" in state:
            state["weights"] = other_weights
        with pytest.raises(PolicyError, match=name):
            policy.set_state(state)
    with pytest.raises(PolicyError):
        policy.set_state({**before, "weights": {}})
    after = policy.get_state()
    assert are_equal(before["weights"], after["weights"])
    assert are_equal(learning["variables"], after["learning"]["variables"])
    assert after["learning"]["adapted"] == learning["adapted"]
    assert after["learning"]["updates"] == 1


@pytest.mark.parametrize(
    "name", ["PPOTFPolicy", pytest.param("AsyncPPOTFPolicy", marks=pytest.mark.slow)]
)
def test_a_penalty_adapts_once_per_train_batch_when_asked(make: Make, name: str) -> None:
    """Not with each of the many minibatches of a batch."""
    worker = make(
        name,
        {"kl_coeff": 0.2, "kl_target": 0.01, "lr": 0.001, "rollout_fragment_length": 64},
        rollout_fragment_length=64,
    )
    policy: Any = worker.get_policy()
    optimizer = SyncSamplesOptimizer(
        WorkerSet.of(worker), train_batch_size=64, num_sgd_iter=1, sgd_minibatch_size=32
    )
    assert [optimizer.step()["cur_kl_coeff"] for _ in range(2)] == [0.2, 0.2]
    assert "kl" in optimizer.learner_stats
    assert [policy.update_kl(kl) for kl in (0.021, 0.02, 0.005, 0.004)] == pytest.approx(
        [0.3, 0.3, 0.3, 0.15]
    )
    assert optimizer.step()["cur_kl_coeff"] == pytest.approx(0.15)
    with pytest.raises(PolicyError, match="nan"):
        policy.update_kl(float("nan"))


def test_only_a_policy_with_a_penalty_adapts_it(make: Make) -> None:
    policy: Any = make("PGTFPolicy").get_policy()
    with pytest.raises(NotImplementedError, match="PG"):
        policy.update_kl(0.1)


def test_gradients_of_any_number_of_rows_are_means_over_these_rows(make: Make) -> None:
    """Batches are filled up to few sizes, and the filling doesn't count. Compiled, as by default."""
    compiled = {"eager": False, "xla": "off"}
    worker = make("A3CTFPolicy", {"grad_clip": None, **compiled}, rollout_fragment_length=37)
    rows = worker.sample()
    whole, info = worker.compute_gradients(rows)
    assert info["num_rows"] == 37
    parts = [(size, worker.compute_gradients(part)[0]) for size, part in _parts(rows, 32)]
    for name, gradient in whole.items():
        mean = sum(size * part[name] for size, part in parts) / 37
        np.testing.assert_allclose(gradient, mean, rtol=1e-3, atol=1e-5)


def _parts(rows: SampleBatch, place: int) -> list[tuple[int, SampleBatch]]:
    return [(place, rows.slice(0, place)), (rows.count - place, rows.slice(place, rows.count))]


def test_settings_are_the_algorithms_keys(make: Make) -> None:
    with pytest.raises(ConfigError, match="gamma") as caught:
        make("PGTFPolicy", {"gama": 0.9})
    assert caught.value.key == "gama"
    with pytest.raises(NotImplementedError, match="DQN"):
        make("DQNTFPolicy", {"model": {"use_lstm": True}})
    worker = make("PGTFPolicy", {"gamma": 0.5}, rollout_fragment_length=100)
    rows = worker.sample()
    end = int(np.flatnonzero(rows["dones"])[0])
    np.testing.assert_allclose(rows["advantages"][end - 2 : end + 1], [1.75, 1.5, 1.0])


def test_sizes_of_train_batches_are_those_of_the_batches_learned_from(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    for sizes in ({"num_envs_per_worker": 3}, {"train_batch_size": 1000}):
        worker = make("PPOTFPolicy", sizes)
        assert worker.learn_on_batch(worker.sample())["num_rows"] == 32
    assert "to fit the settings" not in caplog.text
