from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aiorl.data import sample_batch as packed
from aiorl.data.sample_batch import PackedBulk, PackedRows

arrays = hnp.arrays(
    st.sampled_from([np.uint8, np.float32, np.int64, np.bool_]), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0)
)


@settings(deadline=None)
@given(array=arrays, kind=st.sampled_from([PackedRows, PackedBulk]))
def test_r65_decompression_restores_equal_arrays(array, kind):
    column = kind.pack(array)
    assert len(column) == len(array)
    back = column.unpack()
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@settings(deadline=None)
@given(array=arrays, data=st.data())
def test_rows_are_picked_and_joined_as_they_are(array, data):
    column = PackedRows.pack(array)
    mask = data.draw(hnp.arrays(np.bool_, len(array)))
    for index in (slice(1, 3), mask, np.flatnonzero(mask)[::-1]):
        np.testing.assert_array_equal(column.take(index).unpack(), array[index])
    joined = PackedRows.concat([column, column.take(slice(0, 1))])
    np.testing.assert_array_equal(joined.unpack(), np.concatenate([array, array[:1]]))


def test_large_columns_are_packed_in_blocks(monkeypatch):
    monkeypatch.setattr(packed, "_BLOCK_BYTES", 100)
    array = np.arange(99, dtype=np.int32).reshape(33, 3)
    column = PackedBulk.pack(array.swapaxes(0, 1))
    assert len(column.blobs) == 4
    np.testing.assert_array_equal(column.unpack(), array.T)


def test_similar_rows_shrink_and_the_whole_column_shrinks_more():
    frame = np.random.default_rng(0).integers(0, 3, (1, 20, 20), np.uint8)
    stack = np.repeat(frame, 8, axis=0)
    rows, bulk = PackedRows.pack(stack), PackedBulk.pack(stack)
    assert bulk.nbytes < rows.nbytes < stack.nbytes


@pytest.mark.parametrize("other", [np.zeros((2, 3), np.uint8), np.zeros((2, 4), np.float32)])
def test_columns_of_another_kind_do_not_fit(other):
    column = PackedRows.pack(np.zeros((2, 3), np.float32))
    assert column.fits(column)
    assert not column.fits(PackedRows.pack(other))
    assert not column.fits(PackedBulk.pack(np.zeros((2, 3), np.float32)))
