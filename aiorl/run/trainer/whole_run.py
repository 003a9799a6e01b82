"""A whole run in one call, for programs; the counterpart of ``aiorl train``."""

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
from aiorl.run.run import Run
from aiorl.run.threads import LoopThread
from aiorl.run.trainer.trainer import ENV_HINT, creator_of, run_log, settings_of


def train(
    env: Any = None,
    *,
    algo: str | None = None,
    config: Mapping[str, Any] | CommonConfig | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train until a stop criterion is met or the user presses Ctrl-C.

    Like the command line, it shows progress, writes the run's files and saves a last checkpoint.
    Without workers (``num_workers=0``, no ``bind``), it samples and learns in the caller's thread,
    so that a debugger works.

    Args:
        env: the environment, as for `aiorl.Trainer`; with workers, one that they can import. None
            takes the config's or the preset's.
        algo: the algorithm; None takes the config's or the preset's, or else PPO.
        config: a config, or a nested dict of its keys.
        **settings: more keys, such as ``stop_return=475``, ``num_workers=4`` or
            ``resume="runs/mine"``. They override ``config``; a group such as ``env_config`` is
            merged into that of ``config``.

    Returns:
        The last result (empty if nothing was trained), plus ``reason`` (why the run ended),
        ``run_dir`` and ``checkpoint``.

    Raises:
        ConfigError: a setting is wrong or cannot be applied (also a ValueError).
        AiorlError: training failed, or the last checkpoint can't be written. Progress is saved if
            possible.
    """
    refuse_in_import("trains")
    for name, value in (("algo", algo), ("env", env)):
        if value is not None:
            settings[name] = value
    effective = load_config(
        config_class, settings=settings_of(config), overrides=settings, env_hint=ENV_HINT
    )
    os.environ.update(effective.extra_python_environs_for_driver)
    creator_of(effective)  # refuses an environment that does not exist before anything is made
    plan = plan_learning(effective)
    loop = LoopThread("aiorl-run")
    try:
        config_of_run = plan.config
        with (
            RunDirectory.open(config_of_run) as directory,
            run_log(directory, config_of_run),
        ):
            # a live panel would be drawn over a debugger's prompt
            plain = partial(PlainDisplay, stream=sys.stdout)
            display = plain if config_of_run.is_alone else make_display
            run = Run(config_of_run, directory, display, plan=plan, caller=loop)

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
