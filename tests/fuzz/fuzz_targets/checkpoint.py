"""A damaged checkpoint next to an undamaged one: one of them is used, and a run's state is read or
refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from safetensors.numpy import save as save_tensors

from aiorl.acting.checkpoint import FORMAT_VERSION, load_newest_valid, save_checkpoint
from aiorl.errors import CheckpointError
from aiorl.net.protocol.ledger import Ledger
from aiorl.run.counters import Counters
from aiorl.run.report.results import Results
from aiorl.run.restoring import RunState
from fuzz_targets.folder import Rewritten, make_folder
from fuzz_targets.source import Source, as_json, edit

FOLDER = make_folder()
DAMAGED = FOLDER / "checkpoint-000002"
DAMAGED.mkdir()
META_FILE, TENSORS_FILE = (
    Rewritten(DAMAGED / "meta.json"),
    Rewritten(DAMAGED / "tensors.safetensors"),
)
TENSORS = save_tensors(
    {"algorithm/weights/w": np.zeros((2, 3), np.float32), "filter/p/n": np.ones(1)}
)
META: dict[str, Any] = {
    "run_id": "run",
    "algo": "ppo",
    "env": "CartPole-v1",
    "algorithm": {"num_updates": 3},
    **dataclasses.asdict(RunState(Counters(), Results(5, 0.0).to_state(), Ledger().as_dict())),
}
(DAMAGED / "pieces").mkdir()
PIECE_FILE = save_tensors({"rows": np.zeros((2, 3), np.uint8)})
(DAMAGED / "pieces" / "000000.safetensors").write_bytes(PIECE_FILE)
PIECE = (
    "p",
    "rows",
    0,
    "000000.safetensors",
    len(PIECE_FILE),
    hashlib.sha256(PIECE_FILE).hexdigest(),
)
save_checkpoint(FOLDER, 1, {"w": np.zeros(3, np.float32)}, META)


def seeds() -> Iterable[bytes]:
    header = json.dumps(header_of(META, TENSORS)).encode()
    yield b"\0" + len(header).to_bytes(2, "little") + header + TENSORS
    meta = json.dumps(META).encode()
    yield b"\1" + len(meta).to_bytes(2, "little") + meta + TENSORS
    yield b"\1" + len(b"{}").to_bytes(2, "little") + b"{}" + TENSORS
    yield bytes([3, 8, 0, 0, 7])  # one piece
    for number in range(12):
        yield bytes([3, number, number, 3, number, 2, number, 5])
    for number in range(len(META)):
        for value in range(10):
            yield bytes([2, number, value, 1, value, 3, 4, 5, 6])


def run(data: bytes) -> None:
    source = Source(data)
    match source.below(4):
        case 0:
            header = source.take(int.from_bytes(source.take(2), "little"))
            tensors = source.rest()
        case 1:  # arbitrary contents, correct digests
            content = source.take(int.from_bytes(source.take(2), "little"))
            tensors = source.rest()
            try:
                header = json.dumps(header_of(json.loads(content), tensors)).encode()
            except (ValueError, RecursionError):
                return
        case 3:  # almost correct descriptions of the files
            header_now, tensors = header_of(json.loads(json.dumps(META)), TENSORS), TENSORS
            header_now["pieces"] = [list(PIECE), list(PIECE)]
            try:
                while not source.is_empty:
                    edit(header_now, source)
                header = json.dumps(as_json(header_now)).encode()
            except (ValueError, RecursionError):
                return
        case _:  # almost correct contents
            meta, tensors = json.loads(json.dumps(META)), TENSORS
            try:
                while not source.is_empty:
                    edit(meta, source)
                header = json.dumps(header_of(as_json(meta), tensors)).encode()
            except (ValueError, RecursionError):
                return
    META_FILE.write(header)
    TENSORS_FILE.write(tensors)
    found = load_newest_valid(FOLDER)
    assert found.number in (1, 2)
    with contextlib.suppress(CheckpointError):
        found.check_pieces()
        assert len(list(found.pieces_of("p"))) <= 1
    with contextlib.suppress(CheckpointError):
        RunState.from_meta(found)


def header_of(meta: Any, tensors: bytes) -> dict[str, Any]:
    """Return the contents of meta.json of checkpoint 2 without damage."""
    return {
        "format_version": FORMAT_VERSION,
        "number": 2,
        "tensors_bytes": len(tensors),
        "tensors_sha256": hashlib.sha256(tensors).hexdigest(),
        "meta": meta,
        "meta_sha256": hashlib.sha256(
            json.dumps(meta, sort_keys=True, allow_nan=False).encode()
        ).hexdigest(),
    }
