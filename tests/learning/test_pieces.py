"""Stored experience that is read over and over is stored once."""

from __future__ import annotations

import numpy as np
import pytest

from aiorl.data import columns as c
from aiorl.errors import BatchError
from aiorl.learning import drawn_batches as module
from aiorl.learning.drawn_batches import Pieces


def fragment(*numbers: int) -> dict[str, np.ndarray]:
    column = np.array(numbers, np.int64)[:, None]
    return {c.PIECE: column, c.ACTIONS: np.zeros_like(column)}


def test_pieces_that_are_read_again_are_known() -> None:
    pieces = Pieces()
    first = fragment(7, 7, 8)
    assert pieces.new_rows(first, is_whole=True) is first
    found = pieces.new_rows(fragment(8, 9, 9), is_whole=True)
    assert found is not None
    assert found[c.VALID][:, 0].tolist() == [False, True, True]
    assert pieces.new_rows(fragment(9, 7, 8), is_whole=True) is None
    assert pieces.numbers == (7, 8, 9)


def test_padding_rows_stay_padding() -> None:
    pieces = Pieces()
    pieces.new_rows(fragment(1), is_whole=True)
    given = {**fragment(1, 2, 2), c.VALID: np.array([[True], [False], [True]])}
    found = pieces.new_rows(given, is_whole=True)
    assert found is not None
    assert found[c.VALID][:, 0].tolist() == [False, False, True]


def test_pieces_are_known_by_their_transitions_alone() -> None:
    """Otherwise fragments that store nothing, and so never evict rows, could fill the memory."""
    pieces = Pieces()
    nothing = {**fragment(1, 2, 3), c.VALID: np.array([[False], [True], [False]])}
    assert pieces.new_rows(nothing, is_whole=True) is nothing
    assert pieces.numbers == (2,)


def test_so_many_pieces_are_known_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_KNOWN", 3)
    pieces, beyond = Pieces(), fragment(3, 4)
    pieces.new_rows(fragment(1, 2), is_whole=True)
    for _ in range(2):
        assert pieces.new_rows(beyond, is_whole=True) is beyond
    assert pieces.new_rows(fragment(1, 2), is_whole=True) is None
    assert pieces.numbers == (1, 2)


def test_rows_without_a_piece_are_new_each_time() -> None:
    pieces, sampled = Pieces(), fragment(0, 0)
    for _ in range(2):
        assert pieces.new_rows(sampled, is_whole=True) is sampled
    bare = {c.ACTIONS: np.zeros((2, 1))}
    assert pieces.new_rows(bare, is_whole=True) is bare


def test_everything_is_new_once_old_rows_were_evicted() -> None:
    pieces, again = Pieces(), fragment(1)
    pieces.new_rows(again, is_whole=True)
    for _ in range(2):
        assert pieces.new_rows(again, is_whole=False) is again
    assert pieces.numbers == ()


@pytest.mark.parametrize("column", [np.zeros((3, 1), np.int32), np.zeros((2, 1), np.int64)])
def test_numbers_that_do_not_fit_are_refused(column: np.ndarray) -> None:
    with pytest.raises(BatchError, match="piece"):
        Pieces.check({c.ACTIONS: np.zeros((3, 1)), c.PIECE: column})
