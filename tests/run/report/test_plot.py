from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from aiorl.run.report.loggers import JSONL_FILE
from aiorl.run.report.plot import PLOT_FILE, plot_learning_curve


def write_results(run_dir: Path, means: list[float | None]) -> None:
    lines = []
    for number, mean in enumerate(means, start=1):
        around = {"episode_reward_min": None, "episode_reward_max": None}
        if mean is not None:
            around = {"episode_reward_min": mean - 5, "episode_reward_max": mean + 5}
        lines.append(
            json.dumps(
                {
                    "timesteps_total": number * 100,
                    "time_total_s": number * 0.5,
                    "episode_reward_mean": mean,
                    **around,
                }
            )
        )
    (run_dir / JSONL_FILE).write_text("\n".join(lines) + '\n{"times')


def ink(path: Path) -> np.ndarray:
    """Return which pixels show the curve, bool [H, W]."""
    picture = matplotlib.image.imread(path)[:, :, :3]
    return np.abs(picture - np.array([0x1F, 0x6F, 0x8B]) / 255).sum(axis=2) < 0.05


def test_the_curve_rises_with_the_return(tmp_path: Path) -> None:
    write_results(tmp_path, [None, *[float(mean) for mean in range(50)]])
    path = plot_learning_curve(tmp_path, title="t", stop_return=40.0)
    assert path == tmp_path / PLOT_FILE
    drawn = ink(path)
    assert drawn.shape == (540, 960)
    columns = np.flatnonzero(drawn.any(axis=0))
    # the legend covers the left part; rows count from the top
    middle, end = drawn[:, columns[len(columns) // 2]], drawn[:, columns[-3]]
    assert np.flatnonzero(middle).mean() > np.flatnonzero(end).mean() + 50
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.rest_slow
@pytest.mark.parametrize("means", [[3.0], [3.0, 3.0], [float(n % 7) for n in range(3000)]])
def test_short_flat_and_long_runs_are_drawn(tmp_path: Path, means: list[float | None]) -> None:
    write_results(tmp_path, means)
    path = plot_learning_curve(tmp_path)
    assert path is not None
    assert ink(path).any()


def test_without_an_episode_there_is_no_picture(tmp_path: Path) -> None:
    write_results(tmp_path, [None, None])
    assert plot_learning_curve(tmp_path) is None
    assert not (tmp_path / PLOT_FILE).exists()


@pytest.mark.slow
def test_the_command_of_earlier_versions_draws_too(tmp_path: Path) -> None:
    done = [
        subprocess.run(
            [sys.executable, "-m", module, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        for module in ("aiorl.report.plot", "aiorl.plot")
    ]
    assert [one.returncode for one in done] == [2, 2]
    assert done[0].stderr == done[1].stderr
