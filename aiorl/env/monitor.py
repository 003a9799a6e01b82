"""The monitor: a line of statistics per episode, and videos of some of them, by Gymnasium's own recorders.

A folder may be used again: statistics are appended, and each start makes its own folder of videos.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo

from aiorl.process.imports import install_command

__all__ = ["STATS_FILE", "StatsFile", "monitor_env"]

STATS_FILE = "episodes.jsonl"
logger = logging.getLogger(__name__)


def monitor_env(env: gymnasium.Env[Any, Any], folder: Path) -> gymnasium.Env[Any, Any]:
    """An environment whose episodes are recorded in a folder.

    Videos are made where the environment renders images (``render_mode: rgb_array``) and moviepy is installed
    (extra ``video``): of episodes 0, 1, 8, 27 and so on, then of every thousandth.

    Args:
        env: the environment, with the wrappers that the policy sees.
        folder: made if it is not there; nobody else writes to it meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if env.render_mode not in ("rgb_array", "rgb_array_list"):
        logger.info("%s: no videos, since its render_mode is %s, not rgb_array", env, env.render_mode)
    else:
        # A folder for each start: Gymnasium warns of folders that exist, for it numbers from 0 again.
        taken = [int(found.name.split("-")[1]) for found in folder.glob("videos-*")]
        try:
            env = RecordVideo(env, str(folder / f"videos-{max(taken, default=0) + 1}"), name_prefix="video")
        except gymnasium.error.DependencyNotInstalled:
            logger.warning("no videos are recorded: moviepy is missing; %s", install_command("video"))
    return StatsFile(RecordEpisodeStatistics(env), folder / STATS_FILE)


class StatsFile(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Appends one JSON object per finished episode: reward, length, seconds, and the time it ended."""

    def __init__(self, env: RecordEpisodeStatistics[Any, Any], path: Path) -> None:
        """Write to a file that may exist already."""
        super().__init__(env)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and note an episode's end."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            episode = info["episode"]
            line = {
                "reward": float(episode["r"]),
                "length": int(episode["l"]),
                "seconds": float(episode["t"]),
                "ended_at": time.time(),
            }
            self._file.write(json.dumps(line) + "\n")
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the environment and the file."""
        super().close()
        self._file.close()
