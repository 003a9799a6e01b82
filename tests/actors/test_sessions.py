"""The sessions of hub and actors, joined by a network that breaks: no sockets, no processes."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from aiorl.actors import actor_session as up, hub_session as down
from aiorl.actors.actor_session import ActorSession, Identity, LinkState
from aiorl.actors.hub_session import ActorSpec, ActorState, HubSession, HubSettings
from aiorl.errors import BadFrame, LocalProtocolError, RemoteProtocolError
from aiorl.net.wire import messages as m

NO_ARGS: dict[str, Any] = {"args": [], "kwargs": {}}


class Process:
    """An actor's process: echoes numbers, counts streams, calls others."""

    def __init__(self, world: World, worker_id: str) -> None:
        self.session = ActorSession(Identity(worker_id, "host", 1))
        self.world = world
        self.worker_id = worker_id
        self.peer = b""
        self.inbox: deque[m.Message] = deque()
        self.broadcasts: deque[m.Message] = deque()
        self.to_hub: deque[m.Message] = deque()
        self.calls: list[m.Call] = []
        self.origins: dict[int, int] = {}
        self.is_alive = True

    def handle(self) -> None:
        for event in self.session.events():
            match event:
                case up.ObjectRequested():
                    self.session.reply(0, ok=True, result=None)
                case m.Call():
                    self.world.ran[(self.worker_id, event.call_id)] += 1
                    self.calls.append(event)
                case m.Reply(call_id, ok, result):
                    self.session.reply(self.origins.pop(call_id), ok=ok, result=result)
                case m.Cancel(call_id):
                    for call in [c for c in self.calls if c.call_id == call_id]:
                        self.calls.remove(call)
                        self.session.reply(call_id, ok=False, result=m.failed("CancelledError"))
                case up.Ended():
                    self.is_alive = False
        self.to_hub.extend(self.session.messages_to_send())

    def work(self) -> None:
        """Answer one call."""
        if not self.calls:
            return
        call = self.calls.pop(0)
        args: Any = call.args
        if call.method == "forward":
            number = self.session.call(args["other"], "echo", {"value": args["value"]})
            self.origins[number] = call.call_id
        else:
            self.session.reply(call.call_id, ok=True, result=args["value"])
        self.handle()


class World:
    """A hub, processes, and the ends of all calls."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.hub = HubSession("hub", HubSettings(in_flight=3))
        self.now = 0.0
        self.processes: dict[bytes, Process] = {}
        self.num_peers = 0
        self.ends: Counter[int] = Counter()
        self.results: dict[int, Any] = {}
        self.ran: Counter[tuple[str, int]] = Counter()
        self.asked: dict[int, int] = {}
        self.shared: dict[int, int] = {}

    def join(self, worker_id: str) -> None:
        process = Process(self, worker_id)
        self.num_peers += 1
        process.peer = b"%d" % self.num_peers
        self.processes[process.peer] = process
        process.session.connected(self.now)
        process.handle()

    def cut(self, process: Process) -> None:
        """End a connection; messages under way are lost."""
        del self.processes[process.peer]
        process.session.disconnected("cut")
        self.hub.peer_gone(process.peer, "cut")
        self.flush()

    def flush(self) -> None:
        for peer, message in self.hub.messages_to_send():
            if peer is None:
                for process in self.processes.values():
                    if self.random.random() < 0.7:  # slow subscribers miss broadcasts
                        process.broadcasts.append(message)
            elif peer in self.processes:
                self.processes[peer].inbox.append(message)
        for peer, _ in self.hub.peers_to_drop():
            if peer in self.processes:
                self.cut(self.processes[peer])
        for event in self.hub.events():
            match event:
                case m.Reply(call_id, ok, result):
                    self.ends[call_id] += 1
                    self.results[call_id] = (ok, result)
                case down.CallLost(call_id):
                    self.ends[call_id] += 1
                    self.results[call_id] = None

    def step(self) -> None:
        """Let something happen somewhere."""
        self.now += 0.3
        if not self.processes:
            return
        process = self.random.choice(list(self.processes.values()))
        match self.random.randrange(5):
            case 0 if process.inbox:
                process.session.receive(process.inbox.popleft(), self.now)
            case 1 if process.broadcasts:
                process.session.broadcast(process.broadcasts.popleft())
            case 2 if process.to_hub:
                self.hub.receive(process.peer, process.to_hub.popleft(), self.now)
            case 3:
                process.work()
            case 4:
                process.session.tick(self.now)
                self.hub.tick(self.now)
        process.handle()
        if not process.is_alive and process.peer in self.processes:
            self.cut(process)
        self.flush()

    def settle(self) -> None:
        """Deliver and answer everything."""
        self.now += 0.3
        self.hub.tick(self.now)
        self.flush()
        for process in list(self.processes.values()):
            process.session.tick(self.now)
            while process.inbox:
                process.session.receive(process.inbox.popleft(), self.now)
            while process.broadcasts:
                process.session.broadcast(process.broadcasts.popleft())
            process.handle()
            process.work()
            while process.to_hub:
                self.hub.receive(process.peer, process.to_hub.popleft(), self.now)
            if not process.is_alive and process.peer in self.processes:
                self.cut(process)
            self.flush()


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_each_call_ends_once_with_its_result_or_with_the_loss_of_its_actor(seed: int) -> None:
    world = World(seed)
    dice = world.random
    names = [f"a{number}" for number in range(4)]
    for name in names:
        world.hub.add(ActorSpec(name, "m:C", NO_ARGS, restarts=1))
    for number in range(3):
        world.join(f"w{number}")
    for turn in range(400):
        world.step()
        if turn < 250 and dice.random() < 0.4:
            kind = dice.choice(["echo", "forward", "shared", "cancelled"])
            target = dice.choice(names)
            args: dict[str, Any] = {"value": turn, "other": dice.choice(names)}
            if kind == "shared":
                number = world.hub.share({"value": turn})
                world.shared[number] = turn
                args = {"payload": number}
            method = "forward" if kind == "forward" else "echo"
            call_id = world.hub.call(target, method, args)
            world.asked[call_id] = turn
            if kind == "cancelled" and dice.random() < 0.5:
                world.hub.cancel(call_id)
            world.flush()
        if dice.random() < 0.01 and world.processes:
            world.cut(dice.choice(list(world.processes.values())))
        if dice.random() < 0.02:
            world.join(f"v{turn}")
    for _ in range(300):
        if not world.hub.free_places and any(map(_waits, map(world.hub.state_of, names))):
            world.join(f"x{world.num_peers}")
        world.settle()
    assert set(world.ends) == set(world.asked)
    assert set(world.ends.values()) == {1}
    for call_id, result in world.results.items():
        if result is not None and result[0]:
            assert result[1] == world.asked[call_id]
    assert max(world.ran.values(), default=0) <= 1


def test_a_thousand_sessions_answer_at_one_hub() -> None:
    world = World(0)
    names = [f"a{number}" for number in range(1000)]
    for name in names:
        world.hub.add(ActorSpec(name, "m:C", NO_ARGS))
        world.join(f"w{name}")
    world.settle()
    shared = world.hub.share({"value": -1})
    for number, name in enumerate(names):
        after = names[number - 1]
        for method, args in (
            ("echo", {"value": number, "other": after}),
            ("forward", {"value": number, "other": after}),
            ("echo", {"payload": shared}),
        ):
            call_id = world.hub.call(name, method, args)
            world.asked[call_id] = -1 if "payload" in args else number
    for _ in range(12):
        world.settle()
    assert len(world.results) == 3000
    assert set(world.ends.values()) == {1}
    assert all(world.results[call_id] == (True, value) for call_id, value in world.asked.items())
    lost = [world.hub.call(name, "echo", {"value": 0}) for name in names[:100]]
    for process in list(world.processes.values())[:100]:
        world.cut(process)
    world.settle()
    assert [world.results[call_id] for call_id in lost] == [None] * 100


def _waits(state: ActorState) -> bool:
    return state is ActorState.WAITING


def hub_with_an_actor(**changes: Any) -> HubSession:
    hub = HubSession("hub", HubSettings(**changes))
    hub.receive(b"p", hello("w"), 0.0)
    hub.add(ActorSpec("a", "m:C", NO_ARGS))
    hub.receive(b"p", m.Reply(0, True, None), 0.0)
    hub.messages_to_send()
    hub.events()
    return hub


def hello(worker_id: str, run_id: str = m.RUN_OF_ACTORS) -> m.Hello:
    return m.Hello(m.PROTOCOL_VERSION, run_id, worker_id, worker_id)


def calls_sent(hub: HubSession) -> list[int]:
    sent = [message for _, message in hub.messages_to_send()]
    return [message.call_id for message in sent if isinstance(message, m.Call)]


def test_an_actor_gets_no_more_calls_than_may_be_in_flight() -> None:
    hub = hub_with_an_actor(in_flight=2)
    ids = [hub.call("a", "echo", NO_ARGS) for _ in range(4)]
    assert calls_sent(hub) == ids[:2]
    hub.receive(b"p", m.Reply(ids[0], True, None), 0.0)
    assert calls_sent(hub) == ids[2:3]


def test_an_actor_gets_no_more_bytes_than_may_be_in_flight_but_always_one_call() -> None:
    hub = hub_with_an_actor(max_bytes=1000)
    big = {"args": [b"x" * 5000], "kwargs": {}}
    ids = [hub.call("a", "echo", big), hub.call("a", "echo", big)]
    assert calls_sent(hub) == ids[:1]
    hub.receive(b"p", m.Reply(ids[0], True, None), 0.0)
    assert calls_sent(hub) == ids[1:]


@pytest.mark.parametrize(
    "message",
    [
        m.Item(1, "more than there was credit for"),
        m.Samples(1, 1, 1, 1, 0, 0, 1, 1, {}, {}, {}, {}),
        m.SnapshotRequest(-1),
        m.Call(1, "echo", {"payload": 1}, actor="a"),
    ],
)
def test_an_actor_that_breaks_the_protocol_is_cut_off_and_its_calls_are_lost(
    message: m.Message,
) -> None:
    hub = hub_with_an_actor()
    call_id = hub.call("a", "echo", NO_ARGS)
    hub.receive(b"p", message, 0.0)
    assert [peer for peer, _ in hub.peers_to_drop()] == [b"p"]
    lost = [event for event in hub.events() if isinstance(event, down.CallLost)]
    assert [event.call_id for event in lost] == [call_id]


def test_an_actor_with_too_many_unanswered_calls_to_others_is_cut_off() -> None:
    hub = hub_with_an_actor(in_flight=1)
    for number in range(1, 2000):
        hub.receive(b"p", m.Call(number, "echo", NO_ARGS, actor="a"), 0.0)
        if not hub.knows(b"p"):
            break
    assert number == 1025
    assert [peer for peer, _ in hub.peers_to_drop()] == [b"p"]


def test_needless_replies_cost_an_actor_its_place_only_when_they_are_many() -> None:
    hub = hub_with_an_actor()
    for number in range(300):
        if hub.knows(b"p"):
            hub.receive(b"p", m.Reply(10_000 + number, True, None), 0.0)
    assert not hub.knows(b"p")
    assert number > 200


def test_bytes_that_can_not_be_read_cost_only_their_sender() -> None:
    hub = hub_with_an_actor()
    hub.receive(b"q", hello("other"), 0.0)
    hub.bad_frames(b"q", BadFrame("nonsense"))
    assert hub.knows(b"p")
    assert not hub.knows(b"q")


def test_workers_of_runs_learn_that_this_is_a_hub_and_strangers_to_say_hello() -> None:
    hub = HubSession("hub")
    hub.receive(b"p", hello("w", run_id=""), 0.0)
    hub.receive(b"q", m.Reply(1, True, None), 0.0)
    codes = {
        peer: message.code
        for peer, message in hub.messages_to_send()
        if isinstance(message, m.Refused)
    }
    assert codes == {b"p": m.RefusalCode.ACTORS, b"q": m.RefusalCode.HELLO_FIRST}


def test_a_silent_process_is_lost_but_not_for_time_in_which_the_hub_stood_still() -> None:
    hub = hub_with_an_actor(silence_s=10.0)
    hub.tick(0.5)
    hub.tick(60.0)
    assert hub.knows(b"p")
    for now in range(60, 69):
        hub.tick(float(now))
    assert hub.knows(b"p")
    for now in range(69, 72):
        hub.tick(float(now))
    assert not hub.knows(b"p")


def test_a_call_fails_whose_shared_arguments_are_gone() -> None:
    hub = hub_with_an_actor()
    actor = ActorSession(Identity("w", "host", 1))
    actor.receive(m.LearnerBeat("hub", -1), 0.0)
    number = hub.share(NO_ARGS)
    call_id = hub.call("a", "echo", {"payload": number})
    hub.release(number)
    for message in direct(hub):
        actor.receive(message, 0.0)
    for now in (0.6, 1.2):
        actor.messages_to_send()
        actor.connected(now)
        actor.tick(now)
        requests = [sent for sent in actor.messages_to_send() if isinstance(sent, m.PayloadRequest)]
        assert len(requests) == (now == 0.6)
        for request in requests:
            hub.receive(b"p", request, now)
    for message in direct(hub):
        actor.receive(message, 1.2)
    [reply] = actor.messages_to_send()
    assert isinstance(reply, m.Reply)
    assert (reply.call_id, reply.ok) == (call_id, False)


def test_calls_of_one_caller_begin_in_order_although_shared_arguments_come_late() -> None:
    actor = ActorSession(Identity("w", "host", 1))
    actor.receive(m.LearnerBeat("hub", -1), 0.0)

    def arrive(call_id: int, caller: str = "", **args: Any) -> None:
        actor.receive(m.Call(call_id, "echo", args, actor=caller), 0.0)

    def begun() -> list[tuple[int, Any]]:
        return [
            (event.call_id, event.args.get("value"))
            for event in actor.events()
            if isinstance(event, m.Call)
        ]

    arrive(1, payload=7)
    arrive(2, value=2)
    arrive(3, payload=8)
    arrive(4, value=4)
    arrive(5, "other", value=5)
    assert begun() == [(5, 5)]
    actor.broadcast(m.Payload(8, {"value": 8}))
    for number in (9, 10):  # the session forgets old payloads, but not those of calls that wait
        actor.broadcast(m.Payload(number, {}))
    assert begun() == []
    actor.broadcast(m.Payload(7, {"value": 7}))
    assert begun() == [(1, 7), (2, 2), (3, 8), (4, 4)]
    arrive(6, payload=11)
    arrive(7, value=7)
    arrive(8, payload=12)
    arrive(9, value=9)
    assert begun() == []
    actor.receive(m.Cancel(6), 0.0)
    assert begun() == [(7, 7)]
    actor.receive(m.Payload(12, None), 0.0)
    assert begun() == [(9, 9)]


@pytest.mark.parametrize(
    ("others", "place", "whole"),
    [
        ({"args": [1, 2], "kwargs": {"a": 3}}, 1, {"args": [1, "x", 2], "kwargs": {"a": 3}}),
        ({"args": [1], "kwargs": {"a": 3}}, "b", {"args": [1], "kwargs": {"a": 3, "b": "x"}}),
    ],
)
def test_a_shared_argument_takes_its_place_among_the_others(
    others: dict[str, Any], place: int | str, whole: dict[str, Any]
) -> None:
    hub = hub_with_an_actor()
    actor = ActorSession(Identity("w", "host", 1))
    actor.receive(m.LearnerBeat("hub", -1), 0.0)
    number = hub.share({"value": "x"})
    for _ in range(2):
        hub.call("a", "echo", {**others, "payload": number, "place": place})
    for peer, message in hub.messages_to_send():
        if peer is None:
            actor.broadcast(message)
        else:
            actor.receive(message, 0.0)
    calls = [event for event in actor.events() if isinstance(event, m.Call)]
    assert [call.args for call in calls] == [whole, whole]


@pytest.mark.parametrize(
    "args",
    [
        {"place": 0},
        {"place": 0, "args": 5, "kwargs": {}},
        {"place": 0, "args": [], "kwargs": []},
        {"place": None, "args": [], "kwargs": {}},
    ],
)
def test_a_call_whose_shared_argument_has_no_place_is_refused(args: dict[str, Any]) -> None:
    actor = ActorSession(Identity("w", "host", 1))
    actor.receive(m.LearnerBeat("hub", -1), 0.0)
    with pytest.raises(RemoteProtocolError, match="place"):
        actor.receive(m.Call(1, "echo", {"payload": 1, **args}), 0.0)


def direct(hub: HubSession) -> list[m.DownMessage]:
    """Return the messages of a hub without its broadcasts, which are lost."""
    return [message for peer, message in hub.messages_to_send() if peer is not None]


def test_the_end_of_an_actor_cancels_its_calls_to_others() -> None:
    hub = hub_with_an_actor()
    hub.receive(b"q", hello("v"), 0.0)
    hub.add(ActorSpec("b", "m:C", NO_ARGS))
    hub.receive(b"q", m.Reply(0, True, None), 0.0)
    hub.receive(b"q", m.Call(1, "echo", NO_ARGS, actor="a"), 0.0)
    [call_id] = calls_sent(hub)[1:]
    hub.end("b", "it was stopped")
    assert (b"p", m.Cancel(call_id)) in hub.messages_to_send()


def test_a_stream_ends_with_an_item_that_can_not_be_passed_on() -> None:
    hub = hub_with_an_actor()
    hub.receive(b"p", m.Call(7, "items", NO_ARGS, actor="a", credit=8), 0.0)
    [call_id] = calls_sent(hub)
    hub.receive(b"p", m.Item(call_id, 1), 0.0)
    [item] = direct(hub)
    hub.not_sent(b"p", item, "too large")
    cancel, reply = (message for _, message in hub.messages_to_send())
    assert cancel == m.Cancel(call_id)
    assert isinstance(reply, m.Reply)
    assert (reply.call_id, reply.ok) == (7, False)


def test_a_process_that_comes_after_the_end_of_its_actor_runs_no_other_one() -> None:
    hub = HubSession("hub")
    hub.add(ActorSpec("a", "m:C", NO_ARGS, place="w"))
    hub.end("a", "it was stopped")
    hub.add(ActorSpec("b", "m:C", NO_ARGS))
    hub.receive(b"p", hello("w"), 0.0)
    assert [type(message) for message in direct(hub)] == [m.Bye]
    assert hub.free_places == []
    assert hub.state_of("b") is ActorState.WAITING


def test_credit_for_a_call_that_waits_is_sent_with_it_and_the_sum_is_bounded() -> None:
    hub = hub_with_an_actor(in_flight=1)
    first = hub.call("a", "echo", NO_ARGS)
    stream = hub.call("a", "items", NO_ARGS, credit=8)
    hub.give_credit(stream, 4)
    hub.receive(b"p", m.Reply(first, True, None), 0.0)
    hub.give_credit(stream, 1 << 40)
    hub.give_credit(stream, 1)
    _, call, credit = direct(hub)
    assert isinstance(call, m.Call)
    assert (call.call_id, call.credit) == (stream, 12)
    assert credit == m.Credit(stream, (1 << 16) - 12)


def test_calls_of_an_actor_wait_in_it_beyond_its_bounds_and_go_on_with_each_answer() -> None:
    actor = ActorSession(Identity("w", "host", 1))
    actor.receive(m.LearnerBeat("hub", -1), 0.0)
    ids = [actor.call("a", "echo", NO_ARGS) for _ in range(3000)]
    actor.cancel(ids[256])
    actor.receive(m.Reply(ids[0], True, None), 0.0)
    sent = [call.call_id for call in actor.messages_to_send() if isinstance(call, m.Call)]
    assert sent == [*ids[:256], ids[257]]
    cancelled, answered = actor.events()
    assert isinstance(cancelled, m.Reply)
    assert isinstance(answered, m.Reply)
    assert (cancelled.call_id, answered.call_id) == (ids[256], ids[0])


def test_calls_of_actors_are_passed_on_in_order_whatever_their_size() -> None:
    hub = hub_with_an_actor(in_flight=1, max_bytes=10_000)
    hub.receive(b"q", hello("v"), 0.0)
    hub.add(ActorSpec("b", "m:C", NO_ARGS))
    by_hub = [hub.call("b", "echo", NO_ARGS) for _ in range(2)]
    big = {"args": [b"x" * 12_000], "kwargs": {}}
    for number, args in enumerate([big, NO_ARGS, NO_ARGS], start=1):
        hub.receive(b"p", m.Call(number, "echo", args, actor="b"), 0.0)
        hub.receive(b"q", m.Reply(0, True, None), 0.0)
    sent = calls_sent(hub)[1:]
    assert sent == [by_hub[1] + 1, by_hub[0], by_hub[1] + 2, by_hub[1] + 3]


def test_there_is_always_room_for_a_process_that_an_actor_waits_for() -> None:
    hub = HubSession("hub", HubSettings(max_places=1))
    hub.add(ActorSpec("a", "m:C", NO_ARGS, place="w"))
    for peer, worker_id in ((b"p", "stranger"), (b"q", "late"), (b"r", "w")):
        hub.receive(peer, hello(worker_id), 0.0)
    assert hub.free_places == ["stranger"]
    assert hub.state_of("a") is ActorState.STARTING


def test_two_actors_have_no_name_in_common() -> None:
    hub = hub_with_an_actor()
    with pytest.raises(LocalProtocolError, match="'a'"):
        hub.add(ActorSpec("a", "m:C", NO_ARGS))


def test_a_registered_process_ends_with_its_connection_and_a_new_one_waits() -> None:
    session = ActorSession(Identity("w", "host", 1))
    session.connected(0.0)
    session.disconnected("cut")
    assert session.state is LinkState.CONNECTING
    session.connected(1.0)
    session.receive(m.LearnerBeat("hub", -1), 1.0)
    session.disconnected("cut")
    assert session.state is LinkState.ENDED
