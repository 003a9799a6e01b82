from __future__ import annotations

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import yaml
from gymnasium.spaces import Discrete

from aiorl.config import with_base_config
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig, with_common_config
from aiorl.config.worker import WorkerPart
from aiorl.data.spaces import space_to_dict
from aiorl.env.registry import register_env, resolve_env
from aiorl.errors import ConfigError
from aiorl.learning.algorithms.a3c import A3CConfig
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.sampling.callbacks import DefaultCallbacks

# Copied by hand from the specification's table, not from the code.
SPEC_DEFAULTS = yaml.safe_load("""
{monitor: false, log_level: INFO, callbacks: null, ignore_worker_failures: false, log_sys_usage: true, eager: false,
no_eager_on_workers: false, eager_tracing: false, optimizer: {}, gamma: 0.99, horizon: null, soft_horizon: false,
no_done_at_end: false, env_config: {}, env: null, clip_rewards: null, clip_actions: true, preprocessor_pref: deepmind,
lr: 0.0001, evaluation_interval: null, evaluation_num_episodes: 10, evaluation_config: {}, num_workers: 2, num_gpus: 0,
num_cpus_per_worker: 1, num_cpus_for_driver: 1, memory: 0, object_store_memory: 0, memory_per_worker: 0,
object_store_memory_per_worker: 0, num_envs_per_worker: 1, rollout_fragment_length: 200, train_batch_size: 200,
batch_mode: truncate_episodes, sample_async: false, observation_filter: NoFilter, synchronize_filters: true,
tf_session_args: {intra_op_parallelism_threads: 2, inter_op_parallelism_threads: 2, gpu_options: {allow_growth: true},
log_device_placement: false, device_count: {CPU: 1}, allow_soft_placement: true},
local_tf_session_args: {intra_op_parallelism_threads: 8, inter_op_parallelism_threads: 8}, compress_observations: false,
metrics_smoothing_episodes: 100, remote_worker_envs: false, remote_env_batch_wait_ms: 0, min_iter_time_s: 0,
timesteps_per_iteration: 0, seed: null, fake_sampler: false, extra_python_environs_for_driver: {},
extra_python_environs_for_worker: {}, input: sampler, input_evaluation: [is, wis], postprocess_inputs: false,
shuffle_buffer_size: 0, output: null, output_compress_columns: [obs, new_obs], output_max_file_size: 67108864}
""")


class OtherConfig(CommonConfig):
    """Config of an algorithm: other defaults, one more key."""

    lr: float = key(5e-5, "Learning rate.", group="Learning", gt=0)
    num_sgd_iter: int = key(10, "Epochs over one train batch.", group="PPO", ge=1)


def test_r166_every_key_of_the_specification_is_there_with_its_default() -> None:
    config = CommonConfig()
    values = config.to_dict()
    assert {name: values[name] for name in SPEC_DEFAULTS} == SPEC_DEFAULTS
    assert (config.model.dim, config.model.framestack, config.model.custom_preprocessor) == (
        84,
        True,
        None,
    )
    multiagent = config.multiagent
    assert multiagent.policies == {}
    assert (
        multiagent.policy_mapping_fn
        is multiagent.policies_to_train
        is multiagent.observation_fn
        is None
    )


@pytest.mark.parametrize(
    ("values", "key_at_fault", "offered"),
    [
        ({"num_worker": 3}, "num_worker", "num_workers"),
        (
            {"transport": {"heartbeat_interval": 2}},
            "transport.heartbeat_interval",
            "heartbeat_interval_s",
        ),
        ({"local_tf_session_args": {"new": 1}}, "local_tf_session_args.new", "--help-config"),
        ({"xyzzy": 1}, "xyzzy", "--help-config"),
    ],
)
def test_r167_an_unknown_key_or_sub_key_is_refused_by_name(
    values: dict, key_at_fault: str, offered: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        CommonConfig.from_mapping(values)
    assert caught.value.key == key_at_fault
    assert key_at_fault in str(caught.value)
    assert offered in str(caught.value)


def test_r167_any_key_is_allowed_below_the_free_sub_dicts() -> None:
    for free in ("tf_session_args", "env_config", "optimizer", "multiagent"):
        config = CommonConfig.from_mapping({free: {"mine": {"deep": [1, {"er": 2}]}}})
        assert config.to_dict()[free]["mine"] == {"deep": [1, {"er": 2}]}
    config = CommonConfig(model={"custom_model": "mine:make", "width": 64})
    assert config.to_dict()["model"]["width"] == 64
    assert CommonConfig.from_mapping({"mine": 3, "lr": 0.5}, allow_unknown=True).lr == 0.5


def test_a_typo_below_a_free_sub_dict_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        CommonConfig.from_mapping({"multiagent": {"polices": {}, "count_steps_by": "agent_steps"}})
    first, second = caplog.messages
    assert "multiagent.polices" in first
    assert "'policies'" in first
    assert "multiagent.count_steps_by" in second


def test_many_unknown_keys_cause_few_warnings(caplog: pytest.LogCaptureFixture) -> None:
    PPOConfig(multiagent={f"unknown{number}": 1 for number in range(20_000)})
    assert len(caplog.messages) < 20
    assert "19990" in caplog.messages[-1]


def test_r171_the_users_config_merges_deeply_into_the_algorithms() -> None:
    config = OtherConfig.from_mapping(
        {"model": {"use_lstm": True}, "tf_session_args": {"device_count": {"GPU": 0}}}
    )
    assert config.model.use_lstm
    assert config.model.fcnet_hiddens == (64, 64)
    assert config.tf_session_args["device_count"] == {"CPU": 1, "GPU": 0}
    assert config.tf_session_args["allow_soft_placement"] is True
    assert (config.lr, config.num_sgd_iter) == (5e-5, 10)


def test_r171_with_base_config_replaces_sub_dicts_and_leaves_the_base_untouched() -> None:
    base = {"model": {"dim": 84, "framestack": True}, "lr": 1.0}
    extended = with_base_config(base, {"model": {"dim": 42}})
    assert extended == {"model": {"dim": 42}, "lr": 1.0}
    extended["model"]["dim"] = 7
    assert base == {"model": {"dim": 84, "framestack": True}, "lr": 1.0}
    assert with_common_config({"model": {"dim": 42}})["model"] == {"dim": 42}
    assert CommonConfig().model.dim == 84


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"batch_mode": "truncate"}, "batch_mode"),
        ({"observation_filter": "MeanFilter"}, "observation_filter"),
        ({"num_workers": "many"}, "num_workers"),
        ({"num_workers": -1}, "num_workers"),
        ({"model": {"fcnet_hiddens": [64, 0]}}, "model.fcnet_hiddens"),
        ({"model": {"fcnet_hiddens": [64] * 1001}}, "model.fcnet_hiddens"),
        ({"model": {"conv_filters": [[16, [8, 8], 0]]}}, "model.conv_filters"),
        ({"model": {"conv_filters": [[16, 8]]}}, "model.conv_filters"),
        ({"seed": 16**100_000}, "seed"),
        ({"env_config": {"a": [1, 16**100_000]}}, "env_config.a.1"),
        ({"extra_python_environs_for_driver": {"A=B": "c"}}, "extra_python_environs_for_driver"),
        ({"compilation_cache": "on"}, "compilation_cache"),
        ({"extra_python_environs_for_worker": {"A": "b\0"}}, "extra_python_environs_for_worker"),
        ({"model": {"fcnet_hiddens": ["a"]}}, "model.fcnet_hiddens"),
        ({"model": {"use_lstm": True, "use_gru": True}}, "model.use_gru"),
        ({"model": 5}, "model"),
        ({"clip_rewards": "perhaps"}, "clip_rewards"),
        (
            {"input": "files", "input_epochs": 1, "num_workers": 0, "bind": "tcp://127.0.0.1:5557"},
            "num_workers",
        ),
        ({"input_epochs": 1}, "input_epochs"),
        ({"num_gpus": 1.5}, "num_gpus"),
        ({"sample_async": True, "observation_filter": "MeanStdFilter"}, "observation_filter"),
        ({"stop_evaluation_return": 1}, "stop_evaluation_return"),
        ({"evaluation_config": {"seed": 1}}, "evaluation_config"),
        ({"evaluation_config": {"remote_worker_envs": True}}, "evaluation_config"),
        ({"model": {"lstm_use_prev_action_reward": True}}, "model.lstm_use_prev_action_reward"),
        ({"model": {"initial_log_std": -1}}, "model.initial_log_std"),
        ({"bind": "5557"}, "bind"),
        ({"bind": "tcp://0.0.0.0:5557"}, "bind"),
        ({"transport": {"heartbeat_timeout_s": 1.5}}, "transport.heartbeat_timeout_s"),
        ({"shuffle_buffer_size": 8}, "shuffle_buffer_size"),
        ({"input_evaluation": ["simulation"]}, "input_evaluation"),
        ({"input_evaluation": "is"}, "input_evaluation"),  # R170
        ({"output_max_file_size": 1000}, "output_max_file_size"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_the_key(values: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CommonConfig.from_mapping(values)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_a_config_cannot_be_changed_but_updated() -> None:
    config = CommonConfig()
    with pytest.raises(ConfigError) as caught:
        config.lr = 1.0  # type: ignore[misc]
    assert caught.value.key == "lr"
    assert "config.updated({'lr': 1.0})" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        config.model.use_gru = True  # type: ignore[misc]
    assert caught.value.key == "model.use_gru"
    assert "config.updated({'model': {'use_gru': True}})" in caught.value.hint
    assert config.updated({"lr": 1.0, "model": {"use_gru": True}}).model.use_gru
    assert config == CommonConfig()
    config.tf_session_args["gpu_options"]["allow_growth"] = False
    assert CommonConfig().tf_session_args["gpu_options"] == {"allow_growth": True}
    with pytest.raises(ConfigError) as caught:
        config.updated({"lr": 0})
    assert (caught.value.key, caught.value.value) == ("lr", 0)


class ElseConfig(CommonConfig):
    """Config of an algorithm called else."""

    algo: str = changed(CommonConfig, "algo", "else")


def test_a_config_from_keywords_equals_one_from_a_mapping(caplog: pytest.LogCaptureFixture) -> None:
    config = OtherConfig(
        env=OrderedDict, num_workers=2, seed=1, model={"use_lstm": True}, sample_batch_size=50
    )
    values = {
        "env": "collections:OrderedDict",
        "num_workers": 2,
        "seed": 1,
        "model": {"use_lstm": True},
    }
    assert config == OtherConfig.from_mapping({**values, "rollout_fragment_length": 50})
    assert config.model_fields_set == {*values, "rollout_fragment_length"}
    assert config.updated({"lr": 0.5}).model_fields_set == {*config.model_fields_set, "lr"}
    (warning,) = caplog.messages
    assert {"sample_batch_size", "rollout_fragment_length"} <= set(warning.split())


def test_a_file_is_read_and_keywords_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("env: E\nmodel: {use_lstm: true}\nlr: 0.25\n")
    config = OtherConfig.from_file(file, lr=0.5, model={"lstm_cell_size": 8})
    assert (config.env, config.lr, config.model.use_lstm, config.model.lstm_cell_size) == (
        "E",
        0.5,
        True,
        8,
    )
    file.write_text("algo: ppo\nlr: 1\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml, line 1: algo .*ElseConfig"):
        ElseConfig.from_file(str(file))


def test_r172_an_environment_is_an_id_or_a_class_and_anything_else_is_refused() -> None:
    assert CommonConfig(env="CartPole-v1").env == "CartPole-v1"
    assert CommonConfig(env=OrderedDict).env == "collections:OrderedDict"
    register_env("mine", lambda context: OrderedDict(context))
    for env in (CommonConfig(env="mine").env, CommonConfig(env=OrderedDict).env, "CartPole-v1"):
        assert callable(resolve_env(str(env)))
    for wrong in (3, ["CartPole-v1"]):
        with pytest.raises(ConfigError) as caught:
            CommonConfig(env=wrong)
        assert (caught.value.key, caught.value.value) == ("env", wrong)
    for unknown in ("CartPole-v99", "NoSuchEnv"):
        with pytest.raises(ValueError, match=unknown):
            resolve_env(str(CommonConfig(env=unknown).env))
    config = CommonConfig(env="CartPole-v1")
    assert config.updated({"env": "Acrobot-v1"}).env == "Acrobot-v1"


def test_r185_least_lengths_of_an_iteration_reach_neither_workers_nor_updates() -> None:
    long, short = (
        PPOConfig(env="E", seed=1, **lengths)
        for lengths in ({"min_iter_time_s": 3, "timesteps_per_iteration": 9}, {})
    )
    assert (long.min_iter_time_s, long.timesteps_per_iteration) == (3, 9)
    assert WorkerPart.of(long) == WorkerPart.of(short)
    differing = {name for name, value in long.to_dict().items() if value != short.to_dict()[name]}
    assert differing == {"min_iter_time_s", "timesteps_per_iteration"}


def test_updates_run_eagerly_traced_or_compiled() -> None:
    modes = [
        CommonConfig(xla="on", **settings).update_mode
        for settings in (
            {},
            {"eager": True},
            {"eager": True, "eager_tracing": True},
            {"eager_tracing": True},
        )
    ]
    assert modes == ["on", "eager", "off", "on"]


class Importable(DefaultCallbacks):
    def on_episode_end(self, **_: Any) -> None: ...


def importable(*_: Any) -> str:
    return "policy"


def test_python_objects_are_accepted_and_named_by_their_import_paths() -> None:
    space = Discrete(2)
    config = PPOConfig(
        callbacks=Importable,
        loggers=[importable],
        model={"custom_model": importable, "custom_preprocessor": Importable},
        multiagent={
            "policies": {"policy": (None, space, space, {})},
            "policy_mapping_fn": importable,
        },
    )
    assert config.callbacks == config.model.custom_preprocessor == f"{__name__}:Importable"
    path = f"{__name__}:importable"
    assert [*config.loggers, config.model.custom_model, config.multiagent.policy_mapping_fn] == [
        path
    ] * 3
    assert config.multiagent.policies["policy"][1] == space_to_dict(space)
    assert PPOConfig(callbacks={"on_episode_end": importable}).callbacks == {"on_episode_end": path}
    config = PPOConfig(
        wrappers=[importable, {"class": importable}],
        exploration={"type": importable},
        evaluation_config={"callbacks": Importable, "env_config": {"make": importable}},
    )
    assert (config.wrappers, config.exploration) == ([path, {"class": path}], {"type": path})
    assert config.evaluation_config == {
        "callbacks": f"{__name__}:Importable",
        "env_config": {"make": importable},
    }


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"callbacks": type("Own", (DefaultCallbacks,), {})}, "callbacks"),
        ({"callbacks": Importable()}, "callbacks"),
        ({"callbacks": {"on_episode_end": lambda info: None}}, "callbacks.on_episode_end"),
        ({"multiagent": {"policy_mapping_fn": lambda agent: "a"}}, "multiagent.policy_mapping_fn"),
        (
            {"multiagent": {"policies": {"a": {"class": type("Own", (), {})}}}},
            "multiagent.policies.a.class",
        ),
        ({"env": lambda: None}, "env"),
    ],
)
def test_local_objects_are_only_allowed_with_num_workers_0(
    settings: dict[str, Any], key: str
) -> None:
    config = PPOConfig(num_workers=0, **settings)
    assert config.updated({"lr": 1.0}).to_dict() == {**config.to_dict(), "lr": 1.0}
    assert PPOConfig.from_mapping(config.to_dict()) == config
    for processes in (
        {},
        {"num_workers": 0, "evaluation_num_workers": 1, "evaluation_interval": 1},
    ):
        with pytest.raises(ConfigError) as caught:
            PPOConfig(**settings, **processes)
        assert caught.value.key == key


def test_objects_that_only_the_learner_needs_can_be_local() -> None:
    PPOConfig(loggers=[lambda run_dir, config: None], model={"custom_model": lambda *_: None})
    with pytest.raises(ConfigError) as caught:
        A3CConfig(model={"custom_model": lambda *_: None})
    assert caught.value.key == "model.custom_model"


def test_the_config_of_an_ended_program_names_the_missing_object() -> None:
    with pytest.raises(ConfigError, match="'this-program:Gone'") as caught:
        PPOConfig(num_workers=0, callbacks="this-program:Gone")
    assert caught.value.key == "callbacks"


def test_more_worker_processes_than_a_host_can_start_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        CommonConfig.from_mapping({"env": "E", "num_workers": 1_000_000})
    assert (caught.value.key, caught.value.value) == ("num_workers", 1_000_000)
