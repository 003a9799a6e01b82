"""Evaluations of a run while it trains: checkpoints, played by processes of their own or here; the best one is kept.

checkpoint in evaluation/ -> a process of `aiorl.run.evaluation` -> a result, and best/ if no other did as well
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
from aiorl.text import one_line

logger = logging.getLogger(__name__)

BEST = "best"
"""Directory of a run, in which the checkpoint is that did best in an evaluation."""
_DIRECTORY = "evaluation"
_SUMMARY = "evaluation.json"
_MAX_BYTES = 1 << 26
_MAX_REASON = 500
_FINISH_S = 10.0
_KINDS: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "min": min, "max": max}
_SEED = 0x65766131  # apart from the seeds of workers


class Evaluations(Observer):
    """Evaluates a run every ``evaluation_interval`` iterations, beside training or while that stands still.

    Attributes:
        is_beside: training goes on meanwhile.
        mean_return: of the newest evaluation; NaN before the first.
        holds_up: which evaluation training waits for, in plain words; "" for none.
        hurry: set when `finish` is to wait no longer.
    """

    def __init__(
        self, config: CommonConfig, run_dir: Path, tell: Callable[[str, int], None], *, can_play_here: bool = False
    ) -> None:
        """Evaluate nothing yet.

        Args:
            config: the effective configuration.
            run_dir: the run's directory.
            tell: told (text, logging level) what users want to know.
            can_play_here: training's source plays itself, unless the config wants processes.
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
        """Return whether training waits for the evaluation of an iteration."""
        return not self.is_beside and self.is_due(iteration)

    async def on_begin(self, training: Training) -> None:
        """Evaluate what training begins with."""
        iteration = training.results.training_iteration
        if self.is_due(iteration):
            await training.source.compiled()  # until then others use the policies
            await self._evaluate(training, iteration)

    async def after_iteration(self, training: Training, result: dict[str, Any]) -> None:
        """Evaluate if it is due, and add the newest evaluation that is finished to the result.

        At the end, wait a while for one that goes on beside training: what is being evaluated may be the best.
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
        """Whether an iteration of that number has an evaluation; 0 is the beginning of a run."""
        interval = self._config.evaluation_interval
        return bool(interval and iteration % interval == 0)

    async def _evaluate(self, training: Training, iteration: int) -> None:
        """Begin an evaluation beside training, unless one still goes on; or evaluate and wait for it."""
        if not self.is_beside:
            with contextlib.suppress(Ended):  # whoever looks next sees that
                await training.end.before(self._run(training, iteration))
        elif self._running is not None and not self._running.done():
            self._tell(
                f"iteration {iteration} is not evaluated, since the evaluation before it is still going on; "
                "a longer evaluation_interval or more evaluation_num_workers would let it",
                logging.WARNING,
            )
        else:
            self._running = self._tasks.start(self._run(training, iteration), "evaluation")

    async def _run(self, training: Training, iteration: int) -> None:
        """Evaluate and wait for it; nothing goes wrong that training would not survive."""
        if not self.is_beside:
            self.holds_up = f"training waits for the evaluation of iteration {iteration}, which goes on"
        try:
            shutil.rmtree(self._directory, ignore_errors=True)
            path = await training.saver.save_last(self._directory, with_experience=False)
            play = None if self.is_beside else training.source.play
            self._conclude(path, await self._play(play, path, iteration), iteration)
        except (AiorlError, OSError) as error:
            self._tell(f"the evaluation failed: {one_line(str(error), _MAX_REASON)}; training goes on", logging.ERROR)
        finally:
            self.holds_up = ""

    async def finish(self) -> None:
        """Wait a while for the evaluation that goes on beside training: what is being evaluated may be the best."""
        if self._running is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(first_of(self.hurry.wait(), self._running), _FINISH_S)

    def _conclude(self, path: Path, found: Mapping[str, Any], iteration: int) -> None:
        """Take a result in: the next result of training tells it, and the checkpoint is kept if it is the best."""
        self.mean_return = float(found["episode_reward_mean"])
        self._finished = {**found, "training_iteration": iteration}
        steps = int(found["env_steps_trained"])
        is_best = self._keep_if_best(path, self._finished)
        self._tell(
            f"evaluation after {steps:,} env steps: return {self.mean_return:,.1f} (deviation "
            f"{found['episode_reward_std']:,.1f}) over {found['episodes_this_iter']} episodes"
            + (", the best so far" if is_best else ""),
            logging.INFO,
        )

    async def close(self) -> None:
        """End the processes; an evaluation that is going on is left."""
        await self._tasks.close()
        for child in self._children:
            await child.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _play(self, play: Play | None, path: Path, iteration: int) -> dict[str, Any]:
        """Share the episodes out between the processes, and return the result of all."""
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
        """Keep the checkpoint in `BEST` if none before did as well."""
        if not self.mean_return > self._best_so_far():  # nor if it is no number
            return False
        try:
            with replaced_directory(self._best) as temporary:
                os.replace(path, temporary / path.name)
                (temporary / _SUMMARY).write_text(json.dumps(dict(found), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(self._best, f"can't be written: {error.strerror or error}.") from error
        return True

    def _best_so_far(self) -> float:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            summary = parse_json(read_regular(self._best / _SUMMARY, max_bytes=_MAX_BYTES))
            return float(summary["episode_reward_mean"])
        return -math.inf


def manner_of(config: CommonConfig) -> dict[str, Any]:
    """How evaluations are played by ``evaluation_config``, as arguments of `aiorl.evaluate`."""
    changes = dict(config.evaluation_config)
    return {"explore": bool(changes.pop("explore", False)), "config": changes}


def as_result(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What stands under ``evaluation`` in results, by the names used there.

    Args:
        found: what `Evaluation.to_dict` gives, of one or several processes.
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
    """A process that evaluates, started when it is first asked."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return its answer.

        Raises:
            EvaluationError: it failed.
        """
        line = await self._asked(request) or await self._asked(request)  # it may have ended since the last one
        if not line:
            raise EvaluationError("the process that evaluates has ended, and said nothing")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EvaluationError(str(answer["error"]))
        return answer

    async def _asked(self, request: Mapping[str, Any]) -> bytes:
        """Return the line that it answers, empty if it has ended."""
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
            if not line.endswith(b"\n"):  # a late answer would be taken for that to another request
                await self.close()
        return line

    async def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
