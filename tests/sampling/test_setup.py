from __future__ import annotations

import math
import weakref

import pytest
from sampler_settings import sampler_settings

from aiorl.acting.policy_map import PolicyMap
from aiorl.env.base_env import BaseEnv
from aiorl.errors import SamplerDied
from aiorl.sampling.setup import SamplerSetup, effective_horizon
from aiorl.testing.envs import CountingEnv
from aiorl.testing.scripted_env import RecordingPolicy, ScriptedEnv


class Spec:
    def __init__(self, limit):
        self.spec = type("S", (), {"max_episode_steps": limit})()


class Angry:
    @property
    def spec(self):
        raise RuntimeError("do not look at me")


@pytest.mark.parametrize(
    ("unwrapped", "horizon", "expected"),
    [
        ([], None, math.inf),
        ([], 0, math.inf),
        ([], 7, 7),
        ([], math.inf, math.inf),
        ([Spec(10), Spec(3)], None, 10),
        ([Spec(10)], 0, 10),
        ([Spec(10)], 10, 10),
        ([Spec(None)], None, math.inf),
        ([Spec("many")], None, math.inf),
        ([Angry()], None, math.inf),
        ([Angry()], 5, 5),
    ],
)
def test_the_horizon_is_the_one_given_else_the_first_environments_limit(unwrapped, horizon, expected):
    """R80, R81."""
    assert effective_horizon(ScriptedEnv({}, unwrapped=unwrapped), horizon) == expected


@pytest.mark.parametrize("horizon", [11, -1])
def test_a_horizon_beyond_the_limit_is_refused(horizon):
    """R80."""
    with pytest.raises(ValueError, match="horizon is"):
        effective_horizon(ScriptedEnv({}, unwrapped=[Spec(10)]), horizon)


def test_a_policy_map_brings_its_own_rule_unless_another_is_given():
    """R17."""
    policies = {name: RecordingPolicy() for name in ("a", "b")}
    own = PolicyMap(policies, lambda agent: "a")

    def setup(policy_map, mapping):
        return SamplerSetup(
            worker=None,
            base_env=ScriptedEnv({}),
            policy_map=policy_map,
            policy_mapping_fn=mapping,
            preprocessors={},
            filters={},
            settings=sampler_settings(),
            callbacks=None,
        )

    assert setup(own, None).policies is own
    assert setup(own, lambda agent: "b").policies.choose(1) == "b"
    assert setup(policies, lambda agent: "b").policies.choose(1) == "b"


def whole(**more):
    given = dict.fromkeys(SamplerSetup.__dataclass_fields__) | {
        "base_env": ScriptedEnv({}),
        "policy_map": {},
        "preprocessors": {},
        "filters": {},
        "settings": sampler_settings(),
    }
    return SamplerSetup(**given | more)


def test_an_environment_of_any_kind_is_converted_and_a_base_env_is_not_touched():
    """SPEC 4.1: samplers convert the environment themselves; that is idempotent."""
    base_env = ScriptedEnv({})
    assert whole(base_env=base_env).base_env is base_env
    converted = whole(base_env=CountingEnv()).base_env
    assert isinstance(converted, BaseEnv)
    assert whole(base_env=converted).base_env is converted
    with pytest.raises(ValueError, match="str"):
        whole(base_env="CartPole-v1")


def test_a_worker_may_be_given_weakly():
    """R56: else the thread of an asynchronous sampler keeps its worker alive."""

    class Worker:
        pass

    worker = Worker()
    strong, weak = whole(worker=worker), whole(worker=weakref.ref(worker))
    assert strong.get_worker() is weak.get_worker() is worker
    assert not strong.is_abandoned
    assert not weak.is_abandoned
    del worker, strong
    assert weak.is_abandoned
    with pytest.raises(SamplerDied, match="worker"):
        weak.get_worker()
