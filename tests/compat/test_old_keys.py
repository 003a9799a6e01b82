from __future__ import annotations

import logging

import pytest

from aiorl.compat.old_keys import translate_old_keys
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gpu", "num_gpus"),
        ("gpu_fraction", "num_gpus"),
        ("use_gpu_for_workers", "num_gpus_per_worker"),
        ("tf_session_creator", "tf_session_args"),
    ],
)
def test_r168_a_removed_key_is_refused_with_its_replacement(old: str, new: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CommonConfig.from_mapping({old: 1})
    assert caught.value.key == old
    assert new in caught.value.hint


def test_r169_renamed_keys_are_taken_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    values = {
        "multiagent": {"policy_graphs": {"a": 1}, "x": 2},
        "sample_batch_size": 64,
        "lambda": 1,
    }
    with caplog.at_level(logging.WARNING):
        made = translate_old_keys(values)
    assert made == {
        "multiagent": {"policies": {"a": 1}, "x": 2},
        "rollout_fragment_length": 64,
        "lambda_": 1,
    }
    assert values == {
        "multiagent": {"policy_graphs": {"a": 1}, "x": 2},
        "sample_batch_size": 64,
        "lambda": 1,
    }
    first, second = sorted(caplog.messages)
    assert {"multiagent.policy_graphs", "multiagent.policies"} <= set(first.split())
    assert {"sample_batch_size", "rollout_fragment_length"} <= set(second.split())


def test_keys_that_have_no_effect_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Older runs have these keys in their config.yaml, and can be resumed."""
    ignored = {
        "num_gpus_per_worker": 0.0,
        "custom_resources_per_worker": {},
        "collect_metrics_timeout": 90,
    }
    with caplog.at_level(logging.WARNING):
        assert CommonConfig(**ignored, sampling="auto") == CommonConfig()
        assert not caplog.messages
        config = CommonConfig(
            sampling="general", transport={"receive_queue_length": 64, "send_queue_length": 7}
        )
    assert config.transport.send_queue_length == 7
    assert len(caplog.messages) == 2
    assert "transport.receive_queue_length" in caplog.text


@pytest.mark.parametrize(
    "values", [{"num_gpus_per_worker": 0.5}, {"custom_resources_per_worker": {"tpu": 1}}]
)
def test_r184_unsupported_values_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        CommonConfig.from_mapping(values)
    assert {caught.value.key: caught.value.value} == values


def test_max_seq_len_is_only_accepted_from_older_files() -> None:
    """Runs that can be resumed have its default in their config.yaml."""
    config = CommonConfig.from_mapping({"model": {"max_seq_len": 20, "use_lstm": True}})
    assert config.model.use_lstm
    assert not config.model.model_extra
    with pytest.raises(ConfigError, match=r"model\.max_seq_len .*rollout_fragment_length"):
        CommonConfig.from_mapping({"model": {"max_seq_len": 10}})
    own = CommonConfig.from_mapping({"model": {"max_seq_len": 10, "custom_model": "mine:make"}})
    assert own.model.model_extra == {"max_seq_len": 10}


def test_r169_old_and_new_name_can_agree_but_not_conflict() -> None:
    assert translate_old_keys({"sample_batch_size": 5, "rollout_fragment_length": 5}) == {
        "rollout_fragment_length": 5
    }
    with pytest.raises(ConfigError, match=r"5.* 6") as caught:
        translate_old_keys({"sample_batch_size": 5, "rollout_fragment_length": 6})
    assert caught.value.key == "sample_batch_size"
