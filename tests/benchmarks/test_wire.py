"""The wire benchmark measures what it says, in small."""

from __future__ import annotations

from benchmarks import wire


def test_fragments_have_the_size_they_are_named_after_and_do_not_shrink():
    from aiorl.net.wire.encoding import encode

    for num_bytes in (wire.SMALL_BYTES, wire.LARGE_BYTES):
        samples = wire.make_samples(num_bytes)
        columns = samples.batches["default_policy"]
        assert len(columns) == wire.NUM_COLUMNS
        assert sum(column.nbytes for column in columns.values()) == num_bytes
        assert sum(memoryview(frame).nbytes for frame in encode(samples)) >= num_bytes


def test_both_figures_come_out_of_real_processes(monkeypatch):
    monkeypatch.setattr(wire, "ROUNDS", 1)
    monkeypatch.setattr(wire, "LARGE_BURST", 20)
    monkeypatch.setattr(wire, "SMALL_BURST", 3000)
    (large,), (small,) = wire.wire_large_fragments(), wire.wire_small_fragments()
    assert large.unit == "MB/s"
    assert large.baseline is not None
    assert large.value > 10
    assert small.value > 100
