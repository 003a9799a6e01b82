"""What runs of a program log, and that its own logging is as it was afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from aiorl.acting.run_dir import RunDirectory
from aiorl.learning.algorithms.ppo import PPOConfig
from aiorl.run.report.log_files import RunLog

logger = logging.getLogger("aiorl.test")


def run_log(folder: Path, **settings: object) -> RunLog:
    config = PPOConfig(env="CartPole-v1", num_workers=1, run_dir=str(folder), **settings)
    with RunDirectory.open(config) as directory:
        return RunLog(directory, config)


def text(folder: Path) -> str:
    return (folder / "log.txt").read_text()


@pytest.mark.parametrize("own", [logging.NOTSET, logging.ERROR])
def test_each_log_has_what_its_level_says_and_the_programs_own_level_is_back_in_the_end(
    tmp_path: Path, own: int
) -> None:
    logging.getLogger("aiorl").setLevel(own)
    try:
        quiet, loud = run_log(tmp_path / "quiet", log_level="ERROR"), run_log(tmp_path / "loud", log_level="INFO")
        logger.info("one")
        loud.close()
        logger.info("two")
        logger.error("three")
        quiet.close()
        quiet.close()
        assert logging.getLogger("aiorl").level == own
    finally:
        logging.getLogger("aiorl").setLevel(logging.NOTSET)
    assert ("one" in text(tmp_path / "loud"), "two" in text(tmp_path / "loud")) == (True, False)
    assert "one" not in text(tmp_path / "quiet")
    assert "three" in text(tmp_path / "quiet")


def test_logs_are_kept_small_while_the_run_goes_on(tmp_path: Path) -> None:
    log = run_log(tmp_path, log_max_bytes=1 << 16)
    of_worker = tmp_path / "logs" / "worker-1.txt"
    of_worker.write_text("x" * 70_000)
    logger.info("%s", "y" * 70_000)
    aside = [path.with_name(f"{path.name}.1") for path in (of_worker, tmp_path / "log.txt")]
    while not all(path.exists() for path in aside):
        pass
    log.close()
    of_worker.write_text("x" * 70_000)
    assert of_worker.stat().st_size == 70_000
