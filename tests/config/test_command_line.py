"""Options of the learner's and the worker's programs, and exit statuses of programs."""

from __future__ import annotations

import ipaddress
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from aiorl.config.addresses import MAX_PORT, is_loopback, is_open_bind, split_address
from aiorl.config.command_line import exit_status
from aiorl.config.key import changed, key
from aiorl.config.schema import CommonConfig
from aiorl.errors import (
    CheckpointError,
    ConfigError,
    SecurityError,
    UnknownAlgorithmError,
    UnknownPolicyError,
)
from aiorl.learner import configure_learner, parse_learner_args
from aiorl.learning.algorithms.registry import config_class
from aiorl.worker import WorkerArgs, parse_worker_args


class OtherConfig(CommonConfig):
    """Config of an algorithm."""

    algo: str = changed(CommonConfig, "algo", "other")
    epochs: int = key(3, "Epochs over one batch.", group="Other")
    num_envs_per_worker: int = changed(CommonConfig, "num_envs_per_worker", 6)


def config_class_of(name: str) -> type[CommonConfig]:
    if name not in ("ppo", "other"):
        raise UnknownAlgorithmError(f"There is no algorithm {name}.", key="algo", value=name)
    return OtherConfig if name == "other" else CommonConfig


def learner(*argv: str) -> CommonConfig:
    return configure_learner(["--env", "CartPole-v1", *argv], config_class_of)


def test_the_options_that_scripts_rely_on_set_their_keys() -> None:
    line = (
        "--env E --algo other --num-workers 0 --num-envs-per-worker 8 --vectorize native --seed 7"
        " --stop-return -200 --stop-timesteps 1000 --stop-time-s 2.5 --run-dir R --bind"
        " tcp://0.0.0.0:5557 --keys K --insecure --max-worker-restarts 1"
    )
    config = configure_learner(line.split(), config_class_of)
    assert isinstance(config, OtherConfig)
    set_keys = {
        name: value
        for name, value in config.to_dict().items()
        if value != OtherConfig().to_dict()[name]
    }
    assert set_keys == {
        "env": "E",
        "num_workers": 0,
        "num_envs_per_worker": 8,
        "vectorize": "native",
        "seed": 7,
        "stop_return": -200.0,
        "stop_timesteps": 1000,
        "stop_time_s": 2.5,
        "run_dir": "R",
        "bind": "tcp://0.0.0.0:5557",
        "keys": "K",
        "insecure": True,
        "max_worker_restarts": 1,
    }


def test_options_of_one_group_merge_in_the_order_in_which_they_are_typed() -> None:
    typed = [
        "--set",
        "env_config.size=3",
        "--set",
        "env_config={size: 4, map: {wide: 1}}",
        "--env-config.map.high",
        "2",
    ]
    assert learner(*typed).env_config == {"size": 4, "map": {"wide": 1, "high": 2}}


@pytest.mark.parametrize(
    "argv",
    [
        [
            "--lr",
            "5e-4",
            "--model.fcnet-hiddens",
            "[8, 8]",
            "--clip-actions",
            "false",
            "--epochs",
            "9",
        ],
        ["--lr=5e-4", "--model.fcnet_hiddens=[8, 8]", "--clip_actions=false", "--epochs=9"],
        [
            "--set",
            "lr=5e-4",
            "--set",
            "model.fcnet_hiddens=[8, 8]",
            "--set",
            "clip_actions=false",
            "--set",
            "epochs=9",
        ],
    ],
)
def test_every_key_is_an_option_and_can_be_set(argv: list[str]) -> None:
    config = learner("--algo", "other", *argv)
    assert isinstance(config, OtherConfig)
    assert (config.lr, config.model.fcnet_hiddens, config.clip_actions, config.epochs) == (
        5e-4,
        (8, 8),
        False,
        9,
    )


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["--num-worker", "3"], "'--num-workers'"),
        (["--print-confg"], "'--print-config'"),
        (["--algo", "other", "--epocs", "3"], "'--epochs'"),
        (["--set", "gama=3"], "'gamma'"),
        (["--learning-rate", "3"], "--lr"),
        (["--model.net-arch", "[3]"], "--model.fcnet-hiddens"),
        (["--buffer-size", "3"], "replay_capacity"),
        (["--gpu", "1"], "num_gpus"),
        (["--stop-reward", "9"], "--stop-return"),
        (["--input-evaluation", "[foo]"], "'foo'"),
        (["--set", "gamma"], "KEY=VALUE"),
        (["--num-workers", "many"], "'many'"),
        (["--gamma", "3"], "--gamma"),
        (["--num-workers"], "--num-workers"),
        (["--insecure=yes"], "--insecure"),
        (["CartPole-v1"], "'CartPole-v1'"),
        (["-f", "file.yaml"], "--config FILE"),
        (["--run", "PPO"], "--algo"),
        (["--algo", "nope"], "nope"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--model", "3", "--model.use-lstm", "true"], "--model.use-lstm"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_one_sentence(
    argv: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        learner(*argv)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    sentence, advice = output.err.splitlines()
    assert option in sentence
    assert "`aiorl train --help`" in advice


@pytest.mark.parametrize(
    ("algo", "option", "spelling"),
    [("appo", "--gae-lambda", "--lambda"), ("dqn", "--buffer-size", "--replay-capacity")],
)
def test_options_are_those_of_the_algorithm_in_a_file(
    algo: str, option: str, spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(f"algo: {algo}\n")
    with pytest.raises(SystemExit):
        configure_learner(["--config", str(tmp_path / "mine.yaml"), option, "9"], config_class)
    assert spelling in capsys.readouterr().err


def test_a_value_can_begin_with_a_minus() -> None:
    assert [learner("--stop-return", text).stop_return for text in ("-200", "-1e3", "-.5")] == [
        -200,
        -1000,
        -0.5,
    ]
    with pytest.raises(SystemExit):
        learner("-5")


def test_an_option_without_a_value_means_true_and_text_stays_text() -> None:
    config = configure_learner(
        ["--model.use-lstm", "--insecure", "--env", "123", "--run-dir", "2026"], config_class_of
    )
    assert (config.model.use_lstm, config.insecure, config.env, config.run_dir) == (
        True,
        True,
        "123",
        "2026",
    )
    config = learner(
        "--model.custom-model", "1:2", "--env-config.max-steps", "7", "--run-dir", "null"
    )
    assert (config.model.custom_model, config.env_config, config.run_dir) == (
        "1:2",
        {"max_steps": 7},
        None,
    )
    assert parse_learner_args(["--callbacks", "{on_train_result: a:b}"]).overrides == {
        "callbacks": {"on_train_result": "a:b"}
    }


def test_help_shows_the_defaults_of_the_chosen_algorithm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = []
    for algo in ("ppo", "other", "nope"):
        with pytest.raises(SystemExit) as caught:
            configure_learner(["--algo", algo, "--no-such-key", "3", "--help"], config_class_of)
        assert caught.value.code == 0
        texts.append(" ".join(capsys.readouterr().out.split()))
    assert "(environments; default: 1)" in texts[0]
    assert "(environments; default: 6)" in texts[1]
    assert texts[2] == texts[0]
    assert all("num_gpus_per_worker" not in text for text in texts)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        configure_learner(argv, config_class)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_a_printed_config_loads_again_and_origins_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "printed.yaml"
    file.write_text(printed(capsys, "--env", "CartPole-v1", "--lr", "0.2", "--print-config"))
    from_options = configure_learner(["--env", "CartPole-v1", "--lr", "0.2"], config_class)
    assert configure_learner(["--config", str(file)], config_class) == from_options
    text = printed(capsys, "--env", "CartPole-v1", "--gamma", "0.5", "--show-config")
    assert re.search(r"^gamma +argument +0.5$", text, re.MULTILINE)


def test_the_keys_of_an_algorithm_and_the_presets_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "kl_coeff: " in printed(capsys, "--algo", "ppo", "--help-config")
    text = printed(capsys, "--help-presets")
    assert re.search(r"^ppo-cartpole: CartPole-v1\n.*\n.*rl-baselines3-zoo", text, re.MULTILINE)
    assert configure_learner(["--preset", "impala-cartpole"], config_class).algo == "impala"


@pytest.mark.parametrize(
    ("parse", "prog"), [(parse_learner_args, "train"), (parse_worker_args, "worker")]
)
def test_help_has_examples_and_no_internal_options(
    parse: object, prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--num-workers", "1", "--help"])  # type: ignore[operator]
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: aiorl {prog}" in text
    assert text.count(f"\n  aiorl {prog} --") >= 2
    assert not re.search(r"--slot\b", text)
    assert "None" not in text


def test_a_worker_needs_only_an_address_and_a_local_worker_gets_more() -> None:
    assert parse_worker_args(["--connect", "tcp://host:5557"]) == WorkerArgs(
        connect=["tcp://host:5557"]
    )
    line = (
        "--connect tcp://h:1 --num-workers 3 --keys K --log-level debug --max-worker-restarts 0 "
        "--slot 0 --exit-with-parent"
    )
    assert parse_worker_args(line.split()) == WorkerArgs(
        connect=["tcp://h:1"],
        num_workers=3,
        keys=Path("K"),
        log_level="DEBUG",
        max_worker_restarts=0,
        slot=0,
        exit_with_parent=True,
    )


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        ([], "--connect tcp://HOST:PORT"),
        (["--connect", "host:1"], "tcp://HOST:PORT"),
        (["--connect", "tcp://h:0"], "'tcp://h:0'"),
        (["--conect", "tcp://h:1"], "'--connect'"),
        (["--connect", "tcp://h:1", "--num-workers", "0"], "--num-workers"),
        (["--connect", "tcp://h:1", "--log-level", "loud"], "DEBUG"),
        (["--connect", "tcp://h:1", "--slot", "x"], "--slot"),
    ],
)
def test_wrong_usage_of_a_worker_ends_with_status_2(
    argv: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_worker_args(argv)
    assert caught.value.code == 2
    assert option in capsys.readouterr().err


def test_the_module_imports_almost_nothing() -> None:
    code = (
        "import sys, aiorl.worker as it\nit.parse_worker_args(['--connect', 'tcp://h:1'])\nbad ="
        " {'pydantic', 'numpy', 'yaml', 'inspect', 'asyncio', 'rich', 'tyro'} &"
        " set(sys.modules)\nraise SystemExit(f'loaded {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (None, 0, ""),
        (ConfigError("it can't be.", hint="Do that."), 2, "aiorl: it can't be. Do that.\n"),
        (UnknownPolicyError("left", ["right"]), 2, "'left'"),
        (CheckpointError(Path("there"), "is damaged"), 1, "is damaged"),
        (ImportError("no TensorFlow"), 1, "aiorl: no TensorFlow\n"),
        (OSError("disk full\nor so"), 1, "disk full"),
        (KeyboardInterrupt(), 130, "Ctrl-C"),
    ],
)
def test_an_error_prints_one_sentence_and_its_status_shows_the_cause(
    error: BaseException | None, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def do() -> None:
        if error is not None:
            raise error

    assert exit_status(do) == status
    assert exit_status(lambda: status) == status
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == (status > 0)


ADDRESSES = {  # address -> host, port, and True if only this machine can reach it
    "tcp://127.0.0.1:0": ("127.0.0.1", 0, True),
    "tcp://localhost:5557": ("localhost", 5557, True),
    "tcp://[::1]:5557": ("::1", 5557, True),
    "tcp://[::ffff:127.0.0.1]:1": ("::ffff:127.0.0.1", 1, True),
    "tcp://[::ffff:10.0.0.1]:1": ("::ffff:10.0.0.1", 1, False),
    "tcp://[fe80::1%eth0]:1": ("fe80::1%eth0", 1, False),
    "tcp://*:5557": ("*", 5557, False),
    "tcp://learner-host:65534": ("learner-host", 65534, False),
    "tcp://128.0.0.1:1": ("128.0.0.1", 1, False),
    # look like loopback, but are names, or other programs read them differently
    "tcp://127.0.0.1.example.org:1": ("127.0.0.1.example.org", 1, False),
    "tcp://127.1:1": ("127.1", 1, False),
    "tcp://127.000.0.1:1": ("127.000.0.1", 1, False),
    "tcp://2130706433:1": ("2130706433", 1, False),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_host_port_and_reach_of_an_address(address: str) -> None:
    host, port = split_address(address)
    assert (host, port, is_loopback(host)) == ADDRESSES[address]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host:5557",
        "tcp://host:",
        "tcp://host:65535",
        "tcp://host:" + "9" * 5000,
        "tcp://::1:5557",
        "tcp://h:\N{ARABIC-INDIC DIGIT FIVE}",
        "tcp://[learner]:5557",
        "tcp://[127.0.0.1]:5557",
        "tcp://:1",
        "tcp://a:b:1",
        "tcp://[::1:1",
        "tcp://a/b:1",
        "tcp://host\n:1",
    ],
)
def test_any_other_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ConfigError, match=r"tcp://127\.0\.0\.1:5557") as caught:
        split_address(address, key="connect")
    assert (caught.value.key, caught.value.value) == ("connect", address)
    assert str(MAX_PORT) in caught.value.hint
    assert len(str(caught.value)) < 500


@settings(max_examples=30)
@given(host=st.ip_addresses(), port=st.integers(0, MAX_PORT))
def test_every_ip_address_survives_the_round_trip(
    host: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    written = f"[{host}]" if host.version == 6 else str(host)
    assert split_address(f"tcp://{written}:{port}") == (str(host), port)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.1.2.3:1", "tcp://[::]:1"]
)
def test_a_bind_open_to_the_network_needs_keys_or_insecure(address: str) -> None:
    with pytest.raises(SecurityError, match=r"aiorl keys DIR.*--insecure") as caught:
        is_open_bind(address, has_keys=False, insecure=False)
    assert caught.value.key == "bind"
    assert is_open_bind(address, has_keys=False, insecure=True)
    assert not is_open_bind(address, has_keys=True, insecure=False)
    assert not is_open_bind("tcp://127.0.0.1:5557", has_keys=False, insecure=False)
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        is_open_bind("127.0.0.1", has_keys=True, insecure=True)


@pytest.mark.parametrize(
    ("typed", "meant"), [("--evn", "--env"), ("--stop-timestep", "--stop-timesteps")]
)
def test_a_mistyped_option_is_answered_with_the_one_that_is_meant(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        configure_learner([typed, "1"], config_class_of)
    assert repr(meant) in capsys.readouterr().err


def test_a_place_for_the_logs_of_workers_that_is_a_file_is_wrong_usage(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    command = [sys.executable, "-m", "aiorl.worker", "--connect", "tcp://127.0.0.1:5557"]
    run = subprocess.run([*command, "--log-dir", str(place)], capture_output=True, text=True)
    assert run.returncode == 2
    assert f"--log-dir {place}" in run.stderr
