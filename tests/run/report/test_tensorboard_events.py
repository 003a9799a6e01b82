from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto import event_pb2

from aiorl.run.report.loggers import TensorBoardLogger
from aiorl.run.report.tensorboard_events import EventFile


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(directory: Path) -> list[Any]:
    """The events of the only event file, by the format's own description."""
    (path,) = directory.glob("events.out.tfevents.*")
    data, events = path.read_bytes(), []
    while data:
        header, (length, check) = data[:8], struct.unpack("<QI", data[:12])
        body, (body_check,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        assert (check, body_check) == (masked(header), masked(body))
        events.append(event_pb2.Event.FromString(body))
        data = data[16 + length :]
    return events


def test_scalars_are_written_over_env_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.write(
        {"timesteps_total": 4096, "timestamp": 12.5, "episode_reward_mean": math.nan, "learner": {"kl": 0.25},
         "name": "x", "flag": True, "hist": [1.0]}
    )  # fmt: skip
    logger.close()
    version, event = read_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (event.step, event.wall_time) == (4096, 12.5)
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert set(values) == {"timesteps_total", "episode_reward_mean", "learner/kl"}
    assert values["learner/kl"] == 0.25
    assert math.isnan(values["episode_reward_mean"])


def test_a_resumed_run_tells_tensorboard_to_forget_later_points(tmp_path: Path) -> None:
    EventFile(tmp_path, resume_after_step=500).close()
    _, start = read_events(tmp_path)
    assert start.session_log.status == event_pb2.SessionLog.START
    assert start.step == 501


def test_no_tensorflow_is_loaded_for_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "import aiorl.run.report.console, aiorl.run.report.plot, aiorl.run.report.results, aiorl.run.report.system\n"
        "from aiorl.run.report.loggers import open_loggers\n"
        f"open_loggers(pathlib.Path({str(tmp_path)!r})).write({{'training_iteration': 1, 'timesteps_total': 3}})\n"
        "bad = {'tensorflow', 'keras', 'matplotlib'} & set(sys.modules)\n"
        "raise SystemExit(f'loaded {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(read_events(tmp_path)) == 2


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EventFile(tmp_path / "gone")
