"""A whole run in one call: what ``python -m aiorl.learner`` does, for a program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aiorl.algorithms.registry import config_class
from aiorl.errors import ConfigError
from aiorl.learner.build import plan_learning
from aiorl.learner.run import Run
from aiorl.learner.run_dir import RunDirectory
from aiorl.learner.training import Training
from aiorl.trainer.alone import AloneTraining
from aiorl.trainer.caller_thread import CallerThread
from aiorl.trainer.loop_thread import LoopThread
from aiorl.trainer.run_log import RunLog
from aiorl.trainer.trainer import is_sampled_here, named_env

__all__ = ["train"]


def train(
    env: Any = None, *, algo: str = "ppo", config: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Train until a stop criterion is met, or for as long as nobody presses Ctrl-C.

    It shows what the command line shows, writes the same files, and ends as orderly. Without workers
    (``num_workers=0``, no ``bind``) all of it is sampled and learned in the caller's thread, for a debugger to see.

    Args:
        env: the environment, as for `aiorl.Trainer`; with workers, one that they can import.
        algo: the algorithm.
        config: keys of its config, nested as it is.
        **settings: more of them, such as ``stop_return=475`` or ``num_workers=4``; they win.
    Returns: the last result (empty if nothing was trained) with ``reason``, why it ended, ``run_dir`` and
        ``checkpoint``.

    Raises:
        ConfigError: a setting that cannot be honoured (also a ValueError).
        AiorlError: training failed; what was learned until then is saved.
    """
    values = {**(config or {}), "algo": algo, **settings}
    values["env"] = named_env(values.get("env") if env is None else env, is_here=is_sampled_here(values))
    found = config_class(algo).from_mapping(values)
    if found.env is None:
        raise ConfigError("There is no environment to train in.", key="env", hint="Give one: train('CartPole-v1').")
    plan = plan_learning(found)
    loop, here = LoopThread("aiorl-run"), CallerThread() if plan.config.is_alone else None
    make_training = Training if here is None else partial(AloneTraining, here=here)
    try:
        with RunDirectory.open(plan.config) as directory, RunLog(directory.log, plan.config.log_level):
            run = Run(plan.config, directory, plan=plan, make_training=make_training)

            def stop() -> None:
                run.request_stop("Ended by Ctrl-C.")

            if here is None:
                outcome = loop.finish(run.run(), stop)
            else:
                outcome = here.serve(loop.start(run.run()), lambda: loop.soon(stop))
            summary = run.summary(outcome)
            run.show(summary)
    finally:
        loop.close()
    return {
        **outcome.result,
        "reason": outcome.reason,
        "run_dir": str(directory.path),
        "checkpoint": summary.checkpoint,
    }
