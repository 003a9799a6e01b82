"""Many actors: 64 in processes, 1,000 in one session, and what one more costs."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil
import pytest
from actor_things import Counter

from aiorl.actors.hub import Actors
from aiorl.actors.hub_session import ActorSpec, HubSession
from aiorl.net.wire import messages as m
from aiorl.process.tasks import new_event_loop

NO_ARGS: dict[str, Any] = {"args": [], "kwargs": {}}
MAX_MB = 60.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_64_actors_start_answer_and_end_on_one_machine(
    record_property: Callable[[str, object], None],
) -> None:
    processes: list[psutil.Process] = []

    async def main() -> None:
        async with asyncio.timeout(240), Actors() as actors:
            counters = await actors.start(Counter, count=64)
            assert await actors.broadcast(counters, "add", 1) == [1] * 64
            pids = await asyncio.gather(*(counter.pid() for counter in counters))
            processes.extend(map(psutil.Process, pids))
            to_next = zip(counters, [*counters[1:], counters[0]], strict=True)
            sums = await asyncio.gather(*(one.add_to(other, 1) for one, other in to_next))
            assert sums == [2] * 64
            megabytes = [process.memory_full_info().uss / 1e6 for process in processes]
            print(f"memory of an actor: {statistics.median(megabytes):.1f} MB")
            record_property("memory_of_an_actor_mb", statistics.median(megabytes))
            assert statistics.median(megabytes) < MAX_MB
            processes[0].kill()
            results = await asyncio.gather(
                *(counter.add(1) for counter in counters), return_exceptions=True
            )
            assert [result for result in results if result == 3] == [3] * 63

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
    assert len(set(processes)) == 64
    assert not any(process.is_running() for process in processes)


class Hub:
    """A hub's session with running actors, each in the process of the peer with its name."""

    def __init__(self, num_actors: int) -> None:
        self.session = HubSession("hub")
        for number in range(num_actors):
            self.join(f"a{number}")
            self.session.add(ActorSpec(f"a{number}", "m:C", NO_ARGS, restarts=10))
            self.send(f"a{number}", m.Reply(0, True, None))

    def join(self, name: str) -> None:
        self.send(name, m.Hello(m.PROTOCOL_VERSION, m.RUN_OF_ACTORS, name, name))

    def send(self, name: str, message: m.Message) -> list[m.DownMessage]:
        """Return what the hub sends after it has received a message."""
        self.session.receive(name.encode(), message, 0.0)
        return self.drain()

    def drain(self) -> list[m.DownMessage]:
        self.session.events()
        return [message for _, message in self.session.messages_to_send()]

    def call(self, args: dict[str, Any] = NO_ARGS, credit: int = 0) -> int:
        call_id = self.session.call("a3", "echo", args, credit)
        self.drain()
        return call_id


def call_and_reply(hub: Hub) -> None:
    hub.send("a3", m.Reply(hub.call(), True, None))


def call_from_another_actor(hub: Hub) -> None:
    [call] = hub.send("a1", m.Call(1, "echo", NO_ARGS, actor="a3"))
    assert isinstance(call, m.Call)
    [reply] = hub.send("a3", m.Reply(call.call_id, True, None))
    assert isinstance(reply, m.Reply)


def stream(hub: Hub) -> None:
    call_id = hub.call(credit=1)
    hub.send("a3", m.Item(call_id, None))
    hub.session.give_credit(call_id, 1)
    hub.session.cancel(call_id)
    hub.send("a3", m.Reply(call_id, True, None))


def shared_arguments(hub: Hub) -> None:
    number = hub.session.share(NO_ARGS)
    call_id = hub.call({"payload": number})
    hub.send("a3", m.PayloadRequest(number))
    hub.send("a3", m.Reply(call_id, True, None))
    hub.session.release(number)


def loss_and_restart(hub: Hub) -> None:
    hub.session.lose_place("a3", "it was killed")
    hub.join("a3")
    hub.send("a3", m.Reply(0, True, None))


@pytest.mark.parametrize(
    "use", [call_and_reply, call_from_another_actor, stream, shared_arguments, loss_and_restart]
)
def test_a_call_costs_a_hub_the_same_whatever_its_number_of_actors(
    use: Callable[[Hub], None],
) -> None:
    few = Hub(10)
    many = Hub(1000)
    for hub in (few, many):
        use(hub)
    assert lines_run(lambda: use(many)) == lines_run(lambda: use(few)) > 20


def lines_run(run: Callable[[], None]) -> int:
    """Return the number of lines that run within aiorl.actors."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        if not frame.f_globals.get("__name__", "").startswith("aiorl.actors"):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return lines
