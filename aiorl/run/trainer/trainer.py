"""Base class of trainers, which train one iteration per call.

with PPOConfig(env="CartPole-v1", num_workers=2, seed=1).build() as trainer:
    for result in trainer.iterate(stop_return=475):
        print(result["episode_reward_mean"])
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import Checkpoint, check_compatible
from aiorl.acting.run_dir import RunDirectory
from aiorl.config import with_base_config
from aiorl.config.code import is_import_path, refuse_in_import
from aiorl.config.layers import (
    Layer,
    load_config,
    merged,
    refuse_keys_of_new_runs,
    restore_withheld,
)
from aiorl.config.parts import RunParts
from aiorl.config.rllib_file import no_attribute
from aiorl.config.schema import CommonConfig
from aiorl.env.registry import EnvCreator, name_elsewhere, resolve_env
from aiorl.errors import CheckpointError, ConfigError, EndOfData, WorkerError
from aiorl.run.local_workers import HINT
from aiorl.run.observers import RunFiles, StopFigures
from aiorl.run.report.console import with_progress_line
from aiorl.run.report.log_files import RunLog
from aiorl.run.report.loggers import Logger
from aiorl.run.restoring import Restored, checkpoint_to_resume
from aiorl.run.run import criteria_of, headline_of
from aiorl.run.trainer.resources import ResourceRequest, default_resource_request, resource_help
from aiorl.run.training import report
from aiorl.sampling.callbacks import DefaultCallbacks

logger = logging.getLogger(__name__)

_MAX_RETRIES = 3

ENV_HINT = "Give one: env='CartPole-v1'."


class Restore:
    """Descriptor of ``Trainer.restore``: called on a class it makes a trainer, called on a trainer
    it changes it.
    """

    def __get__(self, trainer: Trainer | None, kind: type[Trainer]) -> Callable[..., Any]:
        """See ``Trainer.restore``."""
        if trainer is None:
            return functools.partial(_restored, kind)
        return functools.partial(_restore_into, trainer)


def _restored(kind: type[Trainer], path: str | Path, **changes: Any) -> Trainer:
    """Make a trainer that continues from a checkpoint; ``changes`` are merged into its config."""
    restored = Restored.find(path, ActingState.from_checkpoint)
    config = dict(ActingState.load(restored.checkpoint).config)
    restore_withheld(config)
    if not kind._name:
        algo = str(config.get("algo"))
        named = (other._named(algo) for other in [kind, *_subclasses(kind)])
        match = next(filter(None, named), None)
        if match is None and is_import_path(algo):  # a user's own algorithm
            candidates = (other._made_for(algo) for other in _subclasses(Trainer))
            match = next(filter(None, candidates), None)
        if match is None:
            raise CheckpointError(
                restored.checkpoint.path,
                f"it belongs to the algorithm {algo!r:.50}, which has no trainer here",
            )
        kind = match
    path_read = str(restored.checkpoint.path)
    refuse_keys_of_new_runs(changes, path_read, "begin a new run")
    layers = [Layer({**config, "init_from": None}, path_read, is_record=True), Layer(changes)]
    return kind(kind._merged(layers), checkpoint=restored)


def _restore_into(trainer: Trainer, path: str | Path) -> None:
    """Continue from a checkpoint in the run's directory.

    A checkpoint that doesn't fit is refused before any change.
    """
    restored = Restored.find(path)
    trainer._check_fits(restored.checkpoint)
    trainer._is_final = False
    trainer.stop()
    trainer._is_final = True
    trainer.config = trainer.config.updated({"resume": trainer.logdir})
    trainer._restored = restored
    trainer._open(creator_of(trainer.config))


def _subclasses(kind: type[Trainer]) -> Iterator[type[Trainer]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@dataclass(slots=True)
class _Output:
    """Places for the results of a trainer.

    Attributes:
        files: the run's files and ports.
        writer: writes the results: the files, or the user's logger.
        unwritten: the newest result until it is written.
    """

    files: RunFiles
    writer: RunFiles | Logger
    unwritten: dict[str, Any] | None = None

    def write(self) -> None:
        """Write the newest result, once."""
        result = self.unwritten
        self.unwritten = None
        if result is not None:
            self.writer.write(result)


class Trainer:
    """One training run that a program controls; each call of ``train`` runs one iteration.

    A subclass names its algorithm and its config, builds its parts in ``_init`` and trains for one
    iteration in ``_train``. Use a trainer from one thread at a time. Several trainers in one
    process are independent.

    Attributes:
        config: the effective configuration.
        raw_user_config: the keys that the user set.
        iteration: number of iterations finished, including those before a restore.
        global_vars: ``timestep``: env steps sampled before the current iteration.
    """

    _name: ClassVar[str] = ""
    _default_config: ClassVar[type[CommonConfig] | None] = None
    _allow_unknown_configs: ClassVar[bool] = False
    _is_final = True
    """True if `stop` ends training; false if training then continues in place."""
    _is_hurried = False
    """True if the user has pressed Ctrl-C and is waiting for the end."""

    def __init__(
        self,
        config: Mapping[str, Any] | CommonConfig | None = None,
        env: Any = None,
        logger_creator: Callable[[dict[str, Any]], Logger] | None = None,
        *,
        checkpoint: str | Path | Restored | None = None,
    ) -> None:
        """Build everything and start the first workers; this takes a few seconds.

        Args:
            config: a config, or a nested dict of the keys that differ from the algorithm's
                defaults.
            env: the environment: a name (see `aiorl.env.registry`), a class, or a function that
                takes an EnvContext. Overrides ``config["env"]``.
            logger_creator: function that takes the effective config and returns a logger. The
                logger gets each result; the run's own result files are not written.
            checkpoint: the checkpoint to continue from: a path into the run that wrote it, or a
                loaded checkpoint.

        Raises:
            ConfigError: a setting is wrong or cannot be applied (also a ValueError).
            NotImplementedError: the class names no algorithm or config, or has no ``_init``.
            AiorlError: the run cannot be built.
        """
        self._why_stopped = "has not begun"
        self._turn = threading.RLock()
        refuse_in_import("makes a trainer")
        self.raw_user_config, self.config = self._effective(config, env)
        os.environ.update(self.config.extra_python_environs_for_driver)
        creator = creator_of(self.config)
        if isinstance(checkpoint, str | Path):
            checkpoint = Restored.find(checkpoint)
        self._restored = checkpoint
        self.global_vars: dict[str, Any] = {"timestep": 0}
        self.iteration = 0
        self._logger_creator = logger_creator
        self._open(creator)

    if not TYPE_CHECKING:  # type checkers should know the real attributes only

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown attribute, with a hint if trainers of other libraries have it."""
            raise no_attribute("trainer", self, name)

    @property
    def logdir(self) -> str:
        """Path of the run directory."""
        return str(self._directory.path)

    @classmethod
    def with_common_config(cls, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Return the class's default config, updated by `extra` one level deep: a sub-dict is
        replaced as a whole.

        Args:
            extra: keys of the config that differ from the defaults.

        Returns:
            The config as a nested dict.
        """
        return with_base_config(cls._config_class()().to_dict(), extra)

    @classmethod
    def default_resource_request(cls, config: Mapping[str, Any] | CommonConfig) -> ResourceRequest:
        """Return the threads, GPUs and memory that the learner and the workers of a run take in
        total.

        Args:
            config: a config, or a nested dict of its keys.

        Returns:
            The resources; memory is in bytes.

        Raises:
            ConfigError: a setting is wrong or cannot be applied (also a ValueError).
        """
        return default_resource_request(cls._as_config(config))

    @classmethod
    def resource_help(cls, config: Mapping[str, Any] | CommonConfig) -> str:
        """Return text that says which keys change the resources of a run, and shows the config.

        Args:
            config: a config, or a nested dict of its keys.

        Returns:
            The text.

        Raises:
            ConfigError: a setting is wrong or cannot be applied (also a ValueError).
        """
        return resource_help(cls._as_config(config))

    def describe(self, file: TextIO | None = None) -> None:
        """Print each effective value and its origin; secrets are withheld.

        Args:
            file: open text file; None is standard output.
        """
        self.config.describe(file)

    restore = Restore()
    """Restored trainer: ``Trainer.restore(path)`` makes a new one, ``trainer.restore(path)``
    changes one in place.

    Called on the class, it needs only the path of a checkpoint. It takes the config from the
    checkpoint and aiorl's trainer for the algorithm; called on a class of your own, it makes a
    trainer of that class. Keyword arguments override keys of the config; a group such as
    ``env_config={"size": 3}`` is merged into the config's. Called on a trainer, it continues in
    place from the checkpoint; first it saves progress since the last checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it belongs to another algorithm, environment or
            network.
        ConfigError: a secret that was not saved is missing from the process environment.
        AiorlError: the trainer cannot be built; see `Trainer`.
    """

    # Training
    # ----------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Train for one iteration: at least one update, ``min_iter_time_s`` and
        ``timesteps_per_iteration``.

        Returns:
            The iteration's result, as changed by hooks and as written to the run's files.

        Raises:
            WorkerError: workers failed, and ``ignore_worker_failures`` is off (also a
                RuntimeError).
            EndOfData: all stored experience has been read (``input_epochs``; also an EOFError).
            RuntimeError: the trainer was stopped, another thread is in this method, no worker is
                left, or the iteration failed repeatedly.
            Exception: an environment, a policy or a hook raised it.
        """
        self._check_running()
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "another thread is in train() of this trainer: call it from one thread at a time"
            )
        try:
            return self._train_and_report()
        except BaseException as error:
            self._output.files.flush()
            # in a notebook the trainer survives Ctrl-C, but for how long?
            if isinstance(error, KeyboardInterrupt):
                self._save_unsaved()
            raise
        finally:
            self._turn.release()

    def _train_and_report(self) -> dict[str, Any]:
        result = self._try_to_train()
        self.iteration = int(result.setdefault("training_iteration", self.iteration + 1))
        try:
            self._evaluate(result)
        finally:  # the result is written even if its evaluation failed or was interrupted
            self._output.unwritten = result
            report(
                result, self._callbacks(), self, lambda _: self._output.write(), self._take_result
            )
        return result

    def iterate(self, *, progress: bool = False, **stop: float | None) -> Iterator[dict[str, Any]]:
        """Train until a stop criterion is met, all stored experience is read, or the caller leaves
        the loop.

        Args:
            progress: True shows time, env steps and mean return on one line, which each iteration
                overwrites.
            **stop: ``stop_return`` (mean return of the last 100 episodes), ``stop_timesteps``
                (total env steps trained on), ``stop_time_s`` and ``stop_iterations`` (both counted
                from this call), ``stop_evaluation_return`` (see ``evaluation_interval``). None
                takes the config's value.

        Yields:
            The result of each iteration, up to the one during which the trainer is stopped.

        Raises:
            ConfigError: a criterion is unknown or not a number, or needs evaluations and none are
                configured.
            Exception: an iteration failed; see ``train``.
        """
        began = time.monotonic()
        count = 0
        criteria = criteria_of(self.config, **stop)
        if progress:
            yield from with_progress_line(
                self.iterate(progress=False, **criteria), headline_of(self.config, criteria)
            )
            return
        while True:
            try:
                result = self.train()
            except EndOfData:
                return
            count += 1
            yield result
            if self._why_stopped:
                return
            evaluation = result.get("evaluation", {})
            progress_so_far = StopFigures(
                mean_return=self._newest_return(),
                env_steps=result.get("env_steps_trained_total", 0),
                evaluation_return=float(evaluation.get("episode_reward_mean", math.nan)),
                took_s=time.monotonic() - began,
                iterations=count,
            )
            if criteria.reason(progress_so_far):
                return

    def stop(self) -> None:
        """Save progress since the last checkpoint, and end workers and threads.

        Later calls do nothing.
        """
        if self._why_stopped:
            return
        self._why_stopped = "was stopped"
        self._ending.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._is_hurried = isinstance(error, KeyboardInterrupt)
        self.stop()

    # Methods that a subclass overrides
    # ----------------------------------------------------------------------------

    def _planned(self, config: CommonConfig) -> CommonConfig:
        """Check a config before anything is built, and return it with missing values filled in.

        Raises:
            ConfigError: the config asks for something impossible.
        """
        return config

    def _init(self, config: CommonConfig, env_creator: EnvCreator) -> None:
        """Build the parts that train."""
        raise NotImplementedError(f"{type(self).__name__} has no _init(config, env_creator)")

    def _train(self) -> dict[str, Any]:
        """Train for one iteration, and return its result."""
        raise NotImplementedError(f"{type(self).__name__} has no _train()")

    def _recover(self) -> None:
        """Continue with the remaining workers after a WorkerError.

        Raises:
            NotImplementedError: this trainer cannot continue.
            RuntimeError: no worker is left.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no _recover(): failures of workers can't be ignored"
        )

    def _evaluate(self, result: dict[str, Any]) -> None:
        """Add ``evaluation`` to the result of the finished iteration, if an evaluation was made."""

    def _before_evaluate(self) -> None:
        """Prepare an evaluation; called before each one."""

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that this trainer can't continue from.

        Raises:
            CheckpointError: it belongs to another environment, algorithm or network.
        """
        check_compatible(checkpoint, {"env": self.config.env, "algo": self.config.algo})

    def _save_unsaved(self) -> None:
        """Write a checkpoint if there is progress since the last one."""

    def _stop(self) -> None:
        """End everything that ``_init`` started, and save progress."""

    def _callbacks(self) -> DefaultCallbacks | None:
        """Return the user's hooks on the trainer, if any."""
        return None

    def _take_result(self, result: Mapping[str, Any]) -> None:
        """Prepare the next iteration by a result that is written."""

    def _newest_return(self) -> float:
        """Return the mean return of the last 100 episodes trained on; NaN before 100 have ended, or
        if this trainer doesn't keep them.
        """
        return math.nan

    # Inside
    # ----------------------------------------------------------------------------------------------

    @classmethod
    def _named(cls, algo: str) -> type[Trainer] | None:
        """Return this class if it is the trainer of an algorithm, or its subclass that is and is
        made when someone needs it; otherwise None.
        """
        return cls if cls._name == algo else None

    @classmethod
    def _made_for(cls, algo: str) -> type[Trainer] | None:
        """Return the trainer class of an algorithm, making it if necessary; None if this class
        makes none.
        """
        return None

    @classmethod
    def _config_class(cls) -> type[CommonConfig]:
        if not cls._name or cls._default_config is None:
            raise NotImplementedError(
                f"{cls.__name__} names no algorithm: a trainer needs _name, _default_config and"
                " _init, like PPOTrainer and the other trainers of aiorl"
            )
        return cls._default_config

    def _effective(
        self, config: Mapping[str, Any] | CommonConfig | None, env: Any
    ) -> tuple[dict[str, Any], CommonConfig]:
        """Return the keys that the user set, and the effective configuration.

        Raises:
            ConfigError: a setting is wrong or cannot be applied, or there is no environment.
        """
        overrides = {} if env is None else {"env": env}
        if isinstance(config, CommonConfig):
            effective = self._as_config(config)
            if overrides:
                effective = effective.updated(overrides)
        else:
            effective = self._as_config({**settings_of(config), **overrides})
        if effective.env is None:
            raise ConfigError("There is no environment to train in.", key="env", hint=ENV_HINT)
        return {name: getattr(effective, name) for name in effective.model_fields_set}, effective

    @classmethod
    def _as_config(cls, config: Mapping[str, Any] | CommonConfig) -> CommonConfig:
        """Return a config of the trainer's algorithm.

        Raises:
            ConfigError: it belongs to another algorithm, or a setting is wrong or cannot be
                applied.
        """
        kind = cls._config_class()
        if isinstance(config, kind):
            return config
        if isinstance(config, CommonConfig):
            raise cls._wrong_algo(config.algo)
        is_complete = kind.model_fields.keys() <= config.keys()
        if config.get("resume") is not None and not is_complete:  # the rest is the run's own
            values = {"algo": cls._name, **config}
            if values["algo"] != cls._name:
                raise cls._wrong_algo(values["algo"])
            return load_config(lambda algo: kind, overrides=values, env_hint=ENV_HINT)
        return cls._merged([Layer(config)])

    @classmethod
    def _merged(cls, layers: Sequence[Layer]) -> CommonConfig:
        """Return the config of the trainer's algorithm that layers of settings give, later ones on
        top.

        Raises:
            ConfigError: it belongs to another algorithm, or a setting is wrong or cannot be
                applied.
        """
        layers = [Layer({"algo": cls._name}), *layers]
        algo = merged(layers)["algo"]
        if algo != cls._name:
            raise cls._wrong_algo(algo)
        return cls._config_class().from_layers(layers, allow_unknown=cls._allow_unknown_configs)

    @classmethod
    def _wrong_algo(cls, algo: Any) -> ConfigError:
        return ConfigError(
            f"algo is {algo!r}, but this is a {cls.__name__}.",
            key="algo",
            value=algo,
            hint=f"Leave it out, or use the trainer for {algo}.",
        )

    def _open(self, creator: EnvCreator) -> None:
        """Make the run directory, and build everything."""
        self.config = self._planned(self.config)
        self._directory = RunDirectory.open(self.config)
        log = run_log(self._directory, self.config)
        files = RunFiles(RunParts.of(self.config).files, self._directory)
        output = self._output = _Output(files, files)
        self._why_stopped = ""
        _running.add(self)
        ending = self._ending = contextlib.ExitStack()  # every step runs, even if another one fails
        for step in (log.close, self._directory.close, files.close):
            ending.callback(step)
        ending.callback(_running.discard, self)
        try:
            if self._restored is None:
                self._restored = checkpoint_to_resume(self._directory, self._tell)
            if self._logger_creator is not None:
                output.writer = self._logger_creator(self.config.to_dict())
                ending.callback(output.writer.close)
            else:
                files.open(None if self._restored is None else self._restored.run)
            ending.callback(output.write)  # if a hook stops the trainer
            ending.callback(self._stop)
            self._init(self.config, creator)
            self._restored = None  # may hold a whole replay
        except BaseException as error:
            self.stop()
            if isinstance(error, ConfigError):
                self._directory.abandon()
            raise

    def _try_to_train(self) -> dict[str, Any]:
        for attempt in range(1 + _MAX_RETRIES):
            try:
                return self._train()
            except WorkerError as error:
                if not self.config.ignore_worker_failures:
                    if HINT not in str(error):
                        error.add_note(HINT)
                    raise
                logger.warning("attempt %d of %d failed: %s", attempt + 1, 1 + _MAX_RETRIES, error)
                self._recover()
        raise RuntimeError(f"workers failed in each of {1 + _MAX_RETRIES} attempts at an iteration")

    def _check_running(self) -> None:
        if self._why_stopped:
            raise RuntimeError(
                f"this trainer {self._why_stopped}; continue with a new one:"
                " Trainer.restore(checkpoint)"
            )

    def _tell(self, text: str, level: int) -> None:
        logger.log(level, "%s", text)

    def __repr__(self) -> str:
        state = "stopped" if self._why_stopped else f"iteration {self.iteration}"
        return f"<{type(self).__name__} on {self.config.env}, {state}, {self.logdir}>"


_running: set[Trainer] = set()
"""Trainers not stopped yet. Even one without references has processes to end and progress to
save."""


@atexit.register
def _stop_all() -> None:
    """Stop all trainers when the program exits, so that no progress is lost and no process is
    left.
    """
    for trainer in list(_running):
        with contextlib.suppress(Exception):
            trainer.stop()


def _leave_to_parent() -> None:
    """Drop all trainers in a forked child: their threads and processes belong to the parent."""
    for trainer in _running:
        trainer._why_stopped = "belongs to the process that forked this one"
    _running.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def settings_of(config: Mapping[str, Any] | CommonConfig | None) -> dict[str, Any]:
    """Return the keys that a caller sets with a config.

    Raises:
        ConfigError: it is neither a config nor a dict.
    """
    if isinstance(config, CommonConfig):
        return {**config.users_values(), "algo": config.algo}
    if not isinstance(config, Mapping | None):
        raise ConfigError(
            f"config is {config!r:.100}, expected a config or a dict of keys.",
            key="config",
            hint=(
                "Pass an environment as env='CartPole-v1'. Read a file with"
                " PPOConfig.from_file(path)."
            ),
        )
    return dict(config or {})


def run_log(directory: RunDirectory, config: CommonConfig) -> RunLog:
    """Open the log of a run."""
    return RunLog(
        directory,
        level=config.log_level,
        num_workers=config.num_workers,
        max_bytes=config.log_max_bytes,
    )


def creator_of(config: CommonConfig) -> EnvCreator:
    """Return the function that makes a run's environments.

    Raises:
        ConfigError: the environment does not exist, or the run's workers would not know it.
    """
    if not config.is_alone:
        name_elsewhere(config.env or "")
    return resolve_env(config.env or "")
