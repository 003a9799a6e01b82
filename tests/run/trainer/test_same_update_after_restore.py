"""A restored trainer continues exactly as a killed one would have (T3)."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from small_runs import SMALL, Played, raising

import aiorl
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import EnvError
from aiorl.run.trainer import trainer_class

SCHEDULES = {
    "lr_schedule": [[0, 0.01], [600, 0.001]],
    "entropy_coeff_schedule": [[0, 0.1], [600, 0.0]],
}
TRACED = {**SMALL, "eager": False, "xla": "off"}
PPO = {
    **TRACED,
    **SCHEDULES,
    "algo": "ppo",
    "sgd_minibatch_size": 32,
    "num_sgd_iter": 2,
    "kl_coeff": 0.2,
    "clip_param_schedule": [[0, 0.3], [600, 0.1]],
    "observation_filter": "MeanStdFilter",
    "normalize_rewards": True,
}
LSTM = {"model": {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 4}}
LOOKS_BACK = {"model": {**LSTM["model"], "lstm_use_prev_action_reward": True}}
# with short episodes a network with memory takes few steps; each new length would be traced
WHOLE = {"batch_mode": "complete_episodes", "horizon": 12, "eager": True}
APPO = {
    **TRACED,
    **SCHEDULES,
    "algo": "appo",
    "num_sgd_iter": 2,
    "sgd_minibatch_size": 32,
    "kl_coeff": 0.2,
    "target_update_freq": 2,
    "observation_filter": "MeanStdFilter",
}
DQN = {
    **{
        key: value
        for key, value in TRACED.items()
        if key not in ("sgd_minibatch_size", "num_sgd_iter")
    },
    **LSTM,
    "algo": "dqn",
    "replay_sequence_length": 4,
    "burn_in": 1,
    "prioritized_replay": True,
    "learning_starts": 32,
    "replay_capacity": 200,
    "timesteps_per_iteration": 1,
    "min_iter_time_s": 0,
    "lr_schedule": SCHEDULES["lr_schedule"],
}
IMPALA = {**TRACED, **SCHEDULES, "algo": "impala", "observation_filter": "MeanStdFilter"}


def digest(trainer: Any) -> str:
    """Return a digest of everything that the next update depends on: weights, optimiser, order of
    rows, filters.
    """
    training = trainer._training
    state, found = training.learning.group.get_state(), hashlib.sha256()
    for name in sorted(state.tensors):
        found.update(name.encode() + np.ascontiguousarray(state.tensors[name]).tobytes())
    found.update(json.dumps(state.values, sort_keys=True).encode())
    for name, own in sorted(training.core.publisher.filter_states().items()):
        found.update(
            name.encode() + b"".join(np.asarray(own[key]).tobytes() for key in sorted(own))
        )
    return found.hexdigest()


def plain(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result's figures about episodes, steps and updates, without times."""
    names = (
        "training_iteration",
        "timesteps_total",
        "env_steps_trained_total",
        "episodes_total",
        "ledger",
    )
    kept = {
        name: value
        for name, value in result.items()
        if name in names or name.startswith(("episode_", "hist_"))
    }
    times = ("update_s", "make_batch_s", "wait_for_batch_s")
    kept["learner"] = {
        name: value for name, value in result["learner"].items() if name not in times
    }
    return json.loads(json.dumps(kept))  # type: ignore[no-any-return]


class Recording:
    """Recorder of the fragments of all train batches of a trainer, one file each."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._group = trainer._training.learning.group
        self._make = self._group.make_batch
        self._folder, self._batches = folder, 0
        self._group.make_batch = self._noting

    def _noting(self, fragments: Any) -> Any:
        for number, fragment in enumerate(fragments):
            np.savez(
                self._folder / f"batch-{self._batches}-{number}.npz", **fragment[DEFAULT_POLICY_ID]
            )
        self._batches += 1
        return self._make(fragments)


def train_save_and_go_on(folder: Path, settings: dict[str, Any]) -> Any:
    """Train, save and continue in a child process, which is then killed; the trainer is not
    stopped.
    """
    trainer: Any = trainer_class(settings["algo"])(
        {**settings, "run_dir": str(folder / "run")}, env="CartPole-v1"
    )
    for _ in range(3):
        trainer.train()
    (folder / "saved.txt").write_text(trainer.save())
    Recording(trainer, folder)
    with (folder / "after.jsonl").open("w") as after:
        for _ in range(3):
            result = trainer.train()
            after.write(json.dumps([digest(trainer), plain(result)]) + "\n")
    return trainer


NIGHTLY = (
    "ppo with a memory, whole episodes",
    "ppo that looks back, polled, whole episodes",
    "appo with a memory, whole episodes",
    "ppo with a memory",
    "a3c",
)
"""Cases whose parts others have, too, or that take long."""
CASES = {
    "ppo with a memory, whole episodes": {**PPO, **WHOLE, **LSTM},
    "ppo with a memory": {**PPO, **LSTM},
    "ppo, whole episodes": {**PPO, **WHOLE, "eager": False},
    "ppo that looks back, polled, whole episodes": {**PPO, **WHOLE, **LOOKS_BACK},
    "impala, whole episodes": {**IMPALA, **WHOLE},
    "appo with a memory, whole episodes": {**APPO, **WHOLE, **LSTM},
    "appo": APPO,
    "a3c": {**IMPALA, "algo": "a3c"},
    "dqn with a memory": DQN,
}


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Path]:
    """Run trainers of the selected tests that continue after their checkpoints, and kill their
    process.
    """
    selected = [
        item.callspec.params.get("name")
        for item in request.session.items
        if hasattr(item, "callspec")
    ]
    folders = {name: tmp_path_factory.mktemp("killed") for name in CASES if name in selected}
    code = """
        import json, os, signal, sys
        sys.path[:0] = json.loads(sys.argv[1])
        from pathlib import Path
        from test_same_update_after_restore import train_save_and_go_on
        trainers = [train_save_and_go_on(Path(folder), settings) for folder, settings in json.loads(sys.argv[2])]
        os.kill(os.getpid(), signal.SIGKILL)
    """
    given = [[str(folder), CASES[name]] for name, folder in folders.items()]
    paths = [str(Path(__file__).parent), *sys.path]
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(paths), json.dumps(given)],
        timeout=240,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    return folders


def check_same_samples_and_updates(folder: Path) -> None:
    expected = [json.loads(line) for line in (folder / "after.jsonl").read_text().splitlines()]
    assert len(expected) == 3
    with aiorl.Trainer.restore(
        (folder / "saved.txt").read_text(), run_dir=str(folder / "again")
    ) as trainer:
        for wanted, result in expected:
            found = plain(trainer.train())
            assert found == result
            assert digest(trainer) == wanted
    assert expected[0][1]["learner"]["cur_lr"] != expected[2][1]["learner"]["cur_lr"]


def check_same_updates_of_the_same_samples(folder: Path) -> None:
    lines = (folder / "after.jsonl").read_text().splitlines()
    assert len(lines) == 3
    with aiorl.Trainer.restore(
        (folder / "saved.txt").read_text(), run_dir=str(folder / "again")
    ) as trainer:
        training: Any = trainer._training
        group, steps = training.learning.group, training.counters.env_steps_trained
        for number, line in enumerate(lines):
            files = sorted(folder.glob(f"batch-{number}-*.npz"))
            fragments = [{DEFAULT_POLICY_ID: dict(np.load(file))} for file in files]
            result = group.update(group.make_batch(fragments), steps)
            _, told = json.loads(line)
            learner, steps = told["learner"], told["env_steps_trained_total"]
            assert {key: result.metrics[key] for key in learner} == learner


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in CASES],
)
def test_t3_after_a_kill_a_restored_trainer_does_the_same_as_one_that_continued(
    name: str, killed: dict[str, Path]
) -> None:
    """With whole episodes the samples are the same, too; otherwise the same samples lead to the
    same updates.
    """
    is_whole = name.endswith("whole episodes")
    check = check_same_samples_and_updates if is_whole else check_same_updates_of_the_same_samples
    check(killed[name])


def greedy_return(trainer: Any) -> float:
    """Return the mean return of 50 parallel episodes with the most likely actions."""
    envs = gymnasium.make_vec("CartPole-v1", 50, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=1)
    returns, going = np.zeros(50), np.ones(50, np.bool_)
    policy = trainer.get_policy()
    while going.any():
        actions = policy.act(obs.astype(np.float32), explore=False).actions
        obs, rewards, terminateds, truncateds, _ = envs.step(actions)
        returns += np.where(going, rewards, 0.0)
        going &= ~(terminateds | truncateds)
    envs.close()
    return float(returns.mean())


@pytest.mark.slow
@pytest.mark.parametrize("goal", [80, pytest.param(150, marks=pytest.mark.nightly)])
def test_t3_restored_three_times_in_a_row_it_is_still_the_trained_policy(
    tmp_path: Path, goal: int
) -> None:
    """Random events that follow do not change the policy any more."""
    rng = np.random.default_rng(4)
    trainer: Any = aiorl.PPOTrainer(
        {
            "preset": "auto",
            "num_workers": 0,
            "seed": 3,
            "xla": "off",
            "run_dir": str(tmp_path / "first"),
        },
        env="CartPole-v1",
    )
    for _ in trainer.iterate(stop_return=goal, stop_timesteps=200_000):
        pass
    trained = greedy_return(trainer)
    assert trained >= goal
    path = trainer.save(tmp_path / "saved")
    for number in range(3):
        trainer.train()  # lost
        trainer.stop()
        trainer = aiorl.Trainer.restore(
            path, lr_schedule=[[0, 1e-9]], run_dir=str(tmp_path / f"run-{number}")
        )
        assert greedy_return(trainer) >= 0.95 * trained
        for _ in range(rng.integers(3)):
            trainer.train()
        path = trainer.save(tmp_path / f"saved-{number}")
    trainer.stop()


def test_the_sampler_after_an_interrupted_one_has_other_seeds(
    tmp_path: Path, played: type[Played]
) -> None:
    seeds: list[int] = []

    class Seeded(Played):
        """Environment that notes its seeds."""

        def reset(
            self, *, seed: int | None = None, options: Any = None
        ) -> tuple[Any, dict[str, Any]]:
            seeds.extend([] if seed is None else [seed])
            return super().reset(seed=seed, options=options)

    with aiorl.PPOTrainer({**SMALL, "run_dir": str(tmp_path / "run")}, env=Seeded) as trainer:
        for _ in range(3):
            played.at_step[played.steps + 20] = raising(OSError("it fails on purpose"))
            with pytest.raises(EnvError):
                trainer.train()
        trainer.train()
    begun = seeds[-8:]  # earlier ones belong to the first look at the environment
    assert len(set(begun)) == 8
