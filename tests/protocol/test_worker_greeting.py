from __future__ import annotations

from aiorl.protocol.worker_greeting import Greeting
from aiorl.protocol.worker_settings import WorkerSettings

SETTINGS = WorkerSettings("w", hello_backoff_s=(0.5, 3.0))


def hellos(greeting: Greeting, until: float) -> list[float]:
    """When Hello is said, looking every 0.5 s."""
    said = []
    for half in range(int(2 * until)):
        if greeting.is_due(half / 2):
            greeting.said(half / 2, SETTINGS)
            said.append(half / 2)
    return said


def test_hellos_come_ever_more_rarely_over_a_connection_only() -> None:
    greeting = Greeting(SETTINGS)
    assert hellos(greeting, 5.0) == []
    greeting.is_linked = True
    greeting.begin(0.0, SETTINGS)
    assert hellos(greeting, 15.0) == [0.0, 0.5, 1.5, 3.5, 6.5, 9.5, 12.5]
    greeting.begin(15.0, SETTINGS)
    assert greeting.is_due(15.0)
    greeting.end()
    assert not greeting.is_due(100.0)


def test_a_sign_of_life_hurries_it_but_not_within_a_quarter_second() -> None:
    greeting = Greeting(SETTINGS)
    greeting.is_linked = True
    for now in (0.0, 1.0, 2.0):
        greeting.said(now, SETTINGS)
    greeting.hurry(2.2)
    assert not greeting.is_due(2.2)
    greeting.hurry(2.25)
    assert greeting.is_due(2.25)
    greeting.put_off(2.25)
    assert not greeting.is_due(5.0)
    assert greeting.is_due(5.25)


def test_what_it_waits_for_is_told_in_plain_words() -> None:
    greeting = Greeting(SETTINGS)
    assert greeting.text(None) == "cannot reach the learner: no connection yet; trying again"
    greeting.is_linked = True
    assert greeting.text(None) == "waiting for the learner to answer; trying again every 0.5 s"
    greeting.is_learner_unready = True
    assert "to get ready" in greeting.text(None)
    greeting.refusal = "all 4 slots are taken"
    assert "the learner says: all 4 slots are taken" in greeting.text(None)
    assert "silent for 12 s" in greeting.text(12.3)
    greeting.end()
    assert (greeting.refusal, greeting.is_learner_unready) == ("", False)
