"""The benchmark of attacks: what it measures is what it says, and the attackers do what they are for."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from aiorl.transport.zmq_learner import ZmqLearnerEndpoint
from benchmarks import attacks
from benchmarks.attacker import ATTACKS, Attacker


@pytest.mark.parametrize("what", sorted(ATTACKS.keys() - {"metrics"}))  # which needs leases
def test_every_attacker_reaches_the_learner_and_ends_in_time(what: str) -> None:
    async def attack() -> tuple[int, int]:
        endpoint = ZmqLearnerEndpoint("tcp://127.0.0.1:0", insecure=True)
        seen: list[Any] = []
        endpoint.on_event = seen.append
        endpoint.on_message = lambda *message: seen.append(message)
        endpoint.start()
        port = int(endpoint.address.rpartition(":")[2])
        attacker = Attacker(port, None, False, time.monotonic() + 0.3)
        count = await asyncio.wait_for(asyncio.to_thread(ATTACKS[what], attacker), 10)
        while not seen:
            await asyncio.sleep(0.01)
        await endpoint.close()
        return count, len(seen)

    count, seen = asyncio.run(attack())
    assert count > 0
    assert seen > 0


def _round(during: float, after: float) -> attacks._Round:
    return attacks._Round(attacks._Compared(during, 100), attacks._Compared(after, 100))


class Script(attacks._Run):
    def __init__(self, *rounds: attacks._Round) -> None:
        self.rounds = list(rounds)

    def _round(self, kind: str, who: str) -> attacks._Round:
        return self.rounds.pop(0)


def test_what_seems_to_cost_too_much_is_measured_three_times_and_the_median_counts() -> None:
    good, slow, best = _round(90, 98), _round(60, 99), _round(95, 90)
    run = Script(slow, good, best)
    during, after = run.measure("resets", "anyone", "open")
    assert not run.rounds
    assert (during.value, during.ratio, during.ok) == (90, 0.9, True)
    assert (after.value, after.ratio, after.ok) == (98, 0.98, True)
    once = Script(good, slow)
    once.measure("resets", "anyone", "open")
    assert len(once.rounds) == 1


class Learner(attacks._Learner):
    """One whose rate in each turn is said."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)


class Told(attacks._Run):
    def _measured(self, learner: attacks._Learner) -> tuple[float, float]:
        assert isinstance(learner, Learner)
        return learner.rates.pop(0), 1.0

    def _attacked(self, kind: str, who: str) -> tuple[tuple[float, float], dict[str, object]]:
        return self._measured(self._learner), {"what": kind}


def test_what_slows_the_twin_down_too_is_no_harm_of_an_attack() -> None:
    twin = Learner(100, 100, 100, 50, 50, 50, 50)
    found = Told(Learner(80, 80, 48, 40, 10, 41), twin)._round("resets", "anyone")
    assert (found.during.ratio, found.after.ratio) == (pytest.approx(0.8), pytest.approx(1.0)), "one dip is no median"
    harmed = Told(Learner(80, 80, 60, 72, 72, 72), Learner(*[100] * 7))._round("resets", "anyone")
    assert (harmed.during.ratio, harmed.after.ratio) == (pytest.approx(0.75), pytest.approx(0.9))
    assert not harmed.is_good


def test_every_attack_that_is_measured_is_known_and_told_of() -> None:
    measured = {*attacks._ANYONE, *attacks._REGISTERED, *attacks._UNREGISTERED}
    assert measured == ATTACKS.keys()
    assert all(attack.__doc__ for attack in ATTACKS.values())
