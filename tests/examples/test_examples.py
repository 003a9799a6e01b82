"""The examples are short, and the commands in their first lines work."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from learner_server import can_fork
from processes import Started, StartedLearner, free_address

from aiorl.config.layers import load_config
from aiorl.learner import parse_learner_args
from aiorl.learning.algorithms.registry import config_class

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml"))
LEARNER = "aiorl train "
OF_ACTORS = {
    "evaluation_farm.py",
    "parameter_server.py",
    "policy_gradient.py",
    "prioritised_replay.py",
    "random_search.py",
}
"""Examples of loops of one's own, which are shorter than the others."""
WITH_TENSORFLOW = {"custom_model", "demonstrations", "optuna_sweep", "policy_gradient"}
"""Examples whose own process loads TensorFlow."""
NO_XLA = "--xla=off"  # compilation takes longer than these runs
SMALL = (
    NO_XLA,
    "--num-envs-per-worker=8",
    "--rollout-fragment-length=32",
    "--train-batch-size=512",
)


def head_of(name: str) -> str:
    """Return the first docstring of an example."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        return ast.get_docstring(ast.parse(text)) or ""
    return "\n".join(
        line.removeprefix("#").removeprefix(" ")
        for line in text.splitlines()
        if line.startswith("#")
    )


def commands_of(name: str) -> list[str]:
    """Return the commands of an example in order: the indented lines, with continued lines
    joined.
    """
    joined = head_of(name).replace("\\\n", " ")
    return [" ".join(line.split()) for line in joined.splitlines() if line.startswith("    ")]


def forkable(command: str) -> tuple[str, list[str]]:
    """Return the module that a command runs, and its arguments; "" if it needs no TensorFlow or a
    shell.
    """
    if command.startswith(LEARNER):
        return "aiorl.learner", shlex.split(command.removeprefix(LEARNER))
    found = re.fullmatch(r"python -m (examples\.(\w+))( [^;#|>&]*)?", command)
    if found is None or found[2] not in WITH_TENSORFLOW:
        return "", []
    return found[1], shlex.split(found[3] or "")


class Folder:
    """Folder with a user's copy of the examples, in which commands run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(EXAMPLES, path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        self._started: list[Started] = []

    def start(self, command: str, *options: str) -> Started:
        """Start a command in a shell in which `python` and `aiorl` are these.

        A learner, or an example that loads TensorFlow, is forked from a process that has loaded it
        where that can be.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        started: Started
        module, words = forkable(command)
        if module and can_fork:
            started = StartedLearner(
                self.path,
                *words,
                *options,
                environment=environment,
                directory=str(self.path),
                module=module,
            )
        else:
            line = f"cd {shlex.quote(str(self.path))} && {command} {shlex.join(options)}"
            started = Started(["bash", "-c", line], environment)
        self._started.append(started)
        return started

    def change(self, name: str, old: str, new: str) -> None:
        """Change a part of an example, for a shorter run."""
        path = self.path / "examples" / name
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1
        path.write_text(text.replace(old, new), encoding="utf-8")

    def run(self, command: str, *options: str, timeout_s: float = 200.0) -> str:
        """Run a command that must succeed, and return its output."""
        started = self.start(command, *options)
        assert started.wait(timeout_s) == 0, started.text
        return started.text

    def results(self) -> list[dict]:
        """Return all results of the only run."""
        (path,) = (self.path / "runs").glob("*/result.jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()]

    def is_solved(self) -> bool:
        """Return whether the only run has reached the return at which it ends."""
        (config,) = (self.path / "runs").glob("*/config.yaml")
        wanted = yaml.safe_load(config.read_text())["stop_return"]
        return bool(self.results()[-1]["episode_reward_mean_last_100"] >= wanted)

    def end(self) -> None:
        """End all running commands and their children: each command has its own process group."""
        for started in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.end()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    before = {path: path.stat().st_mtime_ns for path in EXAMPLES.rglob("*")}
    has_runs = (ROOT / "runs").exists()
    made = Folder(tmp_path)
    yield made
    made.end()
    assert {path: path.stat().st_mtime_ns for path in EXAMPLES.rglob("*")} == before
    assert (ROOT / "runs").exists() == has_runs


@pytest.mark.parametrize("name", FILES)
def test_every_example_has_at_most_100_lines_and_begins_with_its_purpose_and_a_command(
    name: str,
) -> None:
    num_lines = len((EXAMPLES / name).read_text().splitlines())
    assert num_lines <= (60 if name in OF_ACTORS else 99)
    assert head_of(name).splitlines()[0].endswith((".", ":"))
    assert commands_of(name)[0].startswith((LEARNER, f"python -m examples.{Path(name).stem}"))


@pytest.mark.parametrize("name", FILES)
def test_every_learner_command_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for command in commands_of(name):
        if command.startswith(LEARNER):
            args = parse_learner_args(shlex.split(command)[2:])
            config = load_config(config_class, file=args.config_file, overrides=args.overrides)
            assert config.stop_return is not None or config.stop_timesteps is not None, (
                "it would never end"
            )


def test_the_table_lists_every_example_and_its_commands() -> None:
    rows = [
        line for line in (EXAMPLES / "README.md").read_text().splitlines() if line.startswith("| [")
    ]
    named = {re.findall(r"\]\(([^)]+)\)", row)[0]: row for row in rows}
    notebooks = {path.name for path in EXAMPLES.glob("*.ipynb")}
    folders = {"browser/index.html", "games/CartPole.cs", "operation/compose.yaml"}
    assert named.keys() == {*FILES, *notebooks, *folders}
    for name, row in named.items():
        for command in re.findall(r"`((?:python|aiorl) [^`]+)`", row):
            start, _, part = command.removesuffix(" ...").partition(" --")
            assert any(own.startswith(start) and part in own for own in commands_of(name)), (
                name,
                command,
            )


def test_custom_env(folder: Folder) -> None:
    learn, check = commands_of("custom_env.py")
    assert re.search(r"\b3\b.*\b0\.8", folder.run(check))
    folder.run(learn, *SMALL)
    mean = folder.results()[-1]["episode_reward_mean_last_100"]
    # a run ends at its return, except for the rounding of float32 rewards
    assert 0.25 - 1e-6 <= mean < 0.301


@pytest.mark.slow
@pytest.mark.parametrize(
    ("xla", "env_steps"), [("off", 60), pytest.param("auto", 200, marks=pytest.mark.nightly)]
)
def test_demonstrations(folder: Folder, xla: str, env_steps: int) -> None:
    folder.change("demonstrations.py", 'algo="sac",', f'algo="sac", xla="{xla}",')
    (learn,) = commands_of("demonstrations.py")
    shown = folder.run(learn.partition(" --")[0], f"--env-steps={env_steps}")
    lines = [line.split() for line in shown.splitlines() if re.match(r"1 0(\.6|\.0) -\d", line)]
    assert [share for _, share, _ in lines] == ["0.6", "0.0"]
    (with_stored,) = (folder.path / "runs/demonstrations").glob("share-0.6*/result.jsonl")
    last = json.loads(with_stored.read_text().splitlines()[-1])
    assert last["timesteps_total"] >= 2.5 * env_steps
    assert last["learner"]["rows_stored"] == last["timesteps_total"]


@pytest.mark.slow
def test_optuna_sweep_prunes_trials_that_do_worse_than_most(folder: Folder) -> None:
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{folder.path}/sweep.db"
    study = optuna.create_study(study_name="ppo-cartpole", storage=storage, direction="maximize")
    told = {
        "value": 500.0,
        "intermediate_values": dict.fromkeys(range(1, 21), 500.0),
        "user_attrs": {"run": "runs/a"},
    }
    study.add_trials([optuna.trial.create_trial(**told)] * 5)
    shown = folder.run(stored_sweep(), "--trials=1", "--iterations=20")
    assert best_of(6, shown) == ("1", "500.0")
    *_, last = study.trials
    assert last.state == optuna.trial.TrialState.PRUNED
    assert last.intermediate_values.keys() == {
        1,
        2,
    }, "each trial has a tenth of the iterations before it can be pruned"
    assert last.params.keys() == {"lr", "entropy_coeff", "clip_param", "lambda_", "num_sgd_iter"}
    assert (folder.path / last.user_attrs["run"] / "progress.csv").exists()


@pytest.mark.slow
def test_optuna_sweep_continues_from_its_file_with_other_settings(folder: Folder) -> None:
    optuna = pytest.importorskip("optuna")
    for number in (1, 2):
        shown = folder.run(stored_sweep(), "--trials=1", "--iterations=2")
        assert best_of(number, shown)[0] == "0"
    study = optuna.load_study(
        study_name="ppo-cartpole", storage=f"sqlite:///{folder.path}/sweep.db"
    )
    assert len({trial.params["lr"] for trial in study.trials}) == 2
    assert f"lr: {study.best_params['lr']:.4g}" in shown


@pytest.mark.nightly
def test_optuna_sweep_finds_settings_that_learn(folder: Folder) -> None:
    shown = folder.run(commands_of("optuna_sweep.py")[0], timeout_s=280)
    pruned, mean = best_of(20, shown)
    assert int(pruned) >= 3
    assert float(mean) > 200


def best_of(trials: int, shown: str) -> tuple[str, str]:
    """Return the number of pruned trials and the best mean return from a sweep's output."""
    (found,) = re.findall(
        rf"^[^\d\n]+ {trials} [^\d\n]+ (\d+) [^\d\n]+ (\d+\.\d) [^\d\n]+$", shown, re.MULTILINE
    )
    return found


def stored_sweep() -> str:
    """Return the command of a stored sweep, without its comment."""
    return commands_of("optuna_sweep.py")[1].partition(" #")[0]


@pytest.mark.slow
def test_custom_model(folder: Folder) -> None:
    learn, look = commands_of("custom_model.py")
    assert "Trainable params" in folder.run(look)
    folder.run(learn, NO_XLA, "--stop-timesteps=20000", "--num-workers=1")
    results = folder.results()
    assert (
        results[-1]["episode_reward_mean_last_100"]
        > 1.5 * results[0]["episode_reward_mean_last_100"]
    )


@pytest.mark.slow
def test_quantile_dqn_learns_outside_of_the_package(folder: Folder) -> None:
    options = (NO_XLA, "--seed=1", "--num-quantiles=8", "--stop-return=60")
    folder.run(commands_of("quantile_dqn.py")[0], *options)
    assert folder.is_solved()


@pytest.mark.nightly
def test_quantile_dqn_balances_a_pole(folder: Folder) -> None:
    folder.run(commands_of("quantile_dqn.py")[0])
    assert folder.is_solved()


@pytest.mark.nightly
def test_custom_model_solves_cartpole(folder: Folder) -> None:
    folder.run(commands_of("custom_model.py")[0])
    assert folder.is_solved()


@pytest.mark.nightly
def test_recurrent_memory(folder: Folder) -> None:
    folder.run(commands_of("recurrent_memory.py")[0])
    assert folder.is_solved()


@pytest.mark.nightly
def test_without_memory_the_return_is_that_of_a_guess(folder: Folder) -> None:
    folder.run(commands_of("recurrent_memory.py")[1])
    assert folder.results()[-1]["episode_reward_mean_last_100"] < 0.7


@pytest.mark.slow
def test_multi_agent_cartpole(folder: Folder) -> None:
    learn, look = commands_of("multi_agent_cartpole.py")
    folder.run(learn, NO_XLA, "--stop-timesteps=4096", "--num-workers=1")
    earned = json.loads("{" + folder.run(look) + "}")["policy_reward_mean"]
    assert earned.keys() == {"even", "odd"}
    assert all(5 < value < 501 for value in earned.values())


@pytest.mark.nightly
def test_multi_agent_cartpole_learns_with_both_policies(folder: Folder) -> None:
    learn, look = commands_of("multi_agent_cartpole.py")
    folder.run(learn)
    assert folder.is_solved()
    earned = json.loads("{" + folder.run(look) + "}")["policy_reward_mean"]
    assert min(earned.values()) > 100


@pytest.mark.slow
def test_pettingzoo_rps(folder: Folder) -> None:
    learn, look = commands_of("pettingzoo_rps.py")
    folder.run(learn, *SMALL, "--stop-timesteps=10000")
    earned = json.loads("{" + folder.run(look) + "}")["policy_reward_mean"]
    assert earned["learner"] > 3, "a guess would reach 0"
    assert earned["habit"] == pytest.approx(-earned["learner"])


@pytest.mark.nightly
def test_pettingzoo_rps_wins_nearly_every_round(folder: Folder) -> None:
    learn, look = commands_of("pettingzoo_rps.py")
    folder.run(learn)
    assert json.loads("{" + folder.run(look) + "}")["policy_reward_mean"]["learner"] > 13


@pytest.mark.slow
def test_custom_metrics(folder: Folder) -> None:
    learn, look = commands_of("custom_metrics.py")
    folder.run(learn, *SMALL, "--stop-timesteps=6000")
    first, last = (
        json.loads("{" + line + "}")["custom_metrics"] for line in folder.run(look).splitlines()
    )
    assert first.keys() == {
        f"{name}_{kind}" for name in ("largest_lean", "stray") for kind in ("mean", "min", "max")
    }
    assert first["largest_lean_min"] > 0.2, (
        "an episode ends when the pole leans by 12 degrees, 0.21"
    )
    assert last["stray_max"] > 0
    assert 0 < folder.results()[-1]["solved_share"] <= 1


@pytest.mark.slow
def test_external_http(folder: Folder) -> None:
    learn, play = commands_of("external_http.py")
    learner = folder.start(learn, NO_XLA, "--stop-timesteps=6000", "--num-workers=1")
    folder.start(f"until (: > /dev/tcp/localhost/9900) 2> /dev/null; do sleep 0.1; done; {play}")
    assert learner.wait(90) == 0, learner.text
    assert folder.results()[-1]["episodes_total"] > 10


@pytest.mark.nightly
def test_atari(folder: Folder) -> None:
    """It runs to the end of the first games; the full example runs twice as long."""
    folder.run(commands_of("atari.yaml")[0], "--stop-timesteps=10000", "--num-sgd-iter=1")
    assert -21 <= folder.results()[-1]["episode_reward_mean_last_100"] < 0, "whole games, not lives"


IMPORTED = """
import os
from pathlib import Path

Path({folder!r}, f"tensorflow-{{os.getpid()}}").touch()
"""
"""Module that leaves a file when it is imported, in place of TensorFlow."""
LOADS = """
import asyncio

import aiorl


class Loader:
    def load(self):
        import tensorflow


async def main():
    async with aiorl.Actors() as actors:
        loader = await actors.start(Loader)
        await loader.load()


if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_random_search_solves_cartpole_and_no_process_of_it_imports_tensorflow(
    folder: Folder,
) -> None:
    (folder.path / "tensorflow.py").write_text(IMPORTED.format(folder=str(folder.path)))
    (folder.path / "loads.py").write_text(LOADS)
    (command,) = commands_of("random_search.py")
    *_, last = folder.run(command).splitlines()
    assert float(last.split()[-1]) >= 475
    assert not [*folder.path.glob("tensorflow-*")]
    folder.run("python loads.py")
    assert [*folder.path.glob("tensorflow-*")], "an actor would have imported it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goal", "least_gradients"), [(150, 30), pytest.param(475, 100, marks=pytest.mark.nightly)]
)
def test_parameter_server_learns_from_late_gradients(
    folder: Folder, goal: int, least_gradients: int
) -> None:
    folder.change("parameter_server.py", "means[0] < 475", f"means[0] < {goal}")
    (command,) = commands_of("parameter_server.py")
    mean, num_gradients, delay = re.findall(r"\d+(?:\.\d+)?", folder.run(command))
    assert float(mean) >= goal
    assert int(num_gradients) > least_gradients
    assert float(delay) > 0.2, "the other worker's gradients came in between"


@pytest.mark.slow
@pytest.mark.parametrize("goal", [-150, pytest.param(7, marks=pytest.mark.nightly)])
def test_prioritised_replay_feeds_a_learner_that_reaches_its_bar(folder: Folder, goal: int) -> None:
    """An action that never changes has a return of -200; a random one costs more."""
    folder.change("prioritised_replay.py", "[-100:]) < 7:", f"[-100:]) < {goal}:")
    (command,) = commands_of("prioritised_replay.py")
    mean, num_episodes = re.findall(r"-?\d+(?:\.\d+)?", folder.run(command))
    assert goal <= float(mean) < 9
    assert int(num_episodes) >= 100


@pytest.mark.slow
def test_policy_gradient_improves_its_policy(folder: Folder) -> None:
    folder.change("policy_gradient.py", "count=4", "count=2")
    (command,) = commands_of("policy_gradient.py")
    means = [
        float(line.split()[-1])
        for line in folder.run(command, "60").splitlines()
        if line.startswith("mean")
    ]
    assert means[0] < 40
    assert means[-1] >= 60


@pytest.mark.nightly
def test_policy_gradient_solves_cartpole(folder: Folder) -> None:
    folder.run(commands_of("policy_gradient.py")[0], timeout_s=280)


@pytest.mark.slow
def test_evaluation_farm_plays_here_and_on_processes_that_join(folder: Folder) -> None:
    learn, here, joined, worker = commands_of("evaluation_farm.py")
    folder.run(learn, *SMALL, "--stop-timesteps=1000")
    returns = re.compile(r"(\d+\.\d) ± .* over 200 episodes")
    (mean,) = returns.findall(folder.run(here.partition(" 2 ")[0], "1"))
    place = free_address()
    local = joined.partition(" #")[0].replace("tcp://0.0.0.0:5557 keys", place)
    farm = folder.start(local.replace(" 16 ", " 2 "))
    workers = folder.start(f"aiorl worker --connect {place} --slots 2")
    assert farm.wait(100) == 0, farm.text
    assert returns.findall(farm.text) == [mean], "the same seeds give the same episodes"
    assert "tcp://HOST:5557" in worker
    assert workers.wait(30) == 0, "the end of the farm is theirs, too"
