from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aiorl.config.command_line import WorkerArgs, parse_worker_args


def test_a_worker_needs_an_address_only() -> None:
    assert parse_worker_args(["--connect", "tcp://host:5557"]) == WorkerArgs(connect="tcp://host:5557")


def test_a_worker_started_by_the_learner_gets_more() -> None:
    line = (
        "--connect tcp://h:1 --num-workers 3 --keys K --log-level debug --max-worker-restarts 0 "
        "--slot 0 --exit-with-parent"
    )
    assert parse_worker_args(line.split()) == WorkerArgs(
        connect="tcp://h:1", num_workers=3, keys=Path("K"), log_level="DEBUG", max_worker_restarts=0,
        slot=0, exit_with_parent=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "--connect tcp://HOST:PORT"),
        (["--connect", "host:1"], "--connect must look like tcp://HOST:PORT"),
        (["--connect", "tcp://h:0"], "needs the learner's port"),
        (["--conect", "tcp://h:1"], "There is no option --conect. Did you mean '--connect'?"),
        (["--connect", "tcp://h:1", "--num-workers", "0"], "--num-workers must be a whole number of at least 1"),
        (["--connect", "tcp://h:1", "--log-level", "loud"], "--log-level must be DEBUG or INFO"),
        (["--connect", "tcp://h:1", "--slot", "x"], "--slot must be"),
    ],
)  # fmt: skip
def test_wrong_usage_of_a_worker_ends_with_status_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_worker_args(argv)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_it_loads_next_to_nothing_as_a_worker_is_waited_for() -> None:
    code = (
        "import sys, aiorl.config.command_line as it\n"
        "it.parse_worker_args(['--connect', 'tcp://h:1'])\n"
        "bad = {'pydantic', 'numpy', 'yaml', 'inspect', 'asyncio', 'rich', 'tyro'} & set(sys.modules)\n"
        "raise SystemExit(f'loaded {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
