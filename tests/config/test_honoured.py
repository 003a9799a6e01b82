from __future__ import annotations

import pytest

from aiorl.config.honoured import NOT_YET_HONOURED
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError

OTHER_VALUES = {
    "eager": True,
    "no_eager_on_workers": True,
    "eager_tracing": True,
    "optimizer": {"epsilon": 1e-5},
    "evaluation_interval": 5,
    "evaluation_num_episodes": 5,
    "evaluation_config": {"explore": False},
    "num_gpus": 1,
    "num_gpus_per_worker": 0.5,
    "num_cpus_for_driver": 2,
    "memory": 10**9,
    "memory_per_worker": 10**9,
    "object_store_memory_per_worker": 10**9,
    "compress_observations": "bulk",
    "collect_metrics_timeout": 10,
    "fake_sampler": True,
    "input": {"sampler": 0.5, "/data": 0.5},
    "input_evaluation": ["simulation"],
    "postprocess_inputs": True,
    "shuffle_buffer_size": 10,
    "output": "logdir",
    "output_compress_columns": [],
    "output_max_file_size": 1000,
    "model.max_seq_len": 10,
}


@pytest.mark.parametrize("dotted", sorted(NOT_YET_HONOURED))
def test_a_key_that_nothing_heeds_yet_is_refused_rather_than_ignored(dotted: str) -> None:
    group, _, name = dotted.rpartition(".")
    value = OTHER_VALUES[dotted]
    with pytest.raises(ConfigError) as caught:
        CommonConfig.from_mapping({group: {name: value}} if group else {name: value})
    assert caught.value.key == dotted
    assert f"{dotted} can only be" in str(caught.value)
    assert NOT_YET_HONOURED[dotted] in str(caught.value)


def test_the_defaults_themselves_are_taken_when_said() -> None:
    CommonConfig.from_mapping(CommonConfig().to_dict())
