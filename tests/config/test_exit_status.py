"""How the programs end: one sentence and a status."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiorl.config.command_line import exit_status
from aiorl.errors import CheckpointError, ConfigError, UnknownPolicyError


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (None, 0, ""),
        (ConfigError("it can't be.", hint="Do that."), 2, "aiorl: it can't be. Do that.\n"),
        (UnknownPolicyError("left", ["right"]), 2, "unknown policy id 'left'"),
        (CheckpointError(Path("there"), "is damaged"), 1, "is damaged"),
        (ImportError("no TensorFlow"), 1, "aiorl: no TensorFlow\n"),
        (OSError("disk full\nor so"), 1, "disk full"),
        (KeyboardInterrupt(), 130, "ended by Ctrl-C"),
    ],
)
def test_what_goes_wrong_costs_one_sentence_and_says_by_its_status_whose_fault_it_is(
    error: BaseException | None, status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def do() -> None:
        if error is not None:
            raise error

    assert exit_status(do) == status
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.count("\n") == (status > 0)


def test_a_command_may_have_a_status_of_its_own() -> None:
    assert [exit_status(lambda given=given: given) for given in (None, 0, 1)] == [0, 0, 1]  # type: ignore[misc]


def test_a_fault_of_ours_is_not_taken_for_one_of_the_users() -> None:
    def do() -> None:
        raise AssertionError("ours")

    with pytest.raises(AssertionError):
        exit_status(do)
