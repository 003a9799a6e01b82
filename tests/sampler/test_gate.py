from __future__ import annotations

import threading

from aiorl.sampler.gate import TurnGate


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
