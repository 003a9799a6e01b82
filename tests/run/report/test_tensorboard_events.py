from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from aiorl.run.report.loggers import TensorBoardLogger

tf = pytest.importorskip("tensorflow")


def read_events(directory: Path) -> list[Any]:
    """Return the events of the only event file."""
    (path,) = directory.glob("events.out.tfevents.*")
    return [
        tf.compat.v1.Event.FromString(record.numpy())
        for record in tf.data.TFRecordDataset(str(path))
    ]


def test_scalars_are_written_over_env_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.write(
        {
            "timesteps_total": 4096,
            "timestamp": 12.5,
            "episode_reward_mean": math.nan,
            "learner": {"kl": 0.25},
            "name": "x",
            "flag": True,
            "hist": [1.0],
        }
    )
    logger.close()
    version, event = read_events(tmp_path)
    assert version.file_version.startswith("brain.Event:")
    assert (event.step, event.wall_time) == (4096, 12.5)
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert set(values) == {"timesteps_total", "episode_reward_mean", "learner/kl"}
    assert values["learner/kl"] == 0.25
    assert math.isnan(values["episode_reward_mean"])


def test_a_resumed_run_makes_tensorboard_drop_later_points(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, resume_after_step=500)
    logger.write({"timesteps_total": 600, "loss": 1.0})
    logger.close()
    _, start, point = read_events(tmp_path)
    assert start.session_log.status == tf.compat.v1.SessionLog.START
    assert (start.step, point.step) == (501, 600)


def test_a_file_that_cannot_be_written_is_an_error_and_retried(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    logger = TensorBoardLogger(tmp_path / "file")
    with pytest.raises(OSError, match="Not a directory"):
        logger.write({"timesteps_total": 1})
    (tmp_path / "file").unlink()
    (tmp_path / "file").mkdir()
    logger.write({"timesteps_total": 2, "loss": 1.0})
    logger.close()
    assert read_events(tmp_path / "file")[-1].step == 2
