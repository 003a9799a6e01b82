from __future__ import annotations

from aiorl.protocol.learner_outbox import BROADCAST, Outbox
from aiorl.protocol.roster import Roster
from aiorl.wire import messages as m


def test_messages_keep_their_order_and_each_worker_gets_one_acknowledgement_at_the_end() -> None:
    outbox, roster = Outbox(), Roster(9)
    one, other, gone = (
        roster.add(slot, m.Hello(m.PROTOCOL_VERSION, "", f"w{slot}", f"i{slot}", 0, "", 0, ""), b"%d" % slot, None, 0.0)
        for slot in (1, 2, 3)
    )
    one.last_seq, gone.last_seq = 5, 6
    for worker in (one, other, one, gone):
        outbox.ack(worker)
    outbox.forget_ack(other)
    roster.unbind(gone)
    beat, bye = m.LearnerBeat("l", 1), m.Bye("over", True)
    outbox.to_worker(one, beat)
    outbox.to_worker(gone, beat)
    outbox.to_all(bye)
    outbox.to_peer(b"stranger", bye)
    assert outbox.take_messages() == [(b"1", beat), (BROADCAST, bye), (b"stranger", bye), (b"1", m.Ack(5))]
    assert outbox.take_messages() == []
    outbox.ack(gone)
    assert gone.ack_due, "once more, now that the last one is taken"
