from __future__ import annotations

import json

import pytest
from hypothesis import given, strategies as st

from aiorl.errors import InternalError, RemoteProtocolError
from aiorl.net.protocol.ledger import LEARNER_RESTARTED, Ledger


def test_env_steps_go_from_report_to_training() -> None:
    ledger = Ledger()
    ledger.open("a")
    ledger.report("a", 100)
    assert ledger.as_dict() == {
        "sampled": 100,
        "trained": 0,
        "queued": 0,
        "in_flight": 100,
        "discarded": {},
        "lost": {},
    }
    ledger.receive("a", 60)
    ledger.train(30)
    ledger.discard("stale", 10)
    ledger.report("a", 110)
    ledger.check()
    assert ledger.as_dict() == {
        "sampled": 110,
        "trained": 30,
        "queued": 20,
        "in_flight": 50,
        "discarded": {"stale": 10},
        "lost": {},
    }
    assert ledger.close("a", "killed") == 50
    ledger.check()
    assert ledger.lost == {"killed": 50}


def test_old_reports_change_nothing() -> None:
    ledger = Ledger()
    ledger.open("a")
    ledger.report("a", 100)
    ledger.report("a", 50)
    assert ledger.sampled == ledger.in_flight == 100


def test_more_than_was_reported_cannot_arrive() -> None:
    ledger = Ledger()
    ledger.open("a")
    ledger.report("a", 10)
    before = ledger.as_dict()
    with pytest.raises(RemoteProtocolError):
        ledger.receive("a", 11)
    assert ledger.as_dict() == before


def test_a_resumed_ledger_counts_waiting_steps_as_lost() -> None:
    ledger = Ledger()
    ledger.open("a")
    ledger.report("a", 100)
    ledger.receive("a", 60)
    ledger.train(30)
    resumed = Ledger.from_dict(json.loads(json.dumps(ledger.as_dict())))
    assert resumed.as_dict() == {
        "sampled": 100,
        "trained": 30,
        "queued": 0,
        "in_flight": 0,
        "discarded": {},
        "lost": {LEARNER_RESTARTED: 70},
    }


def test_check_finds_a_wrong_sum() -> None:
    ledger = Ledger()
    ledger.trained = 1
    with pytest.raises(InternalError):
        ledger.check()


steps = st.integers(0, 50)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcr"),
            st.sampled_from(["report", "receive", "train", "discard", "close"]),
            steps,
        )
    )
)
def test_the_ledger_balances_after_any_history(history: list[tuple[str, str, int]]) -> None:
    ledger = Ledger()
    totals: dict[str, int] = {}
    for name, action, amount in history:
        if name not in totals:
            ledger.open(name)
            totals[name] = 0
        try:
            if action == "report":
                totals[name] += amount
                ledger.report(name, totals[name])
            elif action == "receive":
                ledger.receive(name, amount)
            elif action == "train":
                ledger.train(min(amount, ledger.queued))
            elif action == "discard":
                ledger.discard("stale", min(amount, ledger.queued))
            else:
                ledger.close(name, "gone")
                del totals[name]
        except RemoteProtocolError:
            pass
        ledger.check()


def test_more_than_leases_allow_cannot_be_in_flight() -> None:
    ledger = Ledger()
    ledger.open("a")
    ledger.report("a", 100, max_in_flight=100)
    ledger.receive("a", 60)
    before = ledger.as_dict()
    with pytest.raises(RemoteProtocolError) as caught:
        ledger.report("a", 161, max_in_flight=100)
    assert caught.value.field == "sampled_total"
    assert ledger.as_dict() == before
    ledger.report("a", 160, max_in_flight=100)
    ledger.report("a", 160, max_in_flight=1)  # nothing new
