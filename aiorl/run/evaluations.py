"""Evaluations during training: checkpoints are played in separate processes or in this one, and the
best is kept.

checkpoint in evaluation/ -> a process of `aiorl.run.evaluation` -> a result, and best/ if none
scored as high before
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
from aiorl.config.parts import EvaluationPart
from aiorl.errors import AiorlError, CheckpointError, EvaluationError
from aiorl.process.imports import child_python, python_path
from aiorl.process.machine import usable_cores
from aiorl.process.replaced_file import replaced_directory
from aiorl.process.tasks import Tasks, first_of
from aiorl.run.end import Ended
from aiorl.run.observers import Observer
from aiorl.run.ports import Play, TrainingView
from aiorl.run.threads import BrokenOff
from aiorl.text import one_line, return_text

logger = logging.getLogger(__name__)

BEST = "best"
"""Directory of a run that contains the checkpoint with the best evaluation."""
_DIRECTORY = "evaluation"
_SUMMARY = "evaluation.json"
_MEASURED_WITH = "measured_with"
_MAX_BYTES = 1 << 26
_MAX_REASON = 500
_FINISH_S = 120.0
_KINDS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
}
_SEED = 0x65766131  # keeps these seeds distinct from the workers' seeds


class Evaluations(Observer):
    """Evaluates a run every ``evaluation_interval`` iterations, in parallel with training or while
    it is paused.

    Attributes:
        is_beside: True if training continues during an evaluation.
        mean_return: mean return of the newest evaluation; NaN before the first.
        holds_up: a description of the evaluation that training waits for, or "".
        hurry: set when `finish` must stop waiting, if nothing else says so.
        is_owed: True if the newest evaluation that was due did not take place, because another one
            was running.
    """

    def __init__(
        self,
        settings: EvaluationPart,
        run_dir: Path,
        tell: Callable[[str, int], None],
        *,
        can_play_here: bool = False,
    ) -> None:
        """Prepare without evaluating yet.

        Args:
            settings: when and how evaluations take place.
            run_dir: the run's directory.
            tell: called with (text, logging level) of news for the user.
            can_play_here: True if training's source can play evaluations itself; the settings can
                still require processes.
        """
        num_processes = settings.num_processes
        if num_processes is None:
            num_processes = int(not can_play_here and settings.num_workers + 1 < usable_cores())
        self.is_beside = num_processes > 0
        self.mean_return = math.nan
        self.holds_up = ""
        self._settings = settings
        self._directory = run_dir / _DIRECTORY
        self._best = run_dir / BEST
        self._tell = tell
        self._children = [_Child() for _ in range(max(1, num_processes))]
        self._tasks = Tasks(lambda error: None)
        self._running: asyncio.Task[None] | None = None
        self._finished: dict[str, Any] | None = None
        self._newest: int | None = None  # the iteration evaluated last
        self._env_changes: Mapping[str, Any] = {}  # that it played with
        self.hurry = asyncio.Event()
        self.is_owed = False

    # As an observer
    # ----------------------------------------------------------------------------------------------

    def needs_standstill(self, iteration: int) -> bool:
        """Return True if training waits for the evaluation of an iteration."""
        return not self.is_beside and self.is_due(iteration)

    async def on_begin(self, training: TrainingView) -> None:
        """Evaluate the policies that training begins with."""
        iteration = training.results.training_iteration
        if self.is_due(iteration):
            await training.compiled()  # until then the policies are in use
            await self._evaluate(training, iteration)

    async def after_iteration(self, training: TrainingView, result: dict[str, Any]) -> None:
        """Evaluate if an evaluation is due or training has ended, and add the newest finished one
        to the result.
        """
        iteration = result["training_iteration"]
        if training.end.has_come:
            # an evaluation that ended the run is its last one: the result has room for one
            last = None if self._has_reached_its_end() else iteration
            await self.finish(training, training.end.hurry, last=last)
        elif self.is_due(iteration):
            await self._evaluate(training, iteration)
        finished = self._finished
        self._finished = None
        if finished is not None:
            result["evaluation"] = finished

    def _has_reached_its_end(self) -> bool:
        """Return True if the newest evaluation, which no result has yet, met
        `stop_evaluation_return`.
        """
        goal = self._settings.stop_return
        return (
            goal is not None
            and self._finished is not None
            and self._finished["episode_reward_mean"] >= goal
        )

    def is_due(self, iteration: int) -> bool:
        """Return True if the iteration with this number has an evaluation; 0 is the beginning of a
        run.
        """
        interval = self._settings.interval
        return bool(interval and iteration % interval == 0)

    async def _evaluate(self, training: TrainingView, iteration: int) -> None:
        """Start an evaluation in parallel with training, unless one is still running; or evaluate
        and wait for it.
        """
        if not self.is_beside:
            with contextlib.suppress(Ended):  # the caller notices the end by itself
                await training.end.before(self._run(training, iteration))
        elif self._running is not None and not self._running.done():
            self._tell(
                f"iteration {iteration} is not evaluated, because the evaluation before it is still"
                " running; set a longer evaluation_interval or more evaluation_num_workers",
                logging.WARNING,
            )
            self.is_owed = True
        else:
            self._running = self._tasks.start(self._run(training, iteration), "evaluation")

    async def _run(self, training: TrainingView, iteration: int) -> None:
        """Evaluate and wait for the result. An error is reported and training continues."""
        self._newest = iteration
        self.is_owed = False
        if not self.is_beside:
            self.holds_up = (
                f"training waits for the evaluation of iteration {iteration}, which is still"
                " running"
            )
        try:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._env_changes = dict(training.learning.env_changes.made)
            path = await training.saver.save_last(self._directory, with_experience=False)
            play = None if self.is_beside else training.play
            self._conclude(path, await self._play(play, path, iteration), iteration)
        except (AiorlError, OSError) as error:
            self._tell(
                f"the evaluation failed: {one_line(str(error), _MAX_REASON)}; training continues",
                logging.ERROR,
            )
        finally:
            self.holds_up = ""

    async def finish(
        self, training: TrainingView, hurry: asyncio.Event, *, last: int | None = None
    ) -> None:
        """Evaluate the policies that training ends with, since they may turn out to be the best;
        this takes a while.

        Args:
            training: the training, which makes no more updates.
            hurry: set when there is no time to wait; it can also be set during the wait.
            last: number of the iteration to evaluate, unless it was; None only waits for an
                evaluation that is running.
        """
        if not self._settings.interval or hurry.is_set():
            return
        ending = self._tasks.start(self._finish(training, last), "last evaluation")
        try:
            async with asyncio.timeout(_FINISH_S):
                await first_of(hurry.wait(), ending)
        except TimeoutError:
            self._tell(
                f"the last evaluation takes longer than {_FINISH_S:g} s and is left out",
                logging.WARNING,
            )
        finally:
            ending.cancel()
            self.holds_up = ""

    async def _finish(self, training: TrainingView, last: int | None) -> None:
        if self._running is not None and not self._running.done():
            self.holds_up = (
                "the end waits for an evaluation, which is still running (Ctrl-C ends without it)"
            )
            await asyncio.wait([self._running])
        if last is None or last == self._newest:
            return
        with contextlib.suppress(CheckpointError):  # reported when the run is saved at its end
            await training.saver.save_all()  # the evaluation may take longer than the process lives
        self._tell(
            f"evaluating iteration {last}, the last one (Ctrl-C ends without it)", logging.INFO
        )
        self.holds_up = (
            "the end waits for the last evaluation, which is still running (Ctrl-C ends without it)"
        )
        with contextlib.suppress(Ended, BrokenOff):  # Ctrl-C in this process
            await self._run(training, last)

    def _conclude(self, path: Path, result: Mapping[str, Any], iteration: int) -> None:
        """Record an evaluation for the next result of training, and keep its checkpoint if it is
        the best.
        """
        self.mean_return = float(result["episode_reward_mean"])
        self._finished = {**result, "training_iteration": iteration}
        message = (
            f"evaluation after {int(result['env_steps_trained']):,} env steps: return"
            f" {return_text(self.mean_return)}"
            f" (deviation {result['episode_reward_std']:,.1f}) over {result['episodes_this_iter']}"
            " episodes"
        )
        if self._keep_if_best(path, self._finished):
            message += ", the best so far"
        self._tell(message, logging.INFO)

    async def close(self) -> None:
        """End the processes and abandon a running evaluation."""
        await self._tasks.close()
        for child in self._children:
            await child.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _play(self, play: Play | None, path: Path, iteration: int) -> dict[str, Any]:
        """Divide the episodes among the processes and return the combined result."""
        settings = self._settings
        seed = None
        if settings.seed is not None:
            seeds = np.random.SeedSequence((settings.seed, _SEED, iteration))
            seed = int(seeds.generate_state(1)[0] >> 1)  # of 31 bits, which every environment takes
        request = {
            "episodes": settings.num_episodes,
            "seed": seed,
            **evaluate_arguments(settings.changes),
        }
        if play is not None:
            return as_result([await play(path, request)])
        request["checkpoint"] = str(path)
        shares = np.array_split(np.arange(settings.num_episodes), len(self._children))
        answers = [
            child.ask(
                {
                    **request,
                    "episodes": len(share),
                    "seed": None if seed is None else seed + position,
                }
            )
            for position, (child, share) in enumerate(zip(self._children, shares, strict=True))
            if len(share)
        ]
        # an error is raised only when every child has answered, and can be asked again
        results = await asyncio.gather(*answers, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return as_result([result for result in results if isinstance(result, dict)])

    def _keep_if_best(self, path: Path, result: Mapping[str, Any]) -> bool:
        """Keep the checkpoint in `BEST` if it beats all before it that were measured in the same
        way.
        """
        measure = self._measure()
        best = self._best_so_far()
        # earlier versions did not record how they had measured
        is_comparable = best.get(_MEASURED_WITH, measure) == measure
        score_to_beat = _score(best) if is_comparable else -math.inf
        if not self.mean_return > score_to_beat:  # also for NaN
            return False
        summary = json.dumps({**result, _MEASURED_WITH: measure}, indent=1)
        try:
            if not is_comparable:
                self._put_aside(best)
            with replaced_directory(self._best) as temporary:
                os.replace(path, temporary / path.name)
                (temporary / _SUMMARY).write_text(f"{summary}\n", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                self._best, f"it cannot be written: {error.strerror or error}."
            ) from error
        return True

    def _best_so_far(self) -> dict[str, Any]:
        """Return the evaluation of the best checkpoint; empty if there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(parse_json(read_regular(self._best / _SUMMARY, max_bytes=_MAX_BYTES)))
        return {}

    def _put_aside(self, best: Mapping[str, Any]) -> None:
        """Rename the best checkpoint of evaluations by other settings, which no new score can be
        compared with.
        """
        aside = self._best.with_name(f"{BEST}-{best.get('training_iteration', 'before')}")
        if aside.exists():
            shutil.rmtree(aside)
        os.replace(self._best, aside)
        self._tell(
            f"evaluations have other settings than those of {BEST}/, which is now {aside.name}/:"
            " their scores can't be compared",
            logging.WARNING,
        )

    def _measure(self) -> dict[str, Any]:
        """Return the settings that decide what a score measures, as they come back from a file."""
        measure = dict(self._settings.measure)
        fixed = self._settings.changes.get("env_config", {})
        changes = {name: value for name, value in self._env_changes.items() if name not in fixed}
        if changes:
            measure["env_config"] = {**measure["env_config"], **changes}
        return dict(json.loads(json.dumps(measure, default=repr)))


def _score(evaluation: Mapping[str, Any]) -> float:
    with contextlib.suppress(KeyError, ValueError, TypeError):
        return float(evaluation["episode_reward_mean"])
    return -math.inf


def evaluate_arguments(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `aiorl.evaluate` that follow from ``evaluation_config``."""
    config = dict(changes)
    return {"explore": bool(config.pop("explore", False)), "config": config}


def as_result(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``evaluation`` entry of results, by the names used there.

    Args:
        evaluations: results of `Evaluation.to_dict`, from one or several processes.
    """
    returns = [value for evaluation in evaluations for value in evaluation["returns"]]
    lengths = [value for evaluation in evaluations for value in evaluation["lengths"]]
    policies: dict[str, list[float]] = {}
    custom: dict[str, list[float]] = {}
    for evaluation in evaluations:
        for series, name in ((policies, "policy_returns"), (custom, "custom_metrics")):
            for key, values in evaluation[name].items():
                series.setdefault(key, []).extend(values)
    return {
        "episodes_this_iter": len(returns),
        **{f"episode_reward_{kind}": summary(returns) for kind, summary in _KINDS.items()},
        "episode_reward_std": float(np.std(returns)),
        "episode_len_mean": float(np.mean(lengths)),
        **{
            f"policy_reward_{kind}": {
                policy_id: summary(values) for policy_id, values in policies.items()
            }
            for kind, summary in _KINDS.items()
        },
        "custom_metrics": {
            f"{name}_{kind}": summary(values)
            for name, values in custom.items()
            for kind, summary in _KINDS.items()
        },
        "env_steps_trained": int(evaluations[0]["env_steps"]),
        "explore": bool(evaluations[0]["explore"]),
        "seed": evaluations[0]["seed"],
        "seeds": [evaluation["seed"] for evaluation in evaluations],
        "episodes_of_seeds": [len(evaluation["returns"]) for evaluation in evaluations],
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
        is_used = self._process is not None
        line = await self._answer(request)
        if not line and is_used:  # it may have ended since the last request
            line = await self._answer(request)
        if not line:
            raise EvaluationError("the evaluation process ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EvaluationError(str(answer["error"]))
        return answer

    async def _answer(self, request: Mapping[str, Any]) -> bytes:
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
        requests = self._process.stdin
        answers = self._process.stdout
        assert requests is not None
        assert answers is not None
        line = b""
        try:
            with contextlib.suppress(ConnectionError):
                requests.write(json.dumps(dict(request)).encode() + b"\n")
                await requests.drain()
                line = await answers.readline()
        finally:
            # a late answer would be taken for the answer to another request
            if not line.endswith(b"\n"):
                await self.close()
        return line

    async def close(self) -> None:
        """Kill the process, if one is running."""
        process = self._process
        self._process = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
