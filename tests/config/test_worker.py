from __future__ import annotations

import json
import math

import pytest
from gymnasium import spaces

from aiorl.config.key import fact_of
from aiorl.config.schema import CommonConfig, ModelConfig, MultiAgentConfig
from aiorl.config.worker import (
    PolicyPart,
    WorkerConfig,
    WorkerModelConfig,
    WorkerMultiAgentConfig,
    WorkerPart,
)
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.data.fragment import SamplePlan
from aiorl.data.spaces import space_to_dict
from aiorl.errors import ConfigError

CONFIG = CommonConfig.from_mapping(
    {
        "env": "CartPole-v1",
        "env_config": {"size": [1, 2]},
        "seed": 3,
        "num_envs_per_worker": 8,
        "clip_rewards": True,
        "transport": {"compression": "off"},
        "observation_filter": "MeanStdFilter",
        "bind": "tcp://127.0.0.1:99",
    }
)


PLAN = SamplePlan(postprocess="gae", postprocess_params={"gamma": 0.9}, columns=("obs",))


def test_a_worker_gets_its_part_as_plain_data_and_reads_it_back_equal() -> None:
    part = WorkerPart.of(CONFIG, policies={DEFAULT_POLICY_ID: PolicyPart(sample_plan=PLAN)})
    wire = json.loads(json.dumps(part.to_dict()))
    assert WorkerPart.from_dict(wire) == part
    assert (part.env, part.seed, part.num_envs_per_worker, part.clip_rewards) == (
        "CartPole-v1",
        3,
        8,
        True,
    )
    assert part.transport.compression == "off"
    assert not {"bind", "keys", "insecure", "run_dir", "lr", "stop_return"} & set(wire)
    assert part.policies == {DEFAULT_POLICY_ID: PolicyPart(sample_plan=PLAN)}


def test_several_policies_are_read_back_equal() -> None:
    policies = {
        "net": PolicyPart(
            observation_space=space_to_dict(spaces.Dict({"x": spaces.Box(-1.0, 1.0, (2,))})),
            action_space=space_to_dict(spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])),
            sample_plan=PLAN,
            layout="sequences",
            sequence_length=7,
        ),
        "own": PolicyPart(policy_class="package.module:Own", config={"level": 3}, is_trained=False),
    }
    config = CONFIG.updated(
        {
            "multiagent": {"policy_mapping_fn": "a:b", "observation_fn": "c:d"},
            "model": {"dim": 42, "framestack": False},
        }
    )
    part = WorkerPart.of(config, policies=policies, log_dir="/runs/one")
    again = WorkerPart.from_dict(json.loads(json.dumps(part.to_dict())))
    assert again == part
    assert again.policies == policies
    assert again.log_dir == "/runs/one"
    assert again.multiagent.model_dump() == {"policy_mapping_fn": "a:b", "observation_fn": "c:d"}
    assert again.model.model_dump() == {"dim": 42, "framestack": False, "custom_preprocessor": None}


def test_every_key_marked_for_workers_reaches_them_and_no_other() -> None:
    for config, part in (
        (CommonConfig, WorkerConfig),
        (ModelConfig, WorkerModelConfig),
        (MultiAgentConfig, WorkerMultiAgentConfig),
    ):
        marked = {
            name
            for name, field in config.model_fields.items()
            if fact_of(field, "where") != "learner"
        }
        assert set(part.model_fields) == marked
    assert WorkerPart.of(CommonConfig.from_mapping({"env": "E"})) == WorkerPart(env="E")


@pytest.mark.parametrize(("clip", "limit"), [(None, 0.0), (False, 0.0), (True, 1.0), (3.5, 3.5)])
def test_rewards_are_clipped_to_the_limit(clip: bool | float | None, limit: float) -> None:
    """R103."""
    assert WorkerConfig(clip_rewards=clip).reward_limit == limit


def test_complete_episodes_are_never_cut() -> None:
    whole = WorkerConfig(batch_mode="complete_episodes", rollout_fragment_length=5)
    cut = WorkerConfig(rollout_fragment_length=5)
    assert (whole.is_truncating, whole.cut_length, cut.is_truncating, cut.cut_length) == (
        False,
        math.inf,
        True,
        5,
    )


def test_changes_for_an_evaluation_merge_into_groups_and_null_gives_their_defaults() -> None:
    part = WorkerPart.of(CONFIG)
    assert part.for_evaluation({"env_config": {"pay": 2}}).env_config == {"size": [1, 2], "pay": 2}
    assert part.for_evaluation({"env_config": None, "horizon": 5}).env_config == {}


def test_a_bad_part_is_refused_by_the_name_of_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerPart.from_dict({"env": "E", "num_envs_per_worker": "many"})
    assert caught.value.key == "num_envs_per_worker"
    with pytest.raises(ConfigError) as caught:
        WorkerPart.from_dict({})
    assert caught.value.key == "env"
    assert WorkerPart.from_dict({"env": "E", "brand_new": 1}).env == "E"  # a key of a newer learner
