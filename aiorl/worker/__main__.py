"""`python -m aiorl.worker`: one worker, or a supervisor of several."""

from __future__ import annotations

import os

# ruff: noqa: E402
# Read by NumPy's and ONNX Runtime's libraries when they are loaded: one thread per worker process, as many
# workers share a host (num_cpus_per_worker raises ONNX Runtime's own).
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Sequence

from aiorl.config.command_line import WorkerArgs, parse_worker_args
from aiorl.errors import AiorlError
from aiorl.process.signals import on_stop_signals

__all__ = ["main"]

logger = logging.getLogger("aiorl.worker")


def main(argv: Sequence[str] | None = None) -> int:
    """Run workers until the run is over; the exit status: 0 over or stopped, 1 failed, 2 wrong usage."""
    args = parse_worker_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    logging.getLogger("aiorl").setLevel((args.log_level or "INFO").replace("WARN", "WARNING"))
    try:
        if args.num_workers > 1:
            return _run(_supervise(args))
        return _run(_work(args))
    except AiorlError as error:
        logger.error("%s", error)
        return 1


def _run(coroutine: object) -> int:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        with asyncio.Runner() as runner:
            return int(runner.run(coroutine))  # type: ignore[arg-type]  # both callers pass coroutines of int
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return int(runner.run(coroutine))  # type: ignore[arg-type]


async def _work(args: WorkerArgs) -> int:
    from aiorl.process.parent_watch import watch_parent
    from aiorl.protocol.worker_session import WorkerSession, WorkerSettings
    from aiorl.transport.buffers import share_one_heap
    from aiorl.transport.run_keys import KEYS_VARIABLE, WORKER_ID_VARIABLE, from_variable
    from aiorl.transport.security import load_worker_keys
    from aiorl.transport.zmq_endpoint import ZmqWorkerEndpoint
    from aiorl.worker.service import WorkerService

    share_one_heap()
    # taken out, so that nothing that the environment starts inherits them
    worker_id, run_keys = (os.environ.pop(name, "") for name in (WORKER_ID_VARIABLE, KEYS_VARIABLE))
    keys = from_variable(run_keys) if run_keys else None
    if args.keys is not None:
        keys = load_worker_keys(args.keys)
    settings = WorkerSettings(
        worker_id=worker_id or secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        slot_hint=args.slot or 0,
    )
    service = WorkerService(ZmqWorkerEndpoint(args.connect, keys=keys), WorkerSession(settings))
    loop = asyncio.get_running_loop()
    if args.exit_with_parent:

        def on_lost() -> None:
            loop.call_soon_threadsafe(service.stop, "the process that started this worker is gone")

        watch_parent(on_lost)
    on_stop_signals(lambda name: service.stop(f"ended by {name}"))
    logger.info("worker %d looks for the learner at %s", os.getpid(), args.connect)
    outcome = await service.run()
    logger.log(logging.INFO if outcome.ok else logging.ERROR, "%s", outcome.reason)
    return 0 if outcome.ok else 1


async def _supervise(args: WorkerArgs) -> int:
    from aiorl.process import supervisor as sv

    def command(slot: int) -> list[str]:
        options = ["--connect", args.connect, "--exit-with-parent"]
        if args.keys is not None:
            options += ["--keys", str(args.keys)]
        if args.log_level:
            options += ["--log-level", args.log_level]
        return [sys.executable, "-m", "aiorl.worker", *options]

    failed: list[int] = []

    def tell(event: sv.ChildEvent) -> None:
        match event:
            case sv.ChildStarted(slot, pid, _):
                logger.info("worker process %d of %d runs (pid %d)", slot, args.num_workers, pid)
            case sv.ChildRestarting(slot, status, restarts, wait_s):
                logger.warning("worker process %d ended (%d); restart %d in %g s", slot, status, restarts, wait_s)
            case sv.ChildGaveUp(slot, status, restarts):
                failed.append(slot)
                logger.error("worker process %d ended (%d) after %d restarts: given up", slot, status, restarts)

    slots = range(1, args.num_workers + 1)
    supervisor = sv.Supervisor(command, slots, max_restarts=args.max_worker_restarts, on_event=tell)
    stopping = asyncio.Event()
    on_stop_signals(lambda name: stopping.set())
    await supervisor.start()
    ended = asyncio.create_task(supervisor.wait(), name="children")
    stopped = asyncio.create_task(stopping.wait(), name="signal")
    await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
    await supervisor.stop(grace_s=0.0)
    for task in (ended, stopped):
        task.cancel()
    return 1 if len(failed) == args.num_workers else 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # a sampler stuck in its environment must not hold the process
