"""Evaluation: whole episodes played with a saved policy, in this process, without TensorFlow.

result = aiorl.evaluate("runs/ppo_CartPole-v1_...", episodes=20)
print(result.mean, result.std)
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aiorl.acting.acting_state import SavedRun
from aiorl.config.worker import OF_EVALUATIONS
from aiorl.data.metrics import EpisodeColumns, RolloutMetrics
from aiorl.env.gym_like import picture_of
from aiorl.env.registry import CLIENT_ENV
from aiorl.errors import AiorlError, ConfigError, described
from aiorl.process.children import watch_parent
from aiorl.process.imports import find_modules_here, needed_by
from aiorl.process.replaced_file import replaced
from aiorl.run.worker.sampler_unit import settings_of_run
from aiorl.sampling.callbacks import DefaultCallbacks, named_callbacks
from aiorl.sampling.policies import learned_policies
from aiorl.sampling.settings import IOSettings
from aiorl.sampling.worker import Worker

if TYPE_CHECKING:
    from aiorl.config.worker import WorkerPart

_FPS = 30
_VIDEOS = (".mp4", ".mkv", ".mov")
_FILMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        checkpoint: path of the checkpoint.
        algo: the algorithm that trained it.
        env: name of the environment.
        env_steps: env steps trained on before the checkpoint.
        seed: seed of the environment and of all random draws; None for an environment without
            seeds.
        explore: True if actions were sampled; False if the most likely ones were taken.
        returns: undiscounted return of each episode with unscaled rewards, summed over all agents.
        lengths: env steps of each episode.
        policy_returns: policy id -> returns of its agents, one for each agent and episode; empty
            for a single agent.
        custom_metrics: name -> values recorded by the run's callbacks, one for each episode that
            has it.
        video: path of the video; None without one.
    """

    checkpoint: str
    algo: str
    env: str
    env_steps: int
    seed: int | None
    explore: bool
    returns: list[float]
    lengths: list[int]
    policy_returns: dict[str, list[float]]
    custom_metrics: dict[str, list[float]]
    video: str | None = None

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """Standard deviation of the returns (ddof 0)."""
        return float(np.std(self.returns))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data with the mean, standard deviation, minimum and maximum of the
        returns.
        """
        return {
            "mean": self.mean,
            "std": self.std,
            "min": min(self.returns),
            "max": max(self.returns),
            "episodes": len(self.returns),
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
        }


def evaluate(
    path: str | Path,
    *,
    episodes: int = 10,
    seed: int | None = None,
    explore: bool = False,
    video: str | Path | None = None,
    render: Literal["human"] | None = None,
    output: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    on_episode: Callable[[RolloutMetrics], None] = lambda episode: None,
) -> Evaluation:
    """Play whole episodes with the policies of a checkpoint, one after the other, in a single
    environment.

    The environment and its wrappers are the same as in training. Filter statistics stay as they are
    in the checkpoint.

    Args:
        path: a checkpoint, a run directory or a directory of checkpoints. For a directory, the
            newest intact checkpoint in it is used.
        episodes: number of episodes to play.
        seed: seed of the environment and of all random draws; None draws a new one, which the
            result contains.
        explore: True samples actions from their distribution; False takes the most likely ones.
        video: file for a video of the first three episodes, such as ``cartpole.mp4``; requires the
            extra ``video``.
        render: "human" shows the environment in a window, if it supports that.
        output: directory or URI where the episodes are stored, for offline training or off-policy
            estimation. Rows contain the data that the policy's algorithm trains on: filtered
            observations, or unfiltered ones if the algorithm filters during training.
        config: worker keys to override, nested as in the config, such as ``{"env_config": {...}}``.
            ``seed`` and the keys that decide how environments are stepped cannot be overridden.
        on_episode: called with each episode as it ends.

    Returns:
        Returns, lengths and other figures of the episodes, with the seed used.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be used.
        ConfigError: an argument cannot be honoured, or the environment is not installed or cannot
            render images.
        EnvError: the environment failed.
        ImportError: a network runs only in TensorFlow, which is not installed.
    """
    for key, value, least in (("episodes", episodes, 1), ("seed", 0 if seed is None else seed, 0)):
        if not isinstance(value, int | np.integer) or value < least:
            message = f"{key} is {value!r:.50}, expected a whole number of at least {least}."
            raise ConfigError(message, key=key, value=value)
    if video is not None and render is not None:
        raise ConfigError(
            "an evaluation is filmed or shown in a window, not both.", key="video", value=str(video)
        )
    run = SavedRun.open(path)
    # the run's own output must not receive these episodes
    part = run.acting.part.for_evaluation(
        {"output": None if output is None else str(output), **(config or {})}
    )
    if part.env == CLIENT_ENV:
        raise ConfigError(
            "clients play this environment, so nothing here can play its episodes.",
            key="env",
            value=part.env,
            hint="Let clients play with `aiorl serve`, or step an environment of your own with the"
            " actions of aiorl.load_policy.",
        )
    if seed is None and part.seed is not None:  # otherwise the environment takes no seed
        seed = secrets.randbits(31)
    mode = render if video is None else "rgb_array"
    env_config = dict(part.env_config)
    if mode is not None:
        env_config["render_mode"] = mode
    part = part.model_copy(update={**OF_EVALUATIONS, "seed": seed, "env_config": env_config})
    film_or_none = contextlib.nullcontext() if video is None else _filmed(Path(video))
    with film_or_none as film, _worker(run, part, explore, film) as worker:
        played = _play(worker, episodes, on_episode)
    columns = EpisodeColumns.of(played)
    return Evaluation(
        checkpoint=str(run.checkpoint.path),
        algo=run.acting.part.algo,
        env=part.env,
        env_steps=run.env_steps,
        seed=seed,
        explore=explore,
        returns=columns.rewards.tolist(),
        lengths=columns.lengths.tolist(),
        policy_returns={name: values.tolist() for name, values in columns.policy_rewards.items()},
        custom_metrics={name: values.tolist() for name, values in columns.custom.items()},
        video=None if video is None else str(video),
    )


def _worker(
    run: SavedRun, part: WorkerPart, explore: bool, film: Callable[[Any], None] | None
) -> Worker:
    """Make a worker that samples whole episodes with a run's policies."""
    settings: dict[str, Any] = {}
    if film is not None:
        settings["callbacks"] = _filming(named_callbacks(part.callbacks) or DefaultCallbacks, film)
    if part.output is not None:
        from aiorl.offline.sources import configured_output  # loaded only if episodes are stored

        settings["io"] = IOSettings(output_creator=configured_output(part))
    policies = learned_policies(part, run.acting.graphs, explore=explore)
    worker = Worker(settings_of_run(part, policies, **settings))
    try:
        worker.set_weights({policy_id: run.weights(policy_id) for policy_id in run.acting.graphs})
        for policy_id, statistics in worker.filters.items():
            run.restore_filter(policy_id, statistics)
            statistics.is_frozen = True
        worker.set_global_vars({"timestep": run.env_steps})  # exploration schedules depend on it
    except BaseException:
        worker.stop()
        raise
    return worker


def _play(
    worker: Worker, episodes: int, on_episode: Callable[[RolloutMetrics], None]
) -> list[RolloutMetrics]:
    played: list[RolloutMetrics] = []
    while len(played) < episodes:
        worker.sample()
        for episode in worker.get_metrics():
            if isinstance(episode, RolloutMetrics) and len(played) < episodes:
                played.append(episode)
                on_episode(episode)
    return played


def _filming(base: type[DefaultCallbacks], film: Callable[[Any], None]) -> type[DefaultCallbacks]:
    """Return a subclass of the run's callbacks that also films the first episodes."""

    class Filming(base):  # type: ignore[misc, valid-type]  # the class that the run uses
        """Takes a picture at the start of an episode and after each step."""

        num_ended = 0

        def on_episode_start(self, *, base_env: Any, **kwargs: Any) -> None:
            """See `DefaultCallbacks.on_episode_start`."""
            super().on_episode_start(base_env=base_env, **kwargs)
            if self.num_ended < _FILMED:
                film(base_env.get_unwrapped()[0])

        def on_episode_step(self, *, base_env: Any, **kwargs: Any) -> None:
            """See `DefaultCallbacks.on_episode_step`."""
            super().on_episode_step(base_env=base_env, **kwargs)
            if self.num_ended < _FILMED:
                film(base_env.get_unwrapped()[0])

        def on_episode_end(self, **kwargs: Any) -> None:
            """See `DefaultCallbacks.on_episode_end`."""
            super().on_episode_end(**kwargs)
            self.num_ended += 1

    return Filming


@contextlib.contextmanager
def _filmed(path: Path) -> Iterator[Callable[[Any], None]]:
    """Yield a function that adds a picture of an environment to a video; the file appears unless
    the block fails.

    Raises:
        ConfigError: a package for videos is not installed, the file name is unsuitable, or the
            environment cannot render images.
    """
    if path.suffix.lower() not in _VIDEOS:
        message = f"video is {str(path)!r}, expected a file name that ends in {', '.join(_VIDEOS)}."
        raise ConfigError(message, key="video", value=str(path))
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"video is {str(path)!r}, but this directory does not exist.",
            key="video",
            value=str(path),
        )
    with needed_by("a video", "moviepy", "video", key="video", value=str(path)):
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

    writer: Any = None
    size = (0, 0)

    def take(env: Any) -> None:
        nonlocal writer, size
        try:
            frame = np.asarray(picture_of(env))
        except Exception as error:  # an environment that cannot render may raise anything
            raise _no_picture(env, repr(error)) from error
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise _no_picture(
                env,
                f"render() gave {frame.dtype} of shape {frame.shape}, not uint8 [height, width, 3]",
            )
        height, width = (side - side % 2 for side in frame.shape[:2])  # players need even sizes
        if writer is None:
            size = (height, width)
            fps = getattr(env, "metadata", {}).get("render_fps") or _FPS
            writer = FFMPEG_VideoWriter(str(temporary), (width, height), fps, logfile=None)
        if (height, width) != size:
            raise _no_picture(
                env, f"the size of its pictures changed from {size} to {(height, width)} pixels"
            )
        writer.write_frame(np.ascontiguousarray(frame[:height, :width]))

    with replaced(path) as temporary:
        try:
            yield take
        finally:
            if writer is not None:
                writer.close()


def _no_picture(env: Any, reason: str) -> ConfigError:
    inner = getattr(env, "unwrapped", env)
    name = getattr(getattr(inner, "spec", None), "id", type(inner).__name__)
    return ConfigError(
        f"{name} can't be filmed: {reason:.300}.",
        key="video",
        hint='It must accept render_mode="rgb_array" and return images from render().',
    )


def main() -> int:
    """Evaluate checkpoints for a learner until standard input ends; the exit status is 0.

    Each request is a line of JSON on standard input: ``{"checkpoint": path, "episodes": 10, "seed":
    1, "explore": false, "config": {}}``. The answer is a line of JSON on standard output:
    `Evaluation.to_dict`, or ``{"error": text}``.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    find_modules_here()
    os.dup2(2, 1)  # environments that print must not write among the answers
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    watch_parent(lambda: lines.put(None), on_line=lines.put)
    for line in iter(lines.get, None):
        request = json.loads(line)
        try:
            answer = evaluate(request.pop("checkpoint"), **request).to_dict()
        except Exception as error:  # the user's code may raise anything
            answer = {"error": str(error) if isinstance(error, AiorlError) else described(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
