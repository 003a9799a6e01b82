from __future__ import annotations

import json
import logging
import sys

import gymnasium
import numpy as np
import pytest

from aiorl.env.wrapping import STATS_FILE, monitor_env
from aiorl.testing.envs import CountingEnv


class Filmed(CountingEnv):
    render_mode = "rgb_array"
    metadata = {"render_fps": 10}

    def render(self):
        return np.full((64, 64, 3), 40 * self._step, np.uint8)


def play(env: gymnasium.Env, episodes: int) -> None:
    for _ in range(episodes):
        env.reset()
        while not any(env.step(0)[2:4]):
            pass


def lines(folder) -> list:
    return [json.loads(line) for line in (folder / STATS_FILE).read_text().splitlines()]


def test_each_episode_leaves_a_line_at_once_and_a_second_run_appends(tmp_path, caplog):
    folder = tmp_path / "deep" / "worker-1-env-0"
    with caplog.at_level(logging.INFO):
        env = monitor_env(CountingEnv(3), folder)
    assert "no videos" in caplog.text
    play(env, 2)
    assert [(line["length"], line["reward"]) for line in lines(folder)] == [(3, 6.0), (3, 6.0)]
    assert all(line["seconds"] >= 0 and line["ended_at"] > 1e9 for line in lines(folder))
    env.close()
    env = monitor_env(CountingEnv(2, "truncate"), folder)
    play(env, 1)
    env.close()
    assert [line["length"] for line in lines(folder)] == [3, 3, 2]


def test_without_moviepy_statistics_are_still_written_and_the_log_says_what_to_install(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    env = monitor_env(Filmed(2), tmp_path)
    assert "[video]" in caplog.text
    play(env, 1)
    assert len(lines(tmp_path)) == 1
    env.close()


def test_videos_are_made_where_images_are_rendered_in_a_folder_for_each_start(tmp_path):
    pytest.importorskip("moviepy")
    for run in (1, 2):
        env = monitor_env(Filmed(4), tmp_path)
        play(env, 2)
        env.close()
        videos = sorted(path.name for path in (tmp_path / f"videos-{run}").iterdir())
        assert videos == ["video-episode-0.mp4", "video-episode-1.mp4"]
    assert len(lines(tmp_path)) == 4
