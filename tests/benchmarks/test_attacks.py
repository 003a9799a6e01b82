"""The benchmark of attacks: what it measures is what it says, and the attackers do what they are for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aiorl.net.transport.zmq_learner import ZmqLearnerEndpoint
from benchmarks import attacks
from benchmarks.attacker import ATTACKS, Attacker


@pytest.mark.parametrize("what", sorted(ATTACKS.keys() - {"metrics"}))  # which needs leases
def test_every_attacker_reaches_the_learner_and_ends_in_time(what: str) -> None:
    count, seen = attacked(what, for_s=0.3)
    assert count > 0
    assert seen > 0


def test_silence_ends_where_its_connections_alone_took_the_time() -> None:
    count, _ = attacked("silence", for_s=0.0)
    assert count > 0


def attacked(what: str, *, for_s: float) -> tuple[int, int]:
    """How often an attacker did what it does, and how much an endpoint saw of it."""

    async def attack() -> tuple[int, int]:
        endpoint = ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=True)
        seen: list[Any] = []
        endpoint.on_event = seen.append
        endpoint.on_message = lambda *message: seen.append(message)
        endpoint.start()
        port = int(endpoint.address.rpartition(":")[2])
        attacker = Attacker(port, None, False, time.monotonic() + for_s)
        count = await asyncio.wait_for(asyncio.to_thread(ATTACKS[what], attacker), 10)
        while not seen:
            await asyncio.sleep(0.01)
        await endpoint.close()
        return count, len(seen)

    return asyncio.run(attack())


class Told(attacks._Run):
    """A run whose quiet windows are said, those before the first attack first, and what is left during attacks."""

    def __init__(self, *quiet: list[tuple[float, float]], during: Sequence[float] = (90, 90)) -> None:
        self.quiet, self.during = list(quiet), list(during)

    def _quiet(self, pairs: int) -> list[attacks.Window]:
        return [attacks.Window(*each) for each in self.quiet.pop(0)]

    def _attacked(self, kind: str, who: str) -> attacks.Compared:
        return attacks.Compared(self.during.pop(0), 100)


def _ratios(run: Told, *kinds: str) -> list[Any]:
    figures = run.measure([(kind, "anyone") for kind in kinds], "open")
    return [pytest.approx(figure.ratio) for figure in figures]


def test_what_seems_to_cost_too_much_is_done_three_times_and_the_median_counts() -> None:
    fine = [(100.0, 100.0)]
    run = Told(fine, fine, fine, fine, during=(60, 90, 95))
    assert _ratios(run, "resets") == [0.9, 1.0]
    assert not run.during
    run = Told(fine, fine, fine, fine, during=(60, 90, 65))
    figures = run.measure([("resets", "anyone")], "open")
    assert [(figure.name, figure.ok) for figure in figures] == [
        ("attacks/open, anyone: resets, during", False), ("attacks/open, anyone: resets, after", True)
    ]  # fmt: skip


def test_what_slows_the_twin_down_too_is_no_harm_of_an_attack() -> None:
    assert _ratios(Told([(80, 100)], [(40, 50)], [(160, 200)]), "resets")[1] == 1.0


def test_a_core_that_is_slower_shows_in_no_pair_of_windows() -> None:
    slow_first, slow_last = (60.0, 120.0), (120.0, 60.0)
    run = Told([slow_first, slow_last], [slow_last, slow_first], [slow_first, slow_last])
    assert _ratios(run, "resets")[1] == 1.0


def test_harm_that_stays_is_seen_in_all_quiet_windows_behind_the_attack() -> None:
    fine, harmed = (100.0, 100.0), (90.0, 100.0)
    run = Told([fine] * 4, [fine], [harmed], [harmed] * 3, [harmed] * 4)
    assert _ratios(run, "resets", "hellos")[3] == 0.9
    assert not run.quiet, "what seems too low is measured for longer"


def test_a_learner_that_was_stopped_goes_on_also_where_a_measurement_fails(tmp_path: Path) -> None:
    def fail_once_it_is_stopped() -> None:
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        raise RuntimeError("the attacker failed")

    with subprocess.Popen(["sleep", "60"]) as process:
        learner = attacks._Learner(process, 0, tmp_path)
        with pytest.raises(RuntimeError, match="the attacker failed"), learner.stopped():
            fail_once_it_is_stopped()
        assert os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        process.kill()


def test_every_attack_that_is_measured_is_known_and_told_of() -> None:
    measured = {*attacks._ANYONE, *attacks._REGISTERED, *attacks._UNREGISTERED}
    assert measured == ATTACKS.keys()
    assert all(attack.__doc__ for attack in ATTACKS.values())
