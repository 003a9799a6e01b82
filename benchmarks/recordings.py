"""Stored experience for learning results: policies of known quality played with fixed seeds, or a
policy's training.

Each recording is made once. It is a directory of Parquet files in a cache, and one row of
``docs/results/data/NAME.csv``. Observations are stored as the environment gives them, and actions
are drawn from the policy's distribution. The samples of a policy's training are in the directory of
its run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import aiorl
from aiorl.data import columns as c
from aiorl.data.sample_batch import SampleBatch
from aiorl.offline.formats import WriteOptions
from aiorl.offline.readers import EpisodeAssembler, FileReader, ReaderOptions
from aiorl.offline.registry import format_named
from aiorl.process.replaced_file import replaced_directory
from benchmarks.measure import run_command
from benchmarks.rows import read_csv, write_csv

__all__ = [
    "MIXED_CARTPOLE",
    "NUM_FILES",
    "RECORDINGS",
    "DataRow",
    "Player",
    "Recording",
    "default_cache",
    "files_of",
    "read_data_row",
    "recorded",
]

NUM_FILES = 10
"""Number of files per recording, all about the same length."""
_SEED = 100
"""Seed of the policies' training; it differs from those of the runs that learn from the
recordings."""
_PLAY_SEED = 1_000_000
_EPISODES = 100
_THIRD = 1 / 3
_TIMEOUT_S = 6 * 3600.0


@dataclass(frozen=True)
class Player:
    """Policy that is trained to be recorded.

    Attributes:
        preset: preset to train it with.
        env_steps: most env steps to train it on.
        third_of: recording of another policy; training ends once the mean return of 100 episodes is
            a third of that policy's return with the most likely actions.
    """

    preset: str
    env_steps: int
    third_of: str = ""


@dataclass(frozen=True)
class Recording:
    """Recording of one policy.

    Attributes:
        name: name of its files.
        env: environment.
        player: the policy; None draws actions at random.
        rows: minimum of env steps; the last episode is whole.
        of_training: record the policy's training instead of its later play.
    """

    name: str
    env: str
    player: Player | None
    rows: int = 100_000
    of_training: bool = False


_CARTPOLE, _CHEETAH = "CartPole-v1", "HalfCheetah-v5"
RECORDINGS = {
    made.name: made
    for made in (
        Recording("cartpole-random", _CARTPOLE, None),
        Recording("cartpole-expert", _CARTPOLE, Player("ppo-cartpole", 100_000)),
        Recording(
            "cartpole-medium",
            _CARTPOLE,
            Player("ppo-cartpole", 100_000, third_of="cartpole-expert"),
        ),
        Recording(
            "pendulum-replay",
            "Pendulum-v1",
            Player("sac-pendulum", 10_000),
            rows=10_000,
            of_training=True,
        ),
        Recording("halfcheetah-expert", _CHEETAH, Player("ppo-halfcheetah", 1_000_000)),
        Recording(
            "halfcheetah-medium",
            _CHEETAH,
            Player("ppo-halfcheetah", 1_000_000, third_of="halfcheetah-expert"),
        ),
    )
}
MIXED_CARTPOLE = ("cartpole-expert", "cartpole-random")
"""Two recordings that are mixed half and half."""


@dataclass(frozen=True)
class DataRow:
    """Facts about a recording.

    Attributes:
        policy_env_steps: env steps that its policy was trained on; 0 for one that draws at random.
        policy_return: mean return of that policy with the most likely actions, over 100 episodes;
            for a random one, of the recorded episodes.
        rows: env steps.
        episodes: number of whole episodes.
        return_mean: mean return of the episodes.
        return_std: standard deviation of their returns.
        return_min: lowest return.
        return_max: highest return.
        version: version of aiorl.
    """

    policy_env_steps: int
    policy_return: float
    rows: int
    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    version: str


def default_cache() -> Path:
    """Return the default directory of recordings and of the runs behind them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "aiorl" / "results"


def files_of(names: Sequence[str], cache: Path, folder: Path) -> list[str]:
    """Return the files of recordings to learn from, an equal share of each; make missing
    recordings.

    Args:
        names: names of recordings.
        cache: see `recorded`.
        folder: see `recorded`.
    """
    share = NUM_FILES // len(names)
    return [path for name in names for path in recorded(RECORDINGS[name], cache, folder)[:share]]


def recorded(recording: Recording, cache: Path, folder: Path) -> list[str]:
    """Return the files of a recording; train and play its policy first if they are missing.

    Args:
        recording: recording to return.
        cache: directory for the policy's run and the files.
        folder: directory of results; its ``data`` gets the row.

    Raises:
        RuntimeError: training failed.
    """
    if not _files(recording, cache) or read_data_row(recording.name, folder) is None:
        policy, env_steps, earns = None, 0, None
        if recording.player is not None:
            run_dir = _trained(recording, recording.player, cache, folder)
            policy = aiorl.load_policy(run_dir, seed=_PLAY_SEED)
            found = aiorl.evaluate(run_dir, episodes=_EPISODES, seed=_PLAY_SEED)
            env_steps, earns = policy.env_steps, found.mean
        if recording.of_training:
            returns, rows = _look(_files(recording, cache))
        else:
            with replaced_directory(cache / recording.name) as temporary:
                returns, rows = _play(recording, policy, temporary)
        mean = float(np.mean(returns))
        found_row = DataRow(
            policy_env_steps=env_steps,
            policy_return=round(mean if earns is None else earns, 3),
            rows=rows,
            episodes=len(returns),
            return_mean=round(mean, 3),
            return_std=round(float(np.std(returns)), 3),
            return_min=round(min(returns), 3),
            return_max=round(max(returns), 3),
            version=aiorl.__version__,
        )
        write_csv(_row_path(recording.name, folder), [vars(found_row)])
    return _files(recording, cache)


def read_data_row(name: str, folder: Path) -> DataRow | None:
    """Return the facts about a recording; None if it was never made."""
    return next(iter(read_csv(_row_path(name, folder), DataRow)), None)


def _row_path(name: str, folder: Path) -> Path:
    return folder / "data" / f"{name}.csv"


def _run_dir(recording: Recording, cache: Path) -> Path:
    return cache / f"{recording.name}-policy"


def _files(recording: Recording, cache: Path) -> list[str]:
    """Return the existing files of a recording; none if it was never made."""
    if recording.of_training:
        return sorted(map(str, _run_dir(recording, cache).glob("output-*")))
    return sorted(map(str, (cache / recording.name).glob("*")))


def _look(files: list[str]) -> tuple[list[float], int]:
    """Return the returns of the whole episodes in the files, and the number of all rows."""
    reader, episodes = (
        FileReader(files, ReaderOptions(epochs=1, shuffle_files=False)),
        EpisodeAssembler(),
    )
    returns = [
        float(found[c.REWARDS].sum(dtype=np.float64))
        for batch in reader
        for found in episodes.add(batch)
    ]
    return returns, reader.num_rows


def _trained(recording: Recording, player: Player, cache: Path, folder: Path) -> Path:
    """Return the run directory of a policy; train it first if it is missing."""
    run_dir = _run_dir(recording, cache)
    if not run_dir.is_dir():
        options: dict[str, object] = {
            "preset": player.preset,
            "env": recording.env,
            "seed": _SEED,
            "stop-timesteps": player.env_steps,
        }
        if recording.of_training:  # in one process, so that sampling is reproducible
            options |= {"output": "logdir", "num-workers": 0}
        if player.third_of:
            recorded(RECORDINGS[player.third_of], cache, folder)
            best = read_data_row(player.third_of, folder)
            assert best is not None
            options["stop-return"] = best.policy_return * _THIRD
        with replaced_directory(run_dir) as temporary:
            words = [
                f"--{name}={value}" for name, value in {**options, "run-dir": temporary}.items()
            ]
            run_command([sys.executable, "-m", "aiorl.learner", *words], timeout_s=_TIMEOUT_S)
    return run_dir


def _play(
    recording: Recording, policy: aiorl.LoadedPolicy | None, directory: Path
) -> tuple[list[float], int]:
    """Play whole episodes into files; return their returns and the number of rows."""
    env: Any = gymnasium.make(recording.env)  # Any: the spaces are arbitrary
    env.action_space.seed(_PLAY_SEED)
    returns: list[float] = []
    rows = 0
    for number in range(NUM_FILES):
        with format_named("parquet").create(
            str(directory / f"part-{number}.parquet"), WriteOptions()
        ) as file:
            while rows < recording.rows * (number + 1) / NUM_FILES:
                episode = _episode(env, policy, len(returns))
                file.write(episode)
                returns.append(float(episode[c.REWARDS].sum(dtype=np.float64)))
                rows += episode.count
    env.close()
    return returns, rows


def _episode(env: Any, policy: aiorl.LoadedPolicy | None, number: int) -> SampleBatch:
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            c.OBS,
            c.ACTIONS,
            c.ACTION_LOGP,
            c.REWARDS,
            c.NEW_OBS,
            c.TERMINATEDS,
            c.TRUNCATEDS,
        )
    }
    obs, _ = env.reset(seed=_PLAY_SEED + number)
    is_over = False
    while not is_over:
        if policy is None:
            action, logp = env.action_space.sample(), -np.log(env.action_space.n)
        else:
            action, _, beside = policy.compute_single_action(obs, explore=True, full_fetch=True)
            logp = beside[c.ACTION_LOGP]
        new_obs, reward, terminated, truncated, _ = env.step(action)
        step = (obs, action, logp, reward, new_obs, terminated, truncated)
        for column, value in zip(columns.values(), step, strict=True):
            column.append(value)
        obs, is_over = new_obs, terminated or truncated
    batch = SampleBatch({name: np.array(values) for name, values in columns.items()})
    for name in (c.OBS, c.NEW_OBS, c.REWARDS, c.ACTION_LOGP):
        batch[name] = batch[name].astype(np.float32)
    batch[c.DONES] = batch[c.TERMINATEDS] | batch[c.TRUNCATEDS]
    batch[c.EPS_ID] = np.full(batch.count, number)
    batch[c.T] = np.arange(batch.count, dtype=np.int32)
    return batch
