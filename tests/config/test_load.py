from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aiorl.config.files import parse_value
from aiorl.config.key import key
from aiorl.config.layers import CONFIG_FILE, WITHHELD, dump_yaml, load_config, save_config
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError, UnknownAlgorithmError
from aiorl.learning.algorithms.registry import config_class


class OtherConfig(CommonConfig):
    """Another algorithm's config."""

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


def test_defaults_give_way_to_the_algorithm_the_file_and_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "algo: other\nenv: FromFile\ngamma: 0.5\nmodel: {use_lstm: true}\n")
    config = load_config(config_class_of, file=file, overrides={"gamma": 0.7, "model": {"lstm_cell_size": 8}})
    assert isinstance(config, OtherConfig)
    assert (config.lr, config.env, config.gamma, config.clip_actions) == (0.5, "FromFile", 0.7, True)
    assert (config.model.use_lstm, config.model.lstm_cell_size) == (True, 8)


def test_the_effective_config_prints_as_yaml_that_loads_back_equal(tmp_path: Path) -> None:
    values = {
        "env": "pkg.mod:Env", "algo": "other", "lr": 1e-5, "xla": "off", "epochs": 7,
        "env_config": {"rate": 1e-7, "words": ["on", "1:30", "007", "1e5"], "deep": {"x": [None, True, -3.0, "é"]}},
        "model": {"fcnet_hiddens": [32], "conv_filters": [[16, 8, 4]], "custom_model": "a:B", "mine": {"a": 1}},
        "extra_python_environs_for_worker": {"OMP": "1", "FLAG": "off"},
    }  # fmt: skip
    config = load_config(config_class_of, overrides=values)
    text = dump_yaml(config)
    file = write(tmp_path / "a.yaml", text)
    assert load_config(config_class_of, file=file) == config
    assert dump_yaml(load_config(config_class_of, file=file)) == text


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.text(min_size=1, max_size=6), json_like, max_size=4))
def test_any_environment_arguments_survive_being_printed(arguments: dict) -> None:
    config = CommonConfig.from_mapping({"env": "E", "env_config": arguments})
    assert parse_value(dump_yaml(config))["env_config"] == config.env_config


def test_secrets_are_withheld_and_taken_from_the_environment_on_the_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"HF_TOKEN": "s3cr3t", "DB_PASSWORD": "s3cr3t", "AWS_SECRET_ACCESS_KEY": "s3cr3t", "PLAIN": "shown"}
    overrides = {"env": "E", "extra_python_environs_for_worker": variables}
    config = load_config(config_class_of, overrides=overrides)
    text = dump_yaml(config)
    assert "s3cr3t" not in text
    assert "shown" in text
    file = write(tmp_path / "a.yaml", text)
    with pytest.raises(ConfigError, match="HF_TOKEN is not set here"):
        load_config(config_class_of, file=file)
    for name, text_ in variables.items():
        monkeypatch.setenv(name, text_)
    assert load_config(config_class_of, file=file) == config
    assert WITHHELD in text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("env: E\nlr: 3\nnum_worker: 2\n", "line 3: There is no key num_worker. Did you mean 'num_workers'"),
        ("env: E\nmodel:\n  # a comment\n  use_lstm: 3\n", "line 4: model.use_lstm must be true or false"),
        ("env: E\nnum_gpus_per_worker: 1\n", "line 2: num_gpus_per_worker can only be 0, not 1"),
        ("a: [\n", "no valid YAML"),
        ("env: x\nenv: y\n", "line 2: this is no valid YAML: env is set twice"),
        ("model: {dim: 1, dim: 2}\n", "line 1: this is no valid YAML: dim is set twice"),
        ("- 3\n", "holds `key: value` lines, not a list"),
        ("env: !!python/object/apply:os.system [x]\n", "line 1: this is no valid YAML"),
        ("a: \x00\n", "no valid YAML"),
        ("algo: nope\n", "line 1: There is no algorithm nope"),
        ("? [1, 2]\n: 3\n", "line 1: this is no valid YAML: a key is one plain word"),
    ],
)
def test_a_bad_file_is_told_by_name_and_line(tmp_path: Path, text: str, sentence: str) -> None:
    file = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_class_of, file=file)
    assert sentence in str(caught.value)
    assert str(file) in str(caught.value)


HOSTILE = {
    "deep list": ("a: " + "[" * 5000 + "]" * 5000, "this is no valid YAML: it is nested too deeply"),
    "deep mapping": ("a: " + "{a: " * 50 + "}" * 50, "this is no valid YAML: it is nested too deeply"),
    "deep block": ("- " * 2000 + "1", "this is no valid YAML: it is nested too deeply"),
    "endless": ("a: &a [*a]\n", "this is no valid YAML: it is nested too deeply"),
    "aliases of aliases": (
        "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
        "this is no valid YAML: it holds more than 100,000 values",
    ),
    "merges of merges": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)),
        "this is no valid YAML: it holds more than 100,000 values",
    ),
    "a truth value that is none": ("lr: !!bool maybe\n", "this is no valid YAML: a value is none of its type"),
    "a time that is none": ("lr: !!timestamp maybe\n", "this is no valid YAML: a value is none of its type"),
    "a number that is none": ("lr: !!int ''\n", "this is no valid YAML: a value is none of its type"),
    "a long number": (f"lr: {'9' * 5000}\n", "this is no valid YAML: a value is none of its type"),
    "a large file": ("#" * (1 << 20) + "\nlr: 1\n", "it has more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_would_exhaust_its_reader_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    text, sentence = HOSTILE[kind]
    file = write(tmp_path / "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_class_of, file=file)
    assert sentence in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_line_is_not_named_when_the_command_line_set_the_key(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "env: E\nlr: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(config_class_of, file=file, overrides={"lr": -1})
    assert "a.yaml" not in str(caught.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.yaml can't be read: No such file"):
        load_config(config_class_of, file=tmp_path / "gone.yaml")
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no UTF-8"):
        load_config(config_class_of, file=tmp_path / "bin")


def test_there_must_be_an_environment() -> None:
    with pytest.raises(ConfigError, match="--env CartPole-v1") as caught:
        load_config(config_class_of)
    assert caught.value.key == "env"


def test_resume_starts_from_the_runs_own_config(tmp_path: Path) -> None:
    config = load_config(config_class_of, overrides={"env": "E", "algo": "other", "lr": 0.25, "stop_return": 10})
    save_config(config.updated({"resume": str(tmp_path)}), tmp_path)
    resumed = load_config(config_class_of, overrides={"resume": str(tmp_path), "stop_return": 20})
    assert (resumed.algo, resumed.lr, resumed.stop_return) == ("other", 0.25, 20)
    assert (resumed.resume, resumed.run_dir) == (str(tmp_path), str(tmp_path))
    assert yaml.safe_load((tmp_path / CONFIG_FILE).read_text())["resume"] is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"run_dir": "elsewhere"}, "run_dir can't be elsewhere here: the run in {0} goes on with run_dir {0}."),
        ({"algo": "ppo"}, "algo can't be ppo here: the run in {0} goes on with algo other."),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused_for_what_it_is(
    tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    save_config(load_config(config_class_of, overrides={"env": "E", "algo": "other"}), tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(config_class_of, overrides={"resume": str(tmp_path), **changes})
    assert str(caught.value).startswith(sentence.format(tmp_path))
    assert f"--config {tmp_path / CONFIG_FILE}" in caught.value.hint
    same = {"resume": str(tmp_path), "run_dir": f"{tmp_path}/", "algo": "other"}
    assert load_config(config_class_of, overrides=same).algo == "other"


def test_resume_of_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run directory: it holds no config\.yaml"):
        load_config(config_class_of, overrides={"resume": str(tmp_path)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "no regular file"),
        (os.mkdir, "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
        (lambda path: (path.touch(), os.truncate(path, 20 << 30)), "more than the"),
    ],
)
def test_what_stands_for_the_config_of_a_run_to_resume_is_never_waited_for(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / CONFIG_FILE)
    with pytest.raises(ConfigError, match=rf"config\.yaml can't be read: .*{said}"):
        load_config(config_class_of, overrides={"resume": str(tmp_path)})


def test_a_file_that_the_user_names_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(write(tmp_path / "a.yaml", "env: E\n"))
    assert load_config(config_class_of, file=link).env == "E"
    reader, writer = os.pipe()
    os.write(writer, b"env: F\n")
    os.close(writer)
    assert load_config(config_class_of, file=Path(f"/dev/fd/{reader}")).env == "F"
    os.close(reader)


def test_a_config_that_cannot_be_saved_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written: Not a directory"):
        save_config(CommonConfig(), tmp_path / "file")


def test_a_resumed_run_goes_on_with_its_own_settings_whatever_presets_there_are(tmp_path: Path) -> None:
    save_config(load_config(config_class, overrides={"env": "CartPole-v1", "preset": "ppo-cartpole"}), tmp_path)
    file = tmp_path / CONFIG_FILE
    file.write_text(file.read_text().replace("preset: ppo-cartpole", "preset: one-of-long-ago"))
    resumed = load_config(config_class, overrides={"resume": str(tmp_path), "seed": 3})
    assert (resumed.preset, resumed.gamma, resumed.seed) == ("one-of-long-ago", 0.98, 3)
    assert resumed.updated({"seed": 4}).preset == "one-of-long-ago"
    with pytest.raises(ConfigError, match=r"preset is for new runs, and the one in .* goes on with its own settings"):
        load_config(config_class, overrides={"resume": str(tmp_path), "preset": "auto"})
