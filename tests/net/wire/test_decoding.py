"""What only a peer that is up to no good sends."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from aiorl.errors import BadFrame
from aiorl.net.wire import messages as m
from aiorl.net.wire.decoding import decode, peek_counts
from aiorl.net.wire.encoding import encode

NESTED = b"\x91" * 1000 + b"\xc0"
"""Lists within lists, as deep as msgpack takes them: deeper than Python recurses."""


@pytest.mark.parametrize("place", ["scalars", "extent", "node", "key", "parent", "dtype"])
def test_what_is_nested_without_end_is_refused_in_a_short_sentence(place):
    snapshot = m.Snapshot(0, {"p": {"w": np.zeros(2)}}, {}, {}, {}, "L")
    header, *frames = (bytes(frame) for frame in encode(snapshot))
    version, name, scalars, layout, storage, shapes = msgpack.unpackb(header)
    nodes, columns = msgpack.unpackb(layout)
    hole = "hole"
    match place:
        case "scalars":
            scalars["version"] = hole
        case "extent":
            shapes[0][0] = hole
        case "node":
            columns[0][0] = hole
        case "key":
            columns[0][1] = [hole]
        case "parent":
            nodes[0][0] = hole
        case "dtype":
            columns[0][2] = hole
    filled = msgpack.packb([nodes, columns]).replace(msgpack.packb(hole), NESTED)
    header = msgpack.packb([version, name, scalars, filled, storage, shapes]).replace(msgpack.packb(hole), NESTED)
    with pytest.raises(BadFrame) as caught:
        decode([header, *frames])
    assert len(str(caught.value)) < 300


def test_a_count_nested_without_end_is_refused_before_the_rest_is_read():
    version, _, _, layout, storage, shapes = msgpack.unpackb(encode(m.Snapshot(0, {}, {}, {}, {}))[0])
    header = msgpack.packb([version, "samples", {"seq": "hole"}, layout, storage, shapes])
    with pytest.raises(BadFrame, match="seq"):
        peek_counts(header.replace(msgpack.packb("hole"), NESTED))
