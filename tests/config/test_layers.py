"""Layers of settings, the origin of each value, and the effective config of a run."""

from __future__ import annotations

import io
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from aiorl.config import deep_update, put_on_top, to_plain, without_defaults_of
from aiorl.config.key import all_keys, key
from aiorl.config.layers import (
    CONFIG_FILE,
    WITHHELD,
    Layer,
    Origins,
    dump_yaml,
    file_layer,
    load_config,
    located,
    merged,
    save_config,
)
from aiorl.config.schema import CommonConfig
from aiorl.config.yaml_text import parse_value
from aiorl.errors import ConfigError, UnknownAlgorithmError
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.learning.algorithms.registry import config_class

trees = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
mappings = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


def paths(tree: object, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Return the leaves of a tree by path: a slow, plain reference."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    return {
        path: leaf
        for name, inner in tree.items()
        for path, leaf in paths(inner, (*prefix, name)).items()
    }


@given(mappings, mappings)
def test_a_deep_update_merges_dicts_and_replaces_all_else(base: dict, changes: dict) -> None:
    kept_base, kept_changes = deepcopy(base), deepcopy(changes)
    merged = deep_update(base, changes)
    leaf_of = paths(merged)
    for path, leaf in paths(changes).items():
        if leaf != {}:
            assert leaf_of[path] == leaf
    for path, leaf in paths(base).items():
        overruled = any(
            path[: len(other)] == other or other[: len(path)] == path for other in paths(changes)
        )
        if not overruled:
            assert leaf_of[path] == leaf
    assert (base, changes) == (kept_base, kept_changes)


def test_an_empty_dict_changes_nothing_and_a_scalar_replaces_a_dict() -> None:
    assert deep_update({"a": {"b": 1}}, {"a": {}}) == {"a": {"b": 1}}
    assert deep_update({"a": {"b": 1}}, {"a": None}) == {"a": None}
    assert deep_update({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}
    assert to_plain({"a": ((1, 2), {"b": (3,)})}) == {"a": [[1, 2], {"b": [3]}]}


def config_with(entry: Any) -> dict[str, Any]:
    return {
        "lr": 1,
        "multiagent": {"policies": {"a": entry, "b": None}, "policy_mapping_fn": "m:f"},
    }


def test_a_key_on_top_replaces_defaults_of_policies_but_not_their_own_values() -> None:
    entry = {
        "class": "sac",
        "config": {"gamma": 2},
        "defaults": {"lr": 3, "gamma": 4, "model": {"x": 5, "y": 6}},
    }
    base = config_with(entry)
    before = deepcopy(base)
    merged = put_on_top(base, {"lr": 7, "gamma": 8, "model": {"y": 9}})
    assert merged["multiagent"]["policies"] == {
        "a": {**entry, "defaults": {"model": {"x": 5}}},
        "b": None,
    }
    assert (merged["lr"], merged["gamma"], merged["model"]) == (7, 8, {"y": 9})
    assert base == before


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ({"class": "dqn"}, {"class": "dqn", "defaults": None}),
        ({"class": "SAC"}, {"class": "SAC", "defaults": {"lr": 3}}),
        ({"config": {"lr": 4}}, {"class": "sac", "defaults": {"lr": 3}, "config": {"lr": 4}}),
        ({"defaults": {"lr": 5}}, {"class": "sac", "defaults": {"lr": 5}}),
        (None, None),
        ("dqn", "dqn"),
    ],
)
def test_a_policy_with_a_new_class_loses_its_defaults(new: Any, expected: Any) -> None:
    base = config_with({"class": "sac", "defaults": {"lr": 3}})
    merged = put_on_top(base, {"multiagent": {"policies": {"a": new}}})
    assert merged["multiagent"]["policies"]["a"] == expected


@pytest.mark.parametrize(
    "group", [None, 3, {}, {"policies": None}, {"policies": [1]}, {"policies": {"a": "sac"}}]
)
def test_configs_without_defaults_are_not_changed(group: Any) -> None:
    config = {"multiagent": group, "lr": 1}
    assert without_defaults_of(config, {"lr": 2, "multiagent": group}) == config


def test_a_later_layer_replaces_values_and_merges_into_mappings() -> None:
    stack = [
        Layer({"a": {"x": 1, "y": 2}, "b": 3}, "one"),
        Layer({"a": {"y": 5}, "b": {"z": 6}}, "two"),
    ]
    assert merged(stack) == {"a": {"x": 1, "y": 5}, "b": {"z": 6}}
    origins = Origins.of(stack)
    assert [origins.origin_of(key) for key in ("a.x", "a.y", "a", "b.z", "c")] == [
        "one",
        "two",
        "one, two",
        "two",
        "default",
    ]
    assert origins.origin_of("a", has_default=True) == "default, one, two"


@given(st.lists(st.builds(Layer, mappings, st.sampled_from(["one", "two"])), max_size=4))
def test_each_value_has_an_origin_and_there_are_no_others(stack: list[Layer]) -> None:
    leaves = {".".join(path) for path, leaf in paths(merged(stack)).items() if leaf != {}}
    assert Origins.of(stack).of_keys.keys() == leaves


def test_origins_and_errors_name_the_line_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("lr: 1\nmodel:\n  dim: 3\n", encoding="utf-8")
    stack = [file_layer(file), Layer({"lr": 2})]
    assert Origins.of(stack).origin_of("model.dim") == f"{file}, line 3"
    for name, sentence in (("model.dim", f"{file}, line 3: It is bad."), ("lr", "It is bad.")):
        with pytest.raises(ConfigError) as caught, located(stack):
            raise ConfigError("It is bad.", key=name)
        assert str(caught.value) == sentence
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        file_layer(tmp_path / "none.yaml")


def described(config: PPOConfig) -> dict[str, str]:
    file = io.StringIO()
    config.describe(file)
    return {line.split()[0]: " ".join(line.split()[1:]) for line in file.getvalue().splitlines()}


def test_describe_prints_each_value_and_its_origin(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "preset: ppo-cartpole\nmodel:\n  use_lstm: true\ntf_session_args: {device_count: {GPU:"
        " 0}}\n"
    )
    variables = {"MY_TOKEN": "s3cr3t"}
    model = {"custom_model": "mine:make", "width": 7, "custom_features": True}
    config = PPOConfig.from_file(
        path, seed=3, extra_python_environs_for_worker=variables, model=model
    )
    lines = described(config)
    assert lines.keys() == {*all_keys(PPOConfig), "model.width"}
    assert lines["model.width"] == "argument 7"
    assert lines["extra_python_environs_for_worker"] == 'argument {"MY_TOKEN": "<withheld>"}'
    assert lines["seed"] == "argument 3"
    assert lines["model.use_lstm"] == f"{path}, line 3 true"
    assert lines["gamma"] == "preset ppo-cartpole 0.98"
    assert lines["grad_clip"] == "default 0.5"
    assert lines["log_level"] == "default INFO"
    assert lines["tf_session_args"].startswith(f"default, {path}, line 4 ")
    later = described(config.model_copy(update={"run_dir": "runs/x"}).updated({"lr": 2e-3}))
    assert (later["lr"], later["run_dir"]) == ("argument 0.002", "default runs/x")
    assert later["model.use_lstm"] == f"{path}, line 3 true"


class OtherConfig(CommonConfig):
    """Config of another algorithm."""

    algo: str = key("other", "Algorithm.", group="Run")
    lr: float = key(0.5, "Learning rate.", group="Learning", gt=0)
    epochs: int = key(3, "Epochs.", group="Other")


def config_class_of(name: str) -> type[CommonConfig]:
    classes: dict[str, type[CommonConfig]] = {"ppo": CommonConfig, "other": OtherConfig}
    if name not in classes:
        raise UnknownAlgorithmError(f"There is no algorithm {name}.", key="algo", value=name)
    return classes[name]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_the_effective_config_prints_as_yaml_that_loads_back_equal(tmp_path: Path) -> None:
    values = {
        "env": "pkg.mod:Env",
        "algo": "other",
        "lr": 1e-5,
        "xla": "off",
        "epochs": 7,
        "env_config": {
            "rate": 1e-7,
            "words": ["on", "1:30", "007", "1e5"],
            "deep": {"x": [None, True, -3.0, "é"]},
        },
        "model": {
            "fcnet_hiddens": [32],
            "conv_filters": [[16, 8, 4]],
            "custom_model": "a:B",
            "mine": {"a": 1},
        },
        "extra_python_environs_for_worker": {"OMP": "1", "FLAG": "off"},
    }
    config = load_config(config_class_of, overrides=values)
    text = dump_yaml(config)
    file = write(tmp_path / "a.yaml", text)
    assert load_config(config_class_of, file=file) == config
    assert dump_yaml(load_config(config_class_of, file=file)) == text


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(min_size=1, max_size=6), json_like, max_size=4))
def test_any_environment_arguments_survive_being_printed(arguments: dict) -> None:
    config = CommonConfig.from_mapping({"env": "E", "env_config": arguments})
    assert parse_value(dump_yaml(config))["env_config"] == config.env_config


def test_secrets_are_withheld_and_restored_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "HF_TOKEN": "s3cr3t",
        "DB_PASSWORD": "s3cr3t",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        "PLAIN": "shown",
    }
    overrides = {"env": "E", "extra_python_environs_for_worker": variables}
    config = load_config(config_class_of, overrides=overrides)
    text = dump_yaml(config)
    assert "s3cr3t" not in text
    assert "shown" in text
    file = write(tmp_path / "a.yaml", text)
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        load_config(config_class_of, file=file)
    for name, text_ in variables.items():
        monkeypatch.setenv(name, text_)
    assert load_config(config_class_of, file=file) == config
    assert WITHHELD in text


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("env: E\nlr: 3\nnum_worker: 2\n", ", line 3", "num_worker"),
        ("env: E\nmodel:\n  # a comment\n  use_lstm: 3\n", ", line 4", "model.use_lstm"),
        ("env: E\nnum_gpus_per_worker: 1\n", ", line 2", "num_gpus_per_worker"),
        ("a: [\n", ", line 2", ""),
        ("env: x\nenv: y\n", ", line 2", ""),
        ("model: {dim: 1, dim: 2}\n", ", line 1", ""),
        ("- 3\n", "", ""),
        ("env: !!python/object/apply:os.system [x]\n", ", line 1", ""),
        ("a: \x00\n", "", ""),
        ("algo: nope\n", ", line 1", "algo"),
        ("? [1, 2]\n: 3\n", ", line 1", ""),
    ],
)
def test_an_error_in_a_file_names_the_file_the_line_and_the_key(
    tmp_path: Path, text: str, line: str, key: str
) -> None:
    file = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_class_of, file=file)
    assert str(caught.value).startswith(f"{file}{line}: ")
    assert caught.value.key == key
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(config_class_of, file=file)
    with pytest.raises(ConfigError, match="--env CartPole-v1") as caught:
        load_config(config_class_of)
    assert caught.value.key == "env"
    with pytest.raises(ConfigError, match=r"^lr "):  # no line if the command line set the key
        load_config(config_class_of, file=write(file, "env: E\nlr: 1\n"), overrides={"lr": -1})


def test_resume_starts_from_the_runs_own_config(tmp_path: Path) -> None:
    config = load_config(
        config_class_of, overrides={"env": "E", "algo": "other", "lr": 0.25, "stop_return": 10}
    )
    save_config(config.updated({"resume": str(tmp_path)}), tmp_path)
    resumed = load_config(config_class_of, overrides={"resume": str(tmp_path), "stop_return": 20})
    assert (resumed.algo, resumed.lr, resumed.stop_return) == ("other", 0.25, 20)
    assert (resumed.resume, resumed.run_dir) == (str(tmp_path), str(tmp_path))
    assert yaml.safe_load((tmp_path / CONFIG_FILE).read_text())["resume"] is None


GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "env_config": ({"size": 7, "map": {"wide": 1, "high": 2}}, {"map": {"high": 3}}),
    "model": ({"fcnet_hiddens": [8], "vf_share_layers": True}, {"fcnet_activation": "relu"}),
    "multiagent": (
        {"policies": {"a": None, "b": None}, "policies_to_train": ["a"]},
        {"policies": {"c": None}},
    ),
    "evaluation_config": ({"horizon": 9, "env_config": {"size": 7}}, {"env_config": {"wide": 1}}),
    "exploration": ({"type": "EpsilonGreedy", "epsilon": 0.5}, {"final": 0.1}),
    "optimizer": ({"beta_1": 0.5}, {"beta_2": 0.5}),
    "transport": ({"heartbeat_timeout_s": 20.0}, {"lease_timeout_s": 9.0}),
    "tf_session_args": ({"gpu_options": {"allow_growth": False}}, {"device_count": {"CPU": 2}}),
    "callbacks": ({"on_train_result": "m:f"}, {"on_episode_end": "m:g"}),
    "extra_python_environs_for_worker": ({"A": "1"}, {"B": "2"}),
}


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_merges_into_the_one_below_it_by_every_way_in(tmp_path: Path, group: str) -> None:
    below, changes = GROUPS[group]
    expected = deep_update(PPOConfig(env="E", **{group: below}).to_dict()[group], changes)
    first = PPOConfig(env="E", run_dir=str(tmp_path), **{group: below})
    save_config(first, tmp_path)
    file = tmp_path / CONFIG_FILE
    ways = {
        "updated": first.updated({group: changes}),
        "a file and keywords": PPOConfig.from_file(file, **{group: changes}),
        "a file and the command line": load_config(
            config_class, file=file, overrides={group: changes}
        ),
        "a config and keywords": load_config(
            config_class, settings={"env": "E", group: below}, overrides={group: changes}
        ),
        "a run and the command line": load_config(
            config_class, overrides={"resume": str(tmp_path), group: changes}
        ),
    }
    assert {way: config.to_dict()[group] for way, config in ways.items()} == dict.fromkeys(
        ways, expected
    )


def test_null_and_then_a_group_replaces_the_whole_group_and_null_alone_gives_the_default() -> None:
    config = PPOConfig(
        env="E", env_config={"size": 7}, model={"fcnet_hiddens": [8]}, optimizer={"beta_1": 0.5}
    )
    emptied = config.updated({"env_config": None, "model": None, "optimizer": None})
    assert (emptied.env_config, emptied.optimizer, emptied.model) == ({}, {}, PPOConfig().model)
    for group, value in {"env_config": {"wide": 1}, "model": {"fcnet_activation": "relu"}}.items():
        assert config.updated({group: None}, {group: value}) == PPOConfig(
            **{
                **emptied.users_values(),
                "env": "E",
                "optimizer": {"beta_1": 0.5},
                "env_config": {"size": 7},
                "model": {"fcnet_hiddens": [8]},
                group: value,
            }
        )


def test_settings_of_another_type_of_exploration_and_other_sources_of_experience_replace_those_before() -> (
    None
):
    config = PPOConfig(
        env="E",
        exploration={"type": "EpsilonGreedy", "epsilon": 0.5},
        input={"a": 0.5, "sampler": 0.5},
    )
    changed = config.updated({"exploration": {"type": "GaussianNoise"}, "input": {"b": 1.0}})
    assert changed.exploration == {"type": "GaussianNoise"}
    assert changed.input == {"b": 1.0}


def test_a_value_from_keywords_overrules_the_schedule_of_a_config() -> None:
    below = {"env": "E", "lr_schedule": [[0, 0.5], [100, 0.1]]}
    config: Any = load_config(config_class, settings=below, overrides={"lr": 0.25})
    assert (config.lr, config.lr_schedule) == (0.25, PPOConfig().lr_schedule)


def test_a_directory_to_resume_that_is_missing_is_told_from_one_without_a_run(
    tmp_path: Path,
) -> None:
    faults = set()
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError) as caught:
            load_config(config_class_of, overrides={"resume": str(directory)})
        assert (caught.value.key, caught.value.value) == ("resume", str(directory))
        faults.add(caught.value.message.removeprefix(str(directory)))
    assert len(faults) == 2


@pytest.mark.parametrize("changes", [{"run_dir": "elsewhere"}, {"algo": "ppo"}])
def test_fixed_settings_of_a_resumed_run_are_refused_with_a_hint(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    save_config(load_config(config_class_of, overrides={"env": "E", "algo": "other"}), tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(config_class_of, overrides={"resume": str(tmp_path), **changes})
    assert {caught.value.key: caught.value.value} == changes
    assert f"--config {tmp_path / CONFIG_FILE}" in caught.value.hint
    same = {"resume": str(tmp_path), "run_dir": f"{tmp_path}/", "algo": "other"}
    assert load_config(config_class_of, overrides=same).algo == "other"


def test_reading_the_config_of_a_run_to_resume_never_blocks(tmp_path: Path) -> None:
    for make in (lambda path: None, os.mkfifo):
        make(tmp_path / CONFIG_FILE)
        with pytest.raises(ConfigError) as caught:
            load_config(config_class_of, overrides={"resume": str(tmp_path)})
        assert caught.value.key == "resume"


def test_a_file_of_the_user_can_be_a_link_or_a_pipe_but_not_a_run_directory(tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(write(tmp_path / "a.yaml", "env: E\n"))
    assert load_config(config_class_of, file=link).env == "E"
    reader, writer = os.pipe()
    os.write(writer, b"env: F\n")
    os.close(writer)
    assert load_config(config_class_of, file=Path(f"/dev/fd/{reader}")).env == "F"
    os.close(reader)
    with pytest.raises(ConfigError) as caught:
        save_config(CommonConfig(), link)
    assert (caught.value.key, caught.value.value) == ("run_dir", str(link))


def test_a_resumed_run_keeps_its_settings_whatever_the_presets(tmp_path: Path) -> None:
    save_config(
        load_config(config_class, overrides={"env": "CartPole-v1", "preset": "ppo-cartpole"}),
        tmp_path,
    )
    file = tmp_path / CONFIG_FILE
    file.write_text(file.read_text().replace("preset: ppo-cartpole", "preset: one-of-long-ago"))
    resumed = load_config(config_class, overrides={"resume": str(tmp_path), "seed": 3})
    assert (resumed.preset, resumed.gamma, resumed.seed) == ("one-of-long-ago", 0.98, 3)
    assert resumed.updated({"seed": 4}).preset == "one-of-long-ago"
    with pytest.raises(ConfigError, match="--resume"):
        load_config(config_class, overrides={"resume": str(tmp_path), "preset": "auto"})


def test_an_object_among_settings_is_replaced_and_never_changed() -> None:
    grid = {(0, 0): 1}
    merged = put_on_top({"env_config": {"grid": grid}}, {"env_config": {"grid": {(1, 1): 2}}})
    assert merged["env_config"]["grid"] == {(1, 1): 2}
    assert grid == {(0, 0): 1}
