"""Evaluations during training: checkpoints are played in separate processes or in this one, and the best is kept.

checkpoint in evaluation/ -> a process of `aiorl.run.evaluation` -> a result, and best/ if none scored as high before
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aiorl.config.files import parse_json, read_regular
from aiorl.config.schema import CommonConfig
from aiorl.errors import AiorlError, CheckpointError, EvaluationError
from aiorl.process.imports import child_python, python_path
from aiorl.process.machine import usable_cores
from aiorl.process.replaced_file import replaced_directory
from aiorl.process.tasks import Tasks, first_of
from aiorl.run.training import Ended, Observer, Play, Training
from aiorl.text import one_line, return_text

logger = logging.getLogger(__name__)

BEST = "best"
"""Directory of a run that contains the checkpoint with the best evaluation."""
_DIRECTORY = "evaluation"
_SUMMARY = "evaluation.json"
_MAX_BYTES = 1 << 26
_MAX_REASON = 500
_FINISH_S = 10.0
_KINDS: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "min": min, "max": max}
_SEED = 0x65766131  # keeps these seeds distinct from the workers' seeds


class Evaluations(Observer):
    """Evaluates a run every ``evaluation_interval`` iterations, in parallel with training or while it is paused.

    Attributes:
        is_beside: True if training continues during an evaluation.
        mean_return: mean return of the newest evaluation; NaN before the first.
        holds_up: a description of the evaluation that training waits for, or "".
        hurry: set when `finish` must stop waiting.
    """

    def __init__(
        self, config: CommonConfig, run_dir: Path, tell: Callable[[str, int], None], *, can_play_here: bool = False
    ) -> None:
        """Prepare without evaluating yet.

        Args:
            config: the effective configuration.
            run_dir: the run's directory.
            tell: called with (text, logging level) of news for the user.
            can_play_here: True if training's source can play evaluations itself; the config can still require
                processes.
        """
        num_workers = config.evaluation_num_workers
        if num_workers is None:
            num_workers = int(not can_play_here and config.num_workers + 1 < usable_cores())
        self.is_beside = num_workers > 0
        self.mean_return = math.nan
        self.holds_up = ""
        self._config = config
        self._directory = run_dir / _DIRECTORY
        self._best = run_dir / BEST
        self._tell = tell
        self._children = [_Child() for _ in range(max(1, num_workers))]
        self._tasks = Tasks(lambda error: None)
        self._running: asyncio.Task[None] | None = None
        self._finished: dict[str, Any] | None = None
        self.hurry = asyncio.Event()

    # As an observer -----------------------------------------------------------------------------------------

    def needs_standstill(self, iteration: int) -> bool:
        """Return True if training waits for the evaluation of an iteration."""
        return not self.is_beside and self.is_due(iteration)

    async def on_begin(self, training: Training) -> None:
        """Evaluate the policies that training begins with."""
        iteration = training.results.training_iteration
        if self.is_due(iteration):
            await training.source.compiled()  # until then the policies are in use
            await self._evaluate(training, iteration)

    async def after_iteration(self, training: Training, result: dict[str, Any]) -> None:
        """Evaluate if an evaluation is due, and add the newest finished evaluation to the result.

        At the end, wait a while for an evaluation that runs in parallel, since it may turn out to be the best.
        """
        if training.end.has_come:
            if not training.end.hurry.is_set():
                await self.finish()
        elif self.is_due(result["training_iteration"]):
            await self._evaluate(training, result["training_iteration"])
        finished, self._finished = self._finished, None
        if finished is not None:
            result["evaluation"] = finished

    def is_due(self, iteration: int) -> bool:
        """Return True if the iteration with this number has an evaluation; 0 is the beginning of a run."""
        interval = self._config.evaluation_interval
        return bool(interval and iteration % interval == 0)

    async def _evaluate(self, training: Training, iteration: int) -> None:
        """Start an evaluation in parallel with training, unless one is still running; or evaluate and wait for it."""
        if not self.is_beside:
            with contextlib.suppress(Ended):  # the caller notices the end by itself
                await training.end.before(self._run(training, iteration))
        elif self._running is not None and not self._running.done():
            self._tell(
                f"iteration {iteration} is not evaluated, because the evaluation before it is still running; "
                "set a longer evaluation_interval or more evaluation_num_workers",
                logging.WARNING,
            )
        else:
            self._running = self._tasks.start(self._run(training, iteration), "evaluation")

    async def _run(self, training: Training, iteration: int) -> None:
        """Evaluate and wait for the result. An error is reported and training continues."""
        if not self.is_beside:
            self.holds_up = f"training waits for the evaluation of iteration {iteration}, which is still running"
        try:
            shutil.rmtree(self._directory, ignore_errors=True)
            path = await training.saver.save_last(self._directory, with_experience=False)
            play = None if self.is_beside else training.source.play
            self._conclude(path, await self._play(play, path, iteration), iteration)
        except (AiorlError, OSError) as error:
            self._tell(f"the evaluation failed: {one_line(str(error), _MAX_REASON)}; training continues", logging.ERROR)
        finally:
            self.holds_up = ""

    async def finish(self) -> None:
        """Wait a while for an evaluation that runs in parallel, since it may turn out to be the best."""
        if self._running is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(first_of(self.hurry.wait(), self._running), _FINISH_S)

    def _conclude(self, path: Path, found: Mapping[str, Any], iteration: int) -> None:
        """Record an evaluation for the next result of training, and keep its checkpoint if it is the best."""
        self.mean_return = float(found["episode_reward_mean"])
        self._finished = {**found, "training_iteration": iteration}
        steps = int(found["env_steps_trained"])
        is_best = self._keep_if_best(path, self._finished)
        self._tell(
            f"evaluation after {steps:,} env steps: return {return_text(self.mean_return)} (deviation "
            f"{found['episode_reward_std']:,.1f}) over {found['episodes_this_iter']} episodes"
            + (", the best so far" if is_best else ""),
            logging.INFO,
        )

    async def close(self) -> None:
        """End the processes and abandon a running evaluation."""
        await self._tasks.close()
        for child in self._children:
            await child.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _play(self, play: Play | None, path: Path, iteration: int) -> dict[str, Any]:
        """Divide the episodes among the processes and return the combined result."""
        config, seed = self._config, None
        if config.seed is not None:
            seed = int(np.random.SeedSequence((config.seed, _SEED, iteration)).generate_state(1)[0] >> 1)
        request = {"episodes": config.evaluation_num_episodes, "seed": seed, **manner_of(config)}
        if play is not None:
            return as_result([await play(path, request)])
        request["checkpoint"] = str(path)
        shares = np.array_split(np.arange(config.evaluation_num_episodes), len(self._children))
        asked = [
            child.ask({**request, "episodes": len(own), "seed": None if seed is None else seed + position})
            for position, (child, own) in enumerate(zip(self._children, shares, strict=True))
            if len(own)
        ]
        found = await asyncio.gather(*asked, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return as_result([each for each in found if isinstance(each, dict)])

    def _keep_if_best(self, path: Path, found: Mapping[str, Any]) -> bool:
        """Keep the checkpoint in `BEST` if it beats all before it."""
        if not self.mean_return > self._best_so_far():  # also False for NaN
            return False
        try:
            with replaced_directory(self._best) as temporary:
                os.replace(path, temporary / path.name)
                (temporary / _SUMMARY).write_text(json.dumps(dict(found), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(self._best, f"it cannot be written: {error.strerror or error}.") from error
        return True

    def _best_so_far(self) -> float:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            summary = parse_json(read_regular(self._best / _SUMMARY, max_bytes=_MAX_BYTES))
            return float(summary["episode_reward_mean"])
        return -math.inf


def manner_of(config: CommonConfig) -> dict[str, Any]:
    """Return the arguments of `aiorl.evaluate` that follow from ``evaluation_config``."""
    changes = dict(config.evaluation_config)
    return {"explore": bool(changes.pop("explore", False)), "config": changes}


def as_result(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``evaluation`` entry of results, by the names used there.

    Args:
        found: results of `Evaluation.to_dict`, from one or several processes.
    """
    returns = [value for each in found for value in each["returns"]]
    policies: dict[str, list[float]] = {}
    custom: dict[str, list[float]] = {}
    for all_of, name in ((policies, "policy_returns"), (custom, "custom_metrics")):
        for each in found:
            for key, values in each[name].items():
                all_of.setdefault(key, []).extend(values)
    return {
        "episodes_this_iter": len(returns),
        **{f"episode_reward_{kind}": of(returns) for kind, of in _KINDS.items()},
        "episode_reward_std": float(np.std(returns)),
        "episode_len_mean": float(np.mean([value for each in found for value in each["lengths"]])),
        **{f"policy_reward_{kind}": {name: of(own) for name, own in policies.items()} for kind, of in _KINDS.items()},
        "custom_metrics": {f"{name}_{kind}": of(own) for name, own in custom.items() for kind, of in _KINDS.items()},
        "env_steps_trained": int(found[0]["env_steps"]),
        "explore": bool(found[0]["explore"]),
        "seed": found[0]["seed"],
    }


class _Child:
    """An evaluation process, started by the first request."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            EvaluationError: the evaluation failed.
        """
        was_there = self._process is not None
        line = await self._asked(request)
        if not line and was_there:  # it may have ended since the last request
            line = await self._asked(request)
        if not line:
            raise EvaluationError("the evaluation process ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EvaluationError(str(answer["error"]))
        return answer

    async def _asked(self, request: Mapping[str, Any]) -> bytes:
        """Return the line answered, empty if the process has ended."""
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *child_python("aiorl.run.evaluation"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_BYTES,
                start_new_session=True,
                env={**os.environ, **python_path(), "OMP_NUM_THREADS": "1"},
            )
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        line = b""
        try:
            with contextlib.suppress(ConnectionError):
                requests.write(json.dumps(dict(request)).encode() + b"\n")
                await requests.drain()
                line = await answers.readline()
        finally:
            if not line.endswith(b"\n"):  # a late answer would be taken for the answer to another request
                await self.close()
        return line

    async def close(self) -> None:
        """Kill the process, if one is running."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
