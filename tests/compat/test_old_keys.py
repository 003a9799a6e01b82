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
    with pytest.raises(ValueError, match=f"There is no key {old} any more.* {new}"):
        CommonConfig.from_mapping({old: 1})


def test_r169_sample_batch_size_is_renamed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = CommonConfig.from_mapping({"sample_batch_size": 64})
    assert config.rollout_fragment_length == 64
    assert "sample_batch_size is now called rollout_fragment_length" in caplog.text


def test_r169_policy_graphs_is_renamed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    values = {"multiagent": {"policy_graphs": {"a": 1}, "x": 2}}
    with caplog.at_level(logging.WARNING):
        assert translate_old_keys(values) == {"multiagent": {"policies": {"a": 1}, "x": 2}}
    assert values == {"multiagent": {"policy_graphs": {"a": 1}, "x": 2}}
    assert "multiagent.policy_graphs is now called multiagent.policies" in caplog.text


def test_a_key_that_had_no_effect_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = CommonConfig.from_mapping({"transport": {"receive_queue_length": 64, "send_queue_length": 7}})
    assert config.transport.send_queue_length == 7
    assert "transport.receive_queue_length has no effect any more" in caplog.text


def test_the_length_that_recurrent_models_never_heeded_is_gone_but_in_older_files() -> None:
    """Its default is in the config.yaml of runs that may be resumed."""
    config = CommonConfig.from_mapping({"model": {"max_seq_len": 20, "use_lstm": True}})
    assert config.model.use_lstm
    assert not config.model.model_extra
    with pytest.raises(
        ConfigError, match=r"There is no key model\.max_seq_len any more\. .*set rollout_fragment_length"
    ):
        CommonConfig.from_mapping({"model": {"max_seq_len": 10}})
    own = CommonConfig.from_mapping({"model": {"max_seq_len": 10, "custom_model": "mine:make"}})
    assert own.model.model_extra == {"max_seq_len": 10}


@pytest.mark.parametrize(("value", "warns"), [("general", True), ("columnar", True), ("auto", False)])
def test_how_environments_are_driven_is_no_setting_any_more(
    value: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs of before have it in their config.yaml, and may be resumed."""
    with caplog.at_level(logging.WARNING):
        config = CommonConfig.from_mapping({"sampling": value, "num_workers": 3})
    assert config.num_workers == 3
    assert ("sampling has no effect any more: environments are stepped in lockstep" in caplog.text) == warns


def test_r169_old_and_new_name_may_agree_but_not_conflict() -> None:
    assert translate_old_keys({"sample_batch_size": 5, "rollout_fragment_length": 5}) == {"rollout_fragment_length": 5}
    with pytest.raises(ConfigError, match="set to 5 and 6") as caught:
        translate_old_keys({"sample_batch_size": 5, "rollout_fragment_length": 6})
    assert caught.value.key == "sample_batch_size"
