"""The checksum of TensorBoard's records, against TensorBoard's own."""

from __future__ import annotations

import numpy as np
import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as plain

from aiorl.run.report.crc32c import crc32c


def test_it_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of RFC 3720


@pytest.mark.parametrize("length", [4, 5, 8, 255, 256, 257, 259, 260, 512, 4099])
def test_it_is_that_of_the_plain_loop_over_bytes(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    assert crc32c(data) == plain(data)
    assert crc32c(bytes(length)) == plain(bytes(length))
