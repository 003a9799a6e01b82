from __future__ import annotations

from typing import Any

import pytest
from gymnasium import spaces

from aiorl.algorithms.ppo.config import PPOConfig
from aiorl.callbacks import DefaultCallbacks
from aiorl.env.kinds import KINDS, EnvFacts
from aiorl.errors import ConfigError
from aiorl.learner.sampling_path import choose_sampling, general_reasons

KIND = {kind.name: kind for kind in KINDS}
PLAIN = EnvFacts(KIND["a gymnasium.Env"], spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(2))
NESTED = spaces.Dict({"a": spaces.Discrete(2)})


def config(**settings: Any) -> PPOConfig:
    return PPOConfig.from_mapping({"env": "E", **settings})


def test_plain_environments_are_sampled_in_columns() -> None:
    assert choose_sampling(config(), PLAIN) == "columnar"
    assert choose_sampling(config(sampling="columnar", vectorize="native"), PLAIN) == "columnar"
    assert (
        choose_sampling(config(model={"use_lstm": True}, monitor=True, preprocessor_pref="rllib"), PLAIN) == "columnar"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"callbacks": "package.module:Callbacks"},
        {"soft_horizon": True},
        {"no_done_at_end": True},
        {"sample_async": True},
        {"remote_worker_envs": True},
        {"fake_sampler": True},
        {"model": {"use_gru": True, "lstm_use_prev_action_reward": True}},
        {"model": {"custom_preprocessor": "package.module:Name"}},
        {"multiagent": {"policies": {"default_policy": None}}},
        {"multiagent": {"policy_mapping_fn": "package.module:choose"}},
        {"multiagent": {"policies_to_train": ["default_policy"]}},
        {"multiagent": {"observation_fn": "package.module:observe"}},
    ],
)
def test_what_only_general_sampling_can_do_makes_it_general_and_says_why(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (reason,) = general_reasons(config(**settings), PLAIN)
    key = next(iter(settings))
    assert key in reason
    assert choose_sampling(config(**settings), PLAIN) == "general"
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=f"sampling is columnar, but that can't be: {key}"):
        choose_sampling(config(**settings, sampling="columnar"), PLAIN)


@pytest.mark.parametrize(("hook", "path"), [("on_train_result", "columnar"), ("on_episode_end", "general")])
def test_only_hooks_that_workers_call_cost_the_fast_path(hook: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Hooked", (DefaultCallbacks,), {hook: lambda self, **kwargs: None})
    monkeypatch.setattr("general_parts.Hooked", kind, raising=False)
    assert choose_sampling(config(callbacks="general_parts:Hooked"), PLAIN) == path
    assert choose_sampling(config(callbacks={hook: "general_parts:legacy_end"}), PLAIN) == path


@pytest.mark.parametrize(
    "facts",
    [
        EnvFacts(KIND["an ExternalEnv"], PLAIN.observation_space, PLAIN.action_space),
        EnvFacts(KIND["a gymnasium.Env"], NESTED, PLAIN.action_space),
        EnvFacts(KIND["a gymnasium.Env"], PLAIN.observation_space, spaces.Tuple([NESTED])),
    ],
)
def test_what_only_general_sampling_can_drive_makes_it_general(facts: EnvFacts) -> None:
    assert len(general_reasons(config(), facts)) == 1
    assert choose_sampling(config(), facts) == "general"


def test_it_can_be_asked_for_and_refuses_ways_of_stepping_that_it_does_not_have() -> None:
    assert choose_sampling(config(sampling="general"), PLAIN) == "general"
    for way in ("native", "remote"):
        with pytest.raises(ConfigError, match=f"vectorize is {way}"):
            choose_sampling(config(sampling="general", vectorize=way), PLAIN)
