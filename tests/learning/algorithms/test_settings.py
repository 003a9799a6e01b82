"""Settings that algorithms share, and sizes derived from the user's."""

from __future__ import annotations

import itertools
import logging
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aiorl.config.key import changed
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError
from aiorl.learning.algorithm import experience_of
from aiorl.learning.algorithms import ALGORITHMS
from aiorl.learning.algorithms.dqn import DQNConfig
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.algorithms.registry import algorithm_class, config_class
from aiorl.learning.algorithms.surrogate import SurrogateKeys
from aiorl.learning.keys.actor_critic import ActorCriticConfig, OnPolicyConfig
from aiorl.run.policy_plan import config_of


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 64))
def test_a_train_batch_is_whole_fragments_or_the_error_names_nearest_sizes(
    size: int, length: int, envs: int
) -> None:
    values = {
        "train_batch_size": size,
        "rollout_fragment_length": length,
        "num_envs_per_worker": envs,
    }
    if size % (length * envs) == 0:
        ActorCriticConfig.from_mapping(values)
        return
    with pytest.raises(ConfigError) as caught:
        ActorCriticConfig.from_mapping(values)
    offered = [
        int(word.strip(",")) for word in caught.value.hint.split() if word.strip(",").isdecimal()
    ]
    assert offered
    for fitting in offered:
        assert abs(fitting - size) < length * envs or fitting == length * envs
        ActorCriticConfig.from_mapping({**values, "train_batch_size": fitting})


def test_whole_episodes_take_any_train_batch_size() -> None:
    values = {"train_batch_size": 1000, "rollout_fragment_length": 300}
    ActorCriticConfig.from_mapping({**values, "batch_mode": "complete_episodes"})


WITH_CRITICS = pytest.mark.parametrize("algo", ["sac", "td3", "cql", "iql"])


def make(algo: str, **settings: Any) -> CommonConfig:
    return config_class(algo).from_mapping(
        {"env": "E", "input": "data" if algo in ("bc", "cql", "iql", "marwil") else "sampler"}
        | settings
    )


@WITH_CRITICS
def test_networks_are_two_layers_of_256_relu_units_unless_set_otherwise(algo: str) -> None:
    model = make(algo).model
    assert (model.fcnet_hiddens, model.fcnet_activation) == ((256, 256), "relu")
    model = make(algo, model={"fcnet_activation": "tanh"}).model
    assert (model.fcnet_hiddens, model.fcnet_activation) == ((256, 256), "tanh")
    model = make(algo, model={"fcnet_hiddens": [64, 64]}).model
    assert (model.fcnet_hiddens, model.fcnet_activation) == ((64, 64), "relu")


WITH_IT = ("a2c", "a3c", "appo", "impala", "pg", "ppo", "sac")


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_algorithms_with_a_gaussian_accept_use_sde_and_others_refuse_it(algo: str) -> None:
    kind = config_class(algo)
    if algo in WITH_IT:
        assert kind.from_mapping({"use_sde": True}).state_dependent_noise is not None
        assert kind.from_mapping({}).state_dependent_noise is None
        return
    with pytest.raises(ConfigError) as caught:
        kind.from_mapping({"use_sde": True})
    assert caught.value.key == "use_sde"


@pytest.mark.parametrize("algo", WITH_IT)
def test_workers_know_how_long_a_noise_matrix_lasts(algo: str) -> None:
    """-1 means as long as a fragment."""
    kind = algorithm_class(algo)
    for freq, steps in ((-1, kind.config_class().rollout_fragment_length), (3, 3)):
        told = kind.acting_settings(kind.config_class(use_sde=True, sde_sample_freq=freq))[
            "exploration"
        ]
        assert (told["type"], told["sample_freq"]) == ("StateDependentNoise", steps)
    assert "StateDependentNoise" not in str(kind.acting_settings(kind.config_class()))


LSTM: dict[str, Any] = {"model": {"use_lstm": True}}
LARGE = {"rollout_fragment_length": 64, "num_envs_per_worker": 32}
OWN_PRIORITIES = {"worker_priorities": True, "prioritized_replay": True}
SEQUENCES: dict[str, Any] = {
    **LSTM,
    "rollout_fragment_length": 10,
    "replay_sequence_length": 6,
    "burn_in": 2,
    "train_batch_size": 8,
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {"sde_sample_freq": 4}, "sde_sample_freq"),
    ("ppo", {"sde_initial_log_std": -1.0}, "sde_initial_log_std"),
    ("ppo", {"use_sde": True, "sde_sample_freq": 0}, "sde_sample_freq"),
    ("ppo", {"use_sde": True, "model": {"free_log_std": True}}, "model.free_log_std"),
    ("ppo", {"use_sde": True, "model": {"custom_model": "a:b"}}, "use_sde"),
    ("ppo", {"model": {"use_lstm": True, "custom_model": "a:b"}}, "model.use_lstm"),
    ("impala", {"model": {"free_log_std": True, "custom_model": "a:b"}}, "model.free_log_std"),
    ("ppo", {"model": {"custom_features": True}}, "model.custom_features"),
    (
        "ppo",
        {"model": {"custom_model": "a:b", "custom_state": [[3]], "custom_features": True}},
        "model.custom_state",
    ),
    ("ppo", {"model": {"vf_hiddens": [8], "vf_share_layers": True}}, "model.vf_hiddens"),
    ("sac", {"model": {"vf_hiddens": [8]}}, "model.vf_hiddens"),
    ("ppo", {"train_batch_size": 4000, "rollout_fragment_length": 64}, "train_batch_size"),
    ("ppo", {"train_batch_size": 2048, "sgd_minibatch_size": 4096}, "sgd_minibatch_size"),
    (
        "ppo",
        {**LSTM, "sgd_minibatch_size": 100, "rollout_fragment_length": 64},
        "sgd_minibatch_size",
    ),
    ("ppo", {"lr_schedule": [[10, 1e-3], [5, 1e-4]]}, "lr_schedule"),
    ("ppo", {"entropy_coeff_schedule": []}, "entropy_coeff_schedule"),
    ("ppo", {"clip_param": 0}, "clip_param"),
    *(
        ("ppo", {name: points}, name)
        for name in ("clip_param_schedule", "vf_clip_param_schedule")
        for points in ([[0, 0.2], [10, 0.0]], [[5, 0.2], [1, 0.1]], [])
    ),
    ("ppo", {"kl_target": 0.1}, "kl_target"),
    ("pg", {"lambda_": 0.9}, "lambda_"),
    ("pg", {"vf_loss_coeff": 0.5}, "vf_loss_coeff"),
    ("impala", {"sgd_minibatch_size": 100, "rollout_fragment_length": 64}, "sgd_minibatch_size"),
    ("impala", {"sgd_minibatch_size": 8192, "train_batch_size": 4096}, "sgd_minibatch_size"),
    ("impala", {"vtrace_clip_rho_threshold": 0}, "vtrace_clip_rho_threshold"),
    ("impala", {"vtrace": False, "vtrace_clip_rho_threshold": 2.0}, "vtrace_clip_rho_threshold"),
    (
        "impala",
        {"vtrace": False, "vtrace_clip_pg_rho_threshold": 2.0},
        "vtrace_clip_pg_rho_threshold",
    ),
    ("impala", {"opt_type": "sgd"}, "opt_type"),
    ("impala", {"decay": 0.5}, "decay"),
    ("impala", {"max_policy_lag": -1}, "max_policy_lag"),
    ("appo", {"train_batch_size": 4000, **LARGE}, "train_batch_size"),
    (
        "appo",
        {**LSTM, "sgd_minibatch_size": 100, "rollout_fragment_length": 64},
        "sgd_minibatch_size",
    ),
    ("appo", {"target_update_freq": 0}, "target_update_freq"),
    ("appo", {"target_worker_clipping": 0}, "target_worker_clipping"),
    ("appo", {"vf_clip_param": 1.0}, "vf_clip_param"),
    ("bc", {"vf_loss_coeff": 0.3}, "vf_loss_coeff"),
    (
        "bc",
        {"observation_filter": "MeanStdFilter", "gradients": "workers", "sgd_minibatch_size": 2048},
        "observation_filter",
    ),
    ("marwil", {"normalize_advantages": True}, "normalize_advantages"),
    ("marwil", {**LSTM, "postprocess_inputs": False}, "postprocess_inputs"),
    ("dqn", {"learning_starts": 65, "replay_capacity": 64}, "learning_starts"),
    (
        "dqn",
        {"replay_capacity": 7, "learning_starts": 1, "num_envs_per_worker": 2},
        "replay_capacity",
    ),
    ("dqn", {"input": "files/*.json", "input_epochs": 1, "learning_starts": None}, "input_epochs"),
    ("dqn", {"epsilon_schedule": [[0, 2.0]]}, "epsilon_schedule"),
    ("dqn", {"num_atoms": 5, "v_min": 3, "v_max": 2}, "v_min"),
    ("dqn", {"v_max": 100}, "v_max"),
    ("dqn", {"sigma0": 1.0}, "sigma0"),
    ("dqn", {"noisy": True, "epsilon_schedule": [[0, 0.5]]}, "epsilon_schedule"),
    ("dqn", {"v_min": float("-inf")}, "v_min"),
    ("dqn", {"v_max": float("nan")}, "v_max"),
    ("dqn", {"num_atoms": 5, "huber_delta": 2}, "huber_delta"),
    ("dqn", {"dueling": False, "dueling_hiddens": [4]}, "dueling_hiddens"),
    ("dqn", {"model": {"vf_share_layers": True}}, "model.vf_share_layers"),
    ("dqn", {"model": {"free_log_std": True}}, "model.free_log_std"),
    ("dqn", {"prioritized_replay_alpha": 0.5}, "prioritized_replay_alpha"),
    ("dqn", {"per_worker_epsilon": True, "num_workers": 0}, "per_worker_epsilon"),
    (
        "dqn",
        {"per_worker_epsilon": True, "num_workers": 1, "epsilon_schedule": [[0, 1.0]]},
        "epsilon_schedule",
    ),
    ("dqn", {"fragments_per_update": 10**9}, "fragments_per_update"),
    ("dqn", {"training_intensity": float("inf")}, "training_intensity"),
    ("dqn", {"n_step": 5, "rollout_fragment_length": 4}, "n_step"),
    ("dqn", {"worker_priorities": True}, "worker_priorities"),
    ("dqn", {**OWN_PRIORITIES, "value_rescaling": True}, "worker_priorities"),
    ("dqn", {**OWN_PRIORITIES, **SEQUENCES}, "worker_priorities"),
    ("dqn", {**LSTM, "rollout_fragment_length": 4}, "rollout_fragment_length"),
    ("dqn", {"sequence_overlap": 0}, "sequence_overlap"),
    ("dqn", {"sequence_priority_eta": 0.5}, "sequence_priority_eta"),
    ("dqn", {**SEQUENCES, "sequence_priority_eta": 0.5}, "sequence_priority_eta"),
    ("dqn", {**SEQUENCES, "burn_in": 6}, "burn_in"),
    ("dqn", {**SEQUENCES, "sequence_overlap": 1}, "sequence_overlap"),
    ("dqn", {**SEQUENCES, "sequence_overlap": 6}, "sequence_overlap"),
    ("dqn", {**SEQUENCES, "replay_sequence_length": 11}, "replay_sequence_length"),
    ("dqn", {**SEQUENCES, "n_step": 5}, "n_step"),
    ("dqn", {**SEQUENCES, "train_batch_size": 3}, "train_batch_size"),
    ("dqn", {**SEQUENCES, "batch_mode": "complete_episodes"}, "batch_mode"),
    ("dqn", {**SEQUENCES, "model": {}}, "replay_sequence_length"),
    ("dqn", {"num_atoms": 5, "value_rescaling": True}, "value_rescaling"),
    ("apex", {"prioritized_replay": False}, "worker_priorities"),
    ("apex", {"num_workers": 0}, "per_worker_epsilon"),
    ("apex", {"model": {"use_gru": True}}, "worker_priorities"),
    ("sac", {"model": {"use_gru": True}}, "model.use_gru"),
    ("sac", {"model": {"free_log_std": True}}, "model.free_log_std"),
    ("sac", {"model": {"vf_share_layers": True}}, "model.vf_share_layers"),
    ("sac", {"target_entropy": "high"}, "target_entropy"),
    ("sac", {"target_entropy": 0.5, "target_entropy_scale": 0.5}, "target_entropy_scale"),
    ("sac", {"alpha_lr": 0, "target_entropy": 0.5}, "target_entropy"),
    ("sac", {"alpha_lr": 0, "target_entropy_scale": 0.5}, "target_entropy_scale"),
    ("sac", {"input": "files/*.json", "input_epochs": 1, "learning_starts": None}, "input_epochs"),
    ("td3", {"smooth_target_policy": False, "target_noise": 0.1}, "target_noise"),
    ("cql", {"postprocess_inputs": False}, "postprocess_inputs"),
    ("cql", {"shuffle_buffer_size": 3}, "shuffle_buffer_size"),
    ("cql", {"input_epochs": 1}, "input_epochs"),
    ("cql", {"random_timesteps": 9}, "random_timesteps"),
    ("cql", {"input": {"one": 0.5, "other": 0.5}}, "learning_starts"),
    ("cql", {"input": "package.module:Reader"}, "learning_starts"),
    ("cql", {"cql_weight": 0}, "cql_weight"),
    ("cql", {"cql_weight_lr": 0.1}, "cql_weight_lr"),
    ("iql", {"expectile": 1.0}, "expectile"),
    ("iql", {"model": {"vf_share_layers": True}}, "model.vf_share_layers"),
]


@pytest.mark.parametrize(("algo", "settings", "key"), REFUSED)
def test_settings_that_do_not_go_together_are_refused(
    algo: str, settings: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(algo, **settings)
    assert caught.value.key == key


def test_similar_settings_that_go_together_are_accepted() -> None:
    make("dqn", per_worker_epsilon=True, num_workers=0, bind="tcp://127.0.0.1:5557")
    make("dqn", n_step=4, rollout_fragment_length=4)
    make("dqn", n_step=5, rollout_fragment_length=4, batch_mode="complete_episodes")
    make("dqn", huber_delta=float("inf"))
    for algo, more in (("a2c", {}), ("pg", {}), ("bc", {"sgd_minibatch_size": 2048})):
        config = make(algo, gradients="workers", **more)
        assert experience_of(algorithm_class(algo), config).sends_gradients
    assert experience_of(algorithm_class("a3c"), make("a3c")).sends_gradients


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {}),
        ("marwil", {}),
        ("a3c", {"num_sgd_iter": 3}),
        ("a2c", {"sgd_minibatch_size": 64}),
    ],
)
def test_gradients_from_workers_are_refused_with_a_hint_if_a_batch_has_several_steps(
    algo: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(algo, gradients="workers", **settings)
    assert caught.value.key == "gradients"
    assert "gradients: learner" in caught.value.hint


@pytest.mark.parametrize(
    ("batch", "minibatch"), [(4096, 128), (65_536, 2048), (32, 32), (2048, 64)]
)
def test_minibatches_of_ppo_grow_with_the_train_batch(batch: int, minibatch: int) -> None:
    config: Any = make(
        "ppo", train_batch_size=batch, num_envs_per_worker=1, rollout_fragment_length=32
    )
    assert (config.minibatch_steps(), config.fragments_per_batch()) == (minibatch, batch // 32)


class OneConfig(PPOConfig):
    """PPO's config, with sizes that stay the same if the defaults change."""

    rollout_fragment_length: int = changed(PPOConfig, "rollout_fragment_length", 64)
    num_envs_per_worker: int = changed(PPOConfig, "num_envs_per_worker", 16)
    train_batch_size: int = changed(PPOConfig, "train_batch_size", 2048)


SIZES = {
    "rollout_fragment_length": st.integers(1, 3000),
    "num_envs_per_worker": st.integers(1, 200),
    "train_batch_size": st.integers(1, 9000),
    "sgd_minibatch_size": st.integers(1, 9000),
    "num_workers": st.integers(0, 20),
}


@settings(max_examples=80)
@given(
    st.sampled_from(["ppo", "a2c", "impala", "appo"]),
    st.sampled_from(sorted(SIZES)),
    st.booleans(),
    st.data(),
)
def test_any_one_size_can_be_set_and_the_others_follow(
    algo: str, name: str, is_recurrent: bool, data: Any
) -> None:
    size = data.draw(SIZES[name])
    config: Any = config_class(algo).from_mapping({name: size, "model": {"use_lstm": is_recurrent}})
    assert getattr(config, name) == size
    fragment = config.rollout_fragment_length * config.num_envs_per_worker
    assert config.train_batch_size % fragment == 0
    if algo in ("ppo", "a2c") and name == "num_workers":
        assert config.train_batch_size >= fragment * size


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"rollout_fragment_length": 100}, {"num_envs_per_worker": 10, "train_batch_size": 2000}),
        ({"train_batch_size": 400}, {"rollout_fragment_length": 25, "num_envs_per_worker": 8}),
        ({"num_envs_per_worker": 10}, {"rollout_fragment_length": 64, "train_batch_size": 2560}),
        ({"num_workers": 4}, {"num_envs_per_worker": 8, "train_batch_size": 2048}),
        (
            {"train_batch_size": 4000, "rollout_fragment_length": 200, "num_workers": 10},
            {"num_envs_per_worker": 2},
        ),
        ({"sgd_minibatch_size": 100, "model": {"use_lstm": True}}, {"rollout_fragment_length": 50}),
    ],
)
def test_derived_sizes_change_little_and_are_logged(
    given: dict[str, Any], made: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = OneConfig(**given)
    assert {name: getattr(config, name) for name in made} == made
    assert len(caplog.messages) == 1
    changed = [name for name in made if config.origin_of(name) == "derived"]
    assert changed
    assert all(re.search(rf"{name}\D+{made[name]:,}\b", caplog.text) for name in changed)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"n_step": 10}, {"rollout_fragment_length": 40}),
        ({"replay_capacity": 500}, {"learning_starts": 500}),
        ({"learning_starts": 100_000}, {"replay_capacity": 100_000}),
        ({"replay_capacity": 20}, {"num_envs_per_worker": 5, "learning_starts": 20}),
        ({"model": {"use_lstm": True}}, {"rollout_fragment_length": 40, "train_batch_size": 1280}),
        (
            {"model": {"use_lstm": True}, "replay_sequence_length": 24, "burn_in": 8},
            {"rollout_fragment_length": 40},
        ),
    ],
)
def test_sizes_of_a_replay_follow_too(given: dict[str, Any], made: dict[str, int]) -> None:
    config = DQNConfig(**given)
    assert {name: getattr(config, name) for name in made} == made


def test_derived_sizes_are_not_the_users(caplog: pytest.LogCaptureFixture) -> None:
    config = OneConfig(rollout_fragment_length=100)
    assert config.users_values() == {"rollout_fragment_length": 100}
    caplog.clear()
    assert config.updated({"lr": 1e-3}).train_batch_size == config.train_batch_size
    assert not caplog.messages
    assert config.updated({"train_batch_size": 500}).rollout_fragment_length == 100


def test_a_policy_cannot_derive_sizes_of_the_run() -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        config_of(OneConfig(), OneConfig, "left", {"sgd_minibatch_size": 10_000})


SIZE_KEYS = (
    "train_batch_size",
    "sgd_minibatch_size",
    "rollout_fragment_length",
    "num_envs_per_worker",
)


@pytest.mark.parametrize("value", [10**9, 2**31 - 1, 10**17, 10**17 + 3])
@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
def test_a_huge_size_is_refused_with_its_key_or_derives_no_other_huge_one(
    algo: str, value: int
) -> None:
    kind = config_class(algo)
    own = [name for name in (*SIZE_KEYS, "n_step", "num_workers") if name in kind.model_fields]
    for name, is_recurrent in itertools.product(own, [False, True]):
        model = {"use_lstm": is_recurrent}
        config = made_or_refused(kind, {name: value, "env": "CartPole-v1", "model": model})
        if isinstance(config, ConfigError):
            assert config.key == name or is_recurrent, (
                "some algorithms need other settings for memory"
            )
        else:
            others = {
                other: getattr(config, other, None) or 0 for other in SIZE_KEYS if other != name
            }
            assert max(others.values()) <= 2**20, (name, others)


def made_or_refused(kind: type[CommonConfig], values: dict[str, Any]) -> CommonConfig | ConfigError:
    try:
        return kind.from_mapping(values)
    except ConfigError as error:
        return error


def test_a_large_size_can_be_set_along_with_the_one_that_it_needs() -> None:
    with pytest.raises(ConfigError, match="train_batch_size") as refused:
        PPOConfig(sgd_minibatch_size=2_000_000)
    assert (refused.value.key, refused.value.value) == ("sgd_minibatch_size", 2_000_000)
    config = PPOConfig(sgd_minibatch_size=2_000_000, train_batch_size=4_000_000)
    assert (config.train_batch_size, config.sgd_minibatch_size) == (4_000_000, 2_000_000)


def test_rules_of_a_table_of_keys_are_never_skipped() -> None:
    """`check` of a config calls none behind it."""

    class First(SurrogateKeys, OnPolicyConfig):
        pass

    with pytest.raises(ConfigError, match="clip_param_schedule"):
        First.from_mapping({"clip_param_schedule": [[0, -1.0]]})
    with pytest.raises(TypeError, match=r"class Last\(SurrogateKeys, \.\.\.\)"):

        class Last(OnPolicyConfig, SurrogateKeys):
            pass
