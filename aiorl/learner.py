"""`python -m aiorl.learner`: trains here and now, workers included."""

from __future__ import annotations

from aiorl.process.program import end_at_once_on_stop_signals

if __name__ == "__main__":
    end_at_once_on_stop_signals("aiorl")  # before what takes a second to load

import contextlib
import faulthandler
import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from aiorl.config.command_line import usage_error
from aiorl.config.reference import LEARNER_PROG, configure_learner
from aiorl.config.schema import CommonConfig
from aiorl.errors import AiorlError, CheckpointError, ConfigError, InternalError, UnsupportedEnvError
from aiorl.learning.algorithms.algorithm import want_stored_experience
from aiorl.learning.algorithms.registry import config_class
from aiorl.process.imports import prepare_import
from aiorl.process.machine import is_looked_into, on_debugger
from aiorl.process.program import keep_output_from_failing

if TYPE_CHECKING:
    from aiorl.acting.run_dir import RunDirectory
    from aiorl.run.build import LearningPlan
    from aiorl.run.run import Run

__all__ = ["command", "main"]

logger = logging.getLogger("aiorl.learner")

_MAX_EARLY = 1000  # log records kept until there is a file for them
_END_WITHIN_S = 60.0
_BACK_WITHIN_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit status: 0 a stop criterion was met or Ctrl-C ended the run, 1 failed, 2 wrong usage."""
    early = _EarlyLog()
    logging.getLogger().addHandler(early)
    try:
        return _main(sys.argv[1:] if argv is None else argv, early)
    finally:
        logging.getLogger().removeHandler(early)


def _main(argv: Sequence[str], early: _EarlyLog) -> int:
    prepare_import()  # the module of a user's own algorithm may load TensorFlow
    config = configure_learner(argv, config_class)
    os.environ.update(config.extra_python_environs_for_driver)
    logging.getLogger("aiorl").setLevel(config.log_level.replace("WARN", "WARNING"))
    logging.captureWarnings(True)
    try:
        _check_names(config)
        plan = _planned(config)
    except (ConfigError, UnsupportedEnvError) as error:  # wrong usage, before any file is made
        sys.stderr.write(f"aiorl: {error}\n")
        return 2
    if plan is not None:
        config = plan.config
    from aiorl.acting.run_dir import RunDirectory

    try:
        directory = RunDirectory.open(config)
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"aiorl: {error}\n")
        return 1
    _log_to(directory.logs(config.num_workers), early, config.log_max_bytes)
    with directory:
        return _train(config, directory, plan)


class _EarlyLog(logging.handlers.MemoryHandler):
    """Keeps what is logged until there is a file for it, and shows warnings of ours until there is a display."""

    def __init__(self) -> None:
        super().__init__(_MAX_EARLY, flushLevel=logging.CRITICAL + 1, flushOnClose=False)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if record.levelno >= logging.WARNING and record.name.startswith("aiorl"):
            sys.stderr.write(f"aiorl: {record.getMessage()}\n")


def _check_names(config: CommonConfig) -> None:
    """End with the usage if the environment or keys that are named are none, or no stored experience is named."""
    from aiorl.env.registry import resolve_env
    from aiorl.net.transport.security import load_learner_keys

    try:
        resolve_env(config.env or "")
        if config.keys is not None:
            load_learner_keys(Path(config.keys))
        if config.is_offline:  # known before TensorFlow is loaded
            want_stored_experience(config)
    except ConfigError as error:
        usage_error(LEARNER_PROG, str(error))


def _planned(config: CommonConfig) -> LearningPlan | None:
    """The run planned, before any file is made; None where that fails otherwise than by what was asked for.

    Raises:
        ConfigError, UnsupportedEnvError: what was asked for cannot be.
    """
    from aiorl.learning.tf_runtime import begin_loading, prepare_environment

    prepare_environment(config)  # a module of the user's may load TensorFlow
    begin_loading()
    from aiorl.run.build import plan_learning

    try:
        return plan_learning(config)
    except (ConfigError, UnsupportedEnvError):
        raise
    except AiorlError:
        return None  # it comes again, with a log to tell it


def _train(config: CommonConfig, directory: RunDirectory, plan: LearningPlan | None) -> int:
    """Train; the exit status.

    The event loop has a thread of its own. A run without workers samples and learns in this one, where a debugger, a
    profiler and ``print`` see it.
    """
    from aiorl.run.run import Run
    from aiorl.run.threads import LoopThread

    loop, is_back = LoopThread("aiorl-run"), threading.Event()
    run = Run(config, directory, plan=plan, here=loop)

    def make_way() -> None:
        with contextlib.suppress(InternalError):  # on the loop itself nothing is drawn meanwhile
            loop.do(run.make_way)

    def end_without(status: int) -> None:
        if not is_back.wait(_BACK_WITHIN_S):  # an environment, or an update, which nothing breaks off
            _end_process(status)

    async def train() -> int:
        status = await _status_of(run, directory)
        threading.Thread(target=end_without, args=(status,), daemon=True).start()
        return status

    on_debugger(make_way)
    loop.on_stop_signals(lambda name: run.request_stop(f"Ended by {name}."))
    try:
        return loop.call(train())
    finally:
        is_back.set()
        loop.close()


async def _status_of(run: Run, directory: RunDirectory) -> int:
    """Train; the exit status."""
    log = directory.shown / directory.log.name
    # If even that hangs, say where and end, with status 1; by a thread that needs neither the loop nor Python's lock
    run.on_release = lambda: faulthandler.dump_traceback_later(_END_WITHIN_S, exit=True)
    try:
        outcome = await run.run()
    except AiorlError as error:
        logger.exception("the run failed")
        if run.is_misconfigured:
            sys.stderr.write(f"aiorl: {error}\n")
            return 2
        return _failed(str(error), log)
    except Exception as error:
        logger.exception("the run failed")
        return _failed(f"unexpected {type(error).__name__}: {error}", log)
    run.show(run.summary(outcome))
    return 0 if outcome.ok else 1


def _failed(sentence: str, log: Path) -> int:
    sys.stderr.write(f"aiorl: {sentence}\n(the traceback is in {log})\n")
    return 1


def _log_to(logs: Sequence[Path], early: _EarlyLog, max_bytes: int) -> None:
    """All records of aiorl to the first log, the early ones too; the display shows warnings by itself.

    From now on that file and the others, to which the local workers write, are kept small.
    """
    from aiorl.run.report.log_files import KeptSmall, LogFile

    handler = LogFile.of_run(logs[0])
    root = logging.getLogger()
    root.addHandler(handler)
    root.removeHandler(early)
    early.setTarget(handler)
    early.flush()
    early.close()
    KeptSmall(logs, max_bytes)


def command() -> None:
    """Be the program: train and end the process, whatever threads are left."""
    end_at_once_on_stop_signals("aiorl")  # until the run looks after them
    keep_output_from_failing()
    status = main()
    if is_looked_into():  # a profiler is still to write down what it saw
        sys.exit(status)
    _end_process(status)


def _end_process(status: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # TensorFlow's threads, or an import still under way, must not hold the process


if __name__ == "__main__":
    command()
