"""Kinds of faults: the harm each does, and the conditions that must hold afterwards.

A kind is a coroutine of a `Strike`. It does its harm, calls ``over`` once the harm is undone, and
can then wait for the expected recovery; it raises `Missed` if that fails. Every kind undoes its
harm, even when cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.chaos.cluster import Cluster, Missed, Outsider
from benchmarks.chaos.disk import Disk
from benchmarks.chaos.link import Slow
from benchmarks.chaos.plan import Effect
from benchmarks.chaos.processes import send
from benchmarks.chaos.resumes import Saved

__all__ = ["KINDS", "Kind", "NoTarget", "Strike"]

_BACK_S = 30.0
"""Longest time until an ended worker is back; a supervisor's pauses grow to 10 s."""
_GONE_S = 25.0
"""Longest time until a process that lost its parent has ended, frozen or not."""
_CUT_S = 5.0
_BEGINS_S = 20.0
_SHORT_S, _LONG_S = (1.0, 4.0), (1.0, 14.0)
_MANY = 1100
_JUNK = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" + bytes(7) + b"\x01\x7f", bytes(64), b"\xff")

T = TypeVar("T")


class NoTarget(Exception):
    """This kind of fault has no target at present."""


@dataclass(slots=True)
class Strike:
    """One fault: its target and its outcome.

    Attributes:
        cluster: the run.
        disk: disk of the run directory.
        random: random numbers for this fault alone.
        target: the target in words.
        began: wall-clock time of the begin.
        ended: wall-clock time at which the harm was undone, None before that.
    """

    cluster: Cluster
    disk: Disk
    random: random.Random
    target: str = ""
    began: float = field(default_factory=time.time)
    ended: float | None = None

    def begin(self) -> None:
        """Note that the harm begins now."""
        self.began = time.time()

    def over(self) -> None:
        """Note that all harm is undone."""
        self.ended = time.time()

    async def hold(self, seconds: tuple[float, float]) -> None:
        """Wait for a random time between the two bounds."""
        await asyncio.sleep(self.random.uniform(*seconds))

    def pick(self, targets: Sequence[T]) -> T:
        """Pick one of the targets.

        Raises:
            NoTarget: there is none.
        """
        draw = self.random.random()
        if not targets:
            raise NoTarget
        return targets[int(draw * len(targets))]

    def outsider(self, *, may_end: bool = False) -> Outsider:
        """Pick one of the outside hosts.

        Args:
            may_end: the fault ends its processes, so the spared host is excluded.
        """
        found = self.pick(
            [each for each in self.cluster.outsiders if not (may_end and each.spared)]
        )
        self.target = found.name
        return found


Act = Callable[[Strike], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of fault.

    Attributes:
        name: name on the command line.
        effect: effect on training.
        act: coroutine that does the harm.
    """

    name: str
    effect: Effect
    act: Act


KINDS: dict[str, Kind] = {}
"""Kinds by name."""


def _kind(effect: Effect = Effect.PASSING) -> Callable[[Act], Act]:
    def enter(act: Act) -> Act:
        name = act.__name__.replace("_", "-")
        KINDS[name] = Kind(name, effect, act)
        return act

    return enter


# Processes
# --------------------------------------------------------------------------------------------------


@_kind()
async def local_killed(strike: Strike) -> None:
    """Kill one of the learner's own workers by SIGKILL."""
    await _end_local(strike, signal.SIGKILL)


@_kind()
async def local_terminated(strike: Strike) -> None:
    """End one of the learner's own workers by SIGTERM from outside."""
    await _end_local(strike, signal.SIGTERM)


@_kind(Effect.SILENCES)
async def local_frozen(strike: Strike) -> None:
    """Freeze one of the learner's own workers by SIGSTOP; continue it later."""
    worker = strike.pick(strike.cluster.locals())
    strike.target = f"pid {worker.pid}"
    await _freeze(strike, worker, _LONG_S)


@_kind(Effect.SILENCES)
async def outside_killed(strike: Strike) -> None:
    """Kill an outside process that samples by SIGKILL."""
    outsider = strike.outsider(may_end=True)
    victim = strike.pick(outsider.samplers())
    strike.target += f", pid {victim.pid}"
    if victim.pid == outsider.process.pid:
        await strike.cluster.restart_outsider(outsider, whole=True)
        strike.over()
        raise Missed("the worker had no supervisor: only an operator could restart it")
    send(victim, signal.SIGKILL)
    strike.over()
    await strike.cluster.until(
        lambda: _are_back(outsider.samplers(), victim, outsider.num_workers),
        _BACK_S,
        f"{outsider.name} did not start its worker again",
    )


@_kind(Effect.SILENCES)
async def outside_frozen(strike: Strike) -> None:
    """Freeze an outside process that samples by SIGSTOP; continue it later."""
    worker = strike.pick(strike.outsider().samplers())
    await _freeze(strike, worker, _LONG_S)


@_kind(Effect.SILENCES)
async def outside_supervisor_killed(strike: Strike) -> None:
    """Kill only an outside host's command by SIGKILL; its child processes must end by
    themselves.
    """
    outsider = strike.outsider(may_end=True)
    children = await strike.cluster.restart_outsider(outsider, whole=False)
    strike.over()
    await _gone(strike, children, f"workers of {outsider.name} outlived its supervisor")


@_kind(Effect.SILENCES)
async def outside_host_lost(strike: Strike) -> None:
    """Kill an outside host's command and all its child processes by SIGKILL."""
    outsider = strike.outsider(may_end=True)
    await strike.cluster.restart_outsider(outsider, whole=True)
    strike.over()


@_kind()
async def learner_frozen(strike: Strike) -> None:
    """Freeze the learner by SIGSTOP; continue it later."""
    strike.target = f"pid {strike.cluster.learner.pid}"
    await _freeze(strike, psutil.Process(strike.cluster.learner.pid), _SHORT_S)


@_kind(Effect.ENDS_LEARNER)
async def learner_killed(strike: Strike) -> None:
    """Kill the learner by SIGKILL and resume it immediately."""
    workers = await strike.cluster.kill_learner()
    strike.over()
    await _gone(strike, workers, "local workers outlived the learner")


@_kind(Effect.ENDS_LEARNER)
async def learner_killed_with_queue(strike: Strike) -> None:
    """Kill the learner while its newest checkpoint counts queued fragments; the resumed one must
    count them as lost.
    """
    cluster = strike.cluster

    def waits() -> bool:
        saved = Saved.newest_of(cluster.run_dir)
        return saved is not None and saved.ledger["queued"] > 0

    if cluster.algo == "ppo":  # PPO's queue is empty after an update
        raise NoTarget
    with contextlib.suppress(Missed):
        await cluster.until(waits, _BEGINS_S, "")
    strike.begin()
    await learner_killed(strike)


@_kind(Effect.ENDS_LEARNER)
async def checkpoint_damaged(strike: Strike) -> None:
    """Kill the learner, damage its newest checkpoint and resume it immediately."""
    damage = strike.pick(list(_DAMAGES))
    strike.target = damage

    def checkpoints() -> list[Path]:
        return sorted((strike.cluster.run_dir / "checkpoints").glob("checkpoint-??????"))

    if len(checkpoints()) < 2:  # a run can't resume if its only checkpoint is damaged
        raise NoTarget

    def spoil() -> None:
        _DAMAGES[damage](checkpoints()[-1], strike.random)

    workers = await strike.cluster.kill_learner(before_resume=spoil)
    strike.over()
    await _gone(strike, workers, "local workers outlived the learner")


async def _end_local(strike: Strike, number: signal.Signals) -> None:
    cluster = strike.cluster
    life = cluster.life
    victim = strike.pick(cluster.locals())
    strike.target = f"pid {victim.pid}"
    send(victim, number)
    strike.over()
    try:
        await cluster.until(
            lambda: cluster.life != life or _are_back(cluster.locals(), victim, cluster.num_local),
            _BACK_S,
            f"no local worker was started to replace the one that got {number.name}",
        )
    except Missed:
        cluster.num_local -= 1
        raise


async def _freeze(strike: Strike, process: psutil.Process, seconds: tuple[float, float]) -> None:
    send(process, signal.SIGSTOP)
    try:
        await strike.hold(seconds)
    finally:
        send(process, signal.SIGCONT)
    strike.over()


async def _gone(strike: Strike, processes: Sequence[psutil.Process], complaint: str) -> None:
    await strike.cluster.until(
        lambda: not any(process.is_running() and not _is_zombie(process) for process in processes),
        _GONE_S,
        f"{complaint}: not all ended",
    )


def _are_back(there: Sequence[psutil.Process], victim: psutil.Process, count: int) -> bool:
    return victim not in there and len(there) >= count


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


# Connections
# --------------------------------------------------------------------------------------------------


@_kind()
async def connections_reset(strike: Strike) -> None:
    """Reset both sides of all connections of a host."""
    strike.outsider().link.reset()
    strike.over()


@_kind(Effect.SILENCES)
async def full_queues_reset(strike: Strike) -> None:
    """Read nothing until the queues on both sides are full, then reset the connections."""
    link = strike.outsider().link
    link.hold()
    try:
        await strike.hold((2.0, 8.0))
        link.reset()
    finally:
        link.release()
    strike.over()


@_kind(Effect.SILENCES)
async def blackholed(strike: Strike) -> None:
    """Carry nothing in either direction for a time, without closing a connection."""
    link = strike.outsider().link
    link.hold()
    try:
        await strike.hold(_LONG_S)
    finally:
        link.release()
    strike.over()


@_kind(Effect.SILENCES)
async def late(strike: Strike) -> None:
    """Carry nothing until the worker's leases have gone to others; then deliver its fragments
    late.
    """
    link = strike.outsider().link
    link.hold()
    try:
        await strike.hold((6.0, 9.0))
    finally:
        link.release()
    strike.over()


@_kind(Effect.SILENCES)
async def killed_while_sending_again(strike: Strike) -> None:
    """Reset connections while fragments wait, and kill the worker while it sends them again over a
    narrow line.
    """
    outsider = strike.outsider(may_end=True)
    link, victim = outsider.link, strike.pick(outsider.samplers())
    strike.target += f", pid {victim.pid}"
    link.hold()
    try:
        await strike.hold((1.0, 3.0))
        link.reset()
        link.slow = Slow(0.0, 1e5)
        link.release()
        await strike.hold((1.0, 3.0))
        send(victim, signal.SIGKILL)
    finally:
        link.release()
        link.slow = None
    strike.over()


@_kind(Effect.SILENCES)
async def corrupted(strike: Strike) -> None:
    """Flip a bit in some chunks."""
    link = strike.outsider().link
    link.corrupt_share = strike.random.uniform(0.02, 0.3)
    try:
        await strike.hold(_SHORT_S)
    finally:
        link.corrupt_share = 0.0
    strike.over()


@_kind()
async def delayed(strike: Strike) -> None:
    """Deliver all traffic 100 to 500 ms late, over a narrow line."""
    link = strike.outsider().link
    link.slow = Slow(strike.random.uniform(0.1, 0.5), strike.random.uniform(2e5, 1e6))
    try:
        await strike.hold((4.0, 10.0))
    finally:
        link.slow = None
    strike.over()


@_kind(Effect.SILENCES)
async def key_withdrawn(strike: Strike) -> None:
    """Withdraw a host's key while strangers knock, then admit it again: the host is cut off and
    rejoins.
    """
    cluster, outsider = strike.cluster, strike.outsider()
    link, key = outsider.link, cluster.admitted_key(outsider.name)
    if not key.exists():  # another fault has withdrawn it
        raise NoTarget
    text = key.read_bytes()
    knocker = cluster.intrude("knock", 5.0)
    await cluster.until(knocker.last_words, _BEGINS_S, "no stranger knocked")
    strike.begin()
    before, life = link.connections, cluster.life
    key.unlink()
    try:
        await cluster.until(
            lambda: not before & link.connections or cluster.life != life,
            _CUT_S,
            f"connections of {outsider.name} were not cut after its key was withdrawn",
        )
        await strike.hold(_SHORT_S)
    finally:
        key.write_bytes(text)
        strike.over()
    carried = link.bytes_up
    await cluster.until(
        lambda: link.connections and link.bytes_up > carried + (64 << 10),
        _BACK_S,
        f"{outsider.name} did not rejoin after its key was admitted again",
    )


# The learner's resources
# --------------------------------------------------------------------------------------------------


@_kind()
async def disk_full(strike: Strike) -> None:
    """Leave no byte free on the disk of the run directory."""
    if strike.disk.why_not or not strike.cluster.is_training:
        raise NoTarget
    try:
        await asyncio.to_thread(strike.disk.fill)
        await strike.hold(_SHORT_S)
    finally:
        strike.disk.free()
    strike.over()


@_kind()
async def descriptors_exhausted(strike: Strike) -> None:
    """Open more connections than the learner may have open files."""
    with _connections(strike.cluster.port, _MANY):
        await strike.hold(_SHORT_S)
    strike.over()


@_kind()
async def garbage(strike: Strike) -> None:
    """Open connections that speak another protocol, or break off within a greeting."""
    with _connections(strike.cluster.port, 24) as connections:
        for each in connections:
            with contextlib.suppress(OSError):
                each.send(strike.random.choice([*_JUNK, strike.random.randbytes(4096)]))
        await strike.hold((0.5, 2.0))
    strike.over()


@_kind()
async def subscriptions_flooded(strike: Strike) -> None:
    """Subscribe to broadcasts again and again with an admitted key."""
    intruder = strike.cluster.intrude("subscribe", strike.random.uniform(1.0, 4.0))
    await strike.cluster.until(intruder.last_words, _BEGINS_S, "no one subscribed")
    strike.begin()
    await strike.cluster.until(
        lambda: intruder.status is not None, _BEGINS_S, "the intruder did not end"
    )
    strike.over()


@contextlib.contextmanager
def _connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open up to ``count`` connections, half of them to each of the learner's ports; some may
    fail.
    """
    made: list[socket.socket] = []
    try:
        for index in range(count):
            each = socket.socket()
            made.append(each)
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port + index % 2))
        yield made
    finally:
        for each in made:
            each.close()


# Damage to a checkpoint
# --------------------------------------------------------------------------------------------------


def _truncate(checkpoint: Path, _: random.Random) -> None:
    path = checkpoint / "tensors.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _flip(checkpoint: Path, draw: random.Random) -> None:
    path = checkpoint / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 0x10
    path.write_bytes(data)


def _empty_meta(checkpoint: Path, _: random.Random) -> None:
    (checkpoint / "meta.json").write_bytes(b"")


def _nested_meta(checkpoint: Path, _: random.Random) -> None:
    (checkpoint / "meta.json").write_text("[" * 200_000, encoding="ascii")


def _pipe_for_meta(checkpoint: Path, _: random.Random) -> None:
    (checkpoint / "meta.json").unlink()
    os.mkfifo(checkpoint / "meta.json")


def _sparse_tensors(checkpoint: Path, _: random.Random) -> None:
    os.truncate(checkpoint / "tensors.safetensors", 2 << 30)


def _no_tensors(checkpoint: Path, _: random.Random) -> None:
    (checkpoint / "tensors.safetensors").unlink()


_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "half of its tensors": _truncate,
    "a flipped bit": _flip,
    "an empty meta.json": _empty_meta,
    "a deeply nested meta.json": _nested_meta,
    "a pipe in place of meta.json": _pipe_for_meta,
    "a sparse file of 2 GiB": _sparse_tensors,
    "no tensors": _no_tensors,
}
