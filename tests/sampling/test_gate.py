from __future__ import annotations

import threading

import pytest

from aiorl.sampling.gate import TurnGate


def test_a_pause_waits_for_the_turn_and_the_next_turn_for_the_pause():
    gate, tape = TurnGate(), []
    inside, leave, paused, go_on = (threading.Event() for _ in range(4))

    def turns():
        with gate:
            tape.append("first turn")
            inside.set()
            leave.wait(5)
            tape.append("first turn over")
        with gate:
            tape.append("second turn")

    def pause():
        with gate.pause():
            tape.append("pause")
            paused.set()
            go_on.wait(5)
            tape.append("pause over")

    one = threading.Thread(target=turns)
    one.start()
    inside.wait(5)
    other = threading.Thread(target=pause)
    other.start()
    assert not paused.wait(0.05), "a pause does not begin inside a turn"
    leave.set()
    assert paused.wait(5)
    assert "second turn" not in tape
    go_on.set()
    one.join(5), other.join(5)
    assert tape == ["first turn", "first turn over", "pause", "pause over", "second turn"]


def test_pauses_do_not_exclude_each_other():
    gate = TurnGate()
    with gate.pause(), gate.pause():
        pass
    with gate:
        pass


def test_a_pause_asked_for_in_the_middle_of_a_turn_waits_for_nothing():
    """A callback sets weights: its own turn is not to be waited for, and others are where they were."""
    gate, begun = TurnGate(), threading.Event()

    def pause():
        with gate.pause():
            begun.set()

    other = threading.Thread(target=pause)
    with gate:
        with gate.pause(), gate.pause():
            pass
        other.start()
        assert not begun.wait(0.05), "the turn still goes on"
    assert begun.wait(5)
    other.join(5)


def test_who_pauses_may_take_turns_itself_and_others_wait():
    gate, entered = TurnGate(), threading.Event()

    def turn():
        with gate:
            entered.set()

    other = threading.Thread(target=turn)
    with gate.pause():
        with gate:
            pass
        other.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)
    other.join(5)


def test_giving_up_the_wait_for_a_pause_holds_nobody_up(monkeypatch):
    """Ctrl-C while a turn is waited for."""
    gate, entered = TurnGate(), threading.Event()

    def interrupted():
        raise KeyboardInterrupt

    def turn():
        with gate:
            entered.set()

    held = threading.Thread(target=gate.__enter__)
    held.start(), held.join(5)
    monkeypatch.setattr(gate._condition, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), gate.pause():
        pass
    gate.__exit__()
    other = threading.Thread(target=turn, daemon=True)
    other.start()
    assert entered.wait(5)
