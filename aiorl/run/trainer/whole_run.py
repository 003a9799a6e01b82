"""A whole run in one call: what ``python -m aiorl.learner`` does, for a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiorl.acting.run_dir import RunDirectory
from aiorl.config.code import refuse_in_import
from aiorl.config.layers import load_config
from aiorl.config.schema import CommonConfig
from aiorl.errors import AiorlError
from aiorl.learning.algorithms.registry import config_class
from aiorl.run.build import plan_learning
from aiorl.run.report.console import PlainDisplay, make_display
from aiorl.run.report.log_files import RunLog
from aiorl.run.run import Run
from aiorl.run.threads import LoopThread
from aiorl.run.trainer.trainer import ENV_HINT, creator_of, settings_of


def train(
    env: Any = None, *, algo: str | None = None, config: Mapping[str, Any] | CommonConfig | None = None, **settings: Any
) -> dict[str, Any]:
    """Train until a stop criterion is met, or for as long as nobody presses Ctrl-C.

    It shows what the command line shows, writes the same files, and ends as orderly. Without workers
    (``num_workers=0``, no ``bind``) all of it is sampled and learned in the caller's thread, for a debugger to see.

    Args:
        env: the environment, as for `aiorl.Trainer`; with workers, one that they can import. None takes that of the
            config, or of a preset that is for one.
        algo: the algorithm; None takes that of the config or the preset, or else PPO.
        config: keys of its config, nested as it is, or a config.
        **settings: more of them, such as ``stop_return=475``, ``num_workers=4`` or ``resume="runs/mine"``; they win.
    Returns: the last result (empty if nothing was trained) with ``reason``, why it ended, ``run_dir`` and
        ``checkpoint``.

    Raises:
        ConfigError: a setting that cannot be honoured (also a ValueError).
        AiorlError: training failed, or its last checkpoint can't be written; what was learned until then is saved where
            that can be.
    """
    refuse_in_import("trains")
    values = {**settings_of(config), **settings}
    for name, value in (("algo", algo), ("env", env)):
        if value is not None:
            values[name] = value
    found = load_config(config_class, overrides=values, env_hint=ENV_HINT)
    os.environ.update(found.extra_python_environs_for_driver)
    creator_of(found)
    plan = plan_learning(found)
    loop = LoopThread("aiorl-run")
    try:
        with RunDirectory.open(plan.config) as directory, RunLog(directory, plan.config):
            # a live panel would be drawn over a debugger's prompt
            display = partial(PlainDisplay, stream=sys.stdout) if plan.config.is_alone else make_display
            run = Run(plan.config, directory, display, plan, loop)

            def stop() -> None:
                run.request_stop("Ended by Ctrl-C.")

            outcome = loop.call(run.run(), lambda: loop.soon(stop))
            run.show(run.summary(outcome))
    finally:
        loop.close()
    if not outcome.ok:
        raise AiorlError(outcome.reason)
    return {
        **outcome.result,
        "reason": outcome.reason,
        "run_dir": str(directory.path),
        "checkpoint": "" if run.training is None else run.training.newest_checkpoint,
    }
