"""A background thread writes all results, in order and unchanged."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from aiorl.run.report.loggers import BackgroundLogger


class Slow:
    """Logger that writes when it is released, and notes the threads."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.written: list[Any] = []
        self.threads: set[int] = set()
        self.is_closed = False

    def write(self, result: Mapping[str, Any]) -> None:
        self.may.wait(10)
        self.threads.add(threading.get_ident())
        self.written.append(result)

    def close(self) -> None:
        self.is_closed = True


def test_a_queued_result_is_written_as_it_was_and_flush_waits_for_all() -> None:
    slow = Slow()
    logger = BackgroundLogger(slow)
    result = {"a": 1, "inner": {"b": 2}, "list": [1, 2]}
    logger.write(result)
    result["a"], result["inner"]["b"] = 9, 9  # type: ignore[index]
    result["list"].append(3)  # type: ignore[attr-defined]
    logger.write({"a": 2})
    assert slow.written == []
    slow.may.set()
    logger.flush()
    assert slow.written == [{"a": 1, "inner": {"b": 2}, "list": [1, 2]}, {"a": 2}]
    assert threading.get_ident() not in slow.threads
    logger.close()
    assert slow.is_closed
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("aiorl-results")
    ]


def test_closing_writes_the_queue_and_without_results_there_is_no_thread() -> None:
    slow = Slow()
    slow.may.set()
    logger = BackgroundLogger(slow)
    for number in range(200):  # more than the queue holds
        logger.write({"n": number})
    logger.close()
    assert [result["n"] for result in slow.written] == list(range(200))
    before = threading.active_count()
    BackgroundLogger(Slow()).close()
    assert threading.active_count() == before


def test_the_next_call_raises_the_loggers_error() -> None:
    logger = BackgroundLogger(
        SimpleNamespace(write=lambda result: 1 / result["n"], close=lambda: None)
    )
    logger.write({"n": 0})
    with pytest.raises(ArithmeticError):
        logger.flush()
    logger.write({"n": 1})
    logger.close()
