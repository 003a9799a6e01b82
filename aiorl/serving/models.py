"""Models: policies by name, loaded from runs, checkpoints and exports; newer versions replace older ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from aiorl.acting.acting_state import SavedRun
from aiorl.acting.checkpoint import list_checkpoints
from aiorl.errors import AiorlError, CheckpointError, ConfigError, PolicyError
from aiorl.serving.batching import Acting, Version
from aiorl.serving.exported import ExportedActor, export_in
from aiorl.serving.values import leaves_of
from aiorl.text import is_label

logger = logging.getLogger(__name__)

Follow = Literal["", "newest", "best"]
"""Checkpoints of a run that replace older ones; "" = none do."""
_FOLDERS = {"newest": "checkpoints", "best": "best"}
_LOOK_S = 0.5


class Model:
    """Policy of one name, with one version or several side by side.

    Attributes:
        name: its name.
        arms: its versions side by side.
        share: share of the requests that each arm but the first one gets, in [0, 1].
        env: name of the environment that it was trained on.
        observation_space: space of its observations, as the environment gives them.
        action_space: space of its actions.
        observations: its observation's arrays, each as path and space.
        actions: its action's arrays, each as path and space.
        swaps: number of versions that replaced others.
    """

    def __init__(self, name: str, version: Version, share: float = 0.0) -> None:
        """Begin with one version; see the class."""
        self.name, self.env, self.share, self.swaps = name, version.env, share, 0
        self.arms = [version]
        self.observation_space = version.actor.observation_space
        self.action_space = version.actor.layout.space
        self.observations = list(leaves_of(self.observation_space))
        self.actions = list(leaves_of(self.action_space))

    @property
    def actor(self) -> Acting:
        """The policy of the first version."""
        return self.arms[0].actor

    def pick(self) -> int:
        """Return the index of the arm for a request without a session."""
        if not self.share:
            return 0
        index = 1 + int(random.random() / self.share)
        return index if index < len(self.arms) else 0

    def put(self, index: int, version: Version) -> None:
        """Serve a version as a further arm, or in place of one, which first answers the requests that it has.

        Args:
            index: index of the arm.
            version: the version; numbers of arms but the first one get their index, such as "120.1".

        Raises:
            PolicyError: it can't be a version of this model.
        """
        own = self.actor
        for what, given, known in (
            ("observation space", version.actor.observation_space, self.observation_space),
            ("action space", version.actor.layout.space, self.action_space),
            ("recurrent state", [s.shape for s in version.actor.initial_state], [s.shape for s in own.initial_state]),
        ):
            if given != known:
                raise PolicyError(f"its {what} is {given}, that of model {self.name!r} is {known}")
        version.name += f".{index}" if index else ""
        if index < len(self.arms):
            self.arms[index].finish()
            self.arms[index] = version
            self.swaps += 1
        else:
            self.arms.append(version)


class Models(dict[str, Model]):
    """Models by name, loaded from runs, checkpoints and exports.

    Attributes:
        waiting: path of a followed run that has no checkpoint yet; None if there is none.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        follow: Follow = "",
        share: float = 0.0,
        threads: int = 1,
        seed: int | None = None,
    ) -> None:
        """Load all policies.

        Args:
            targets: paths, each also as ``NAME=PATH``; without a name, models get the ids of policies.
            follow: checkpoints of runs that `follow` loads.
            share: share of a model's requests for each further target of its name; 0 refuses further targets.
            threads: threads that an evaluation of a network can use.
            seed: seed of sampled actions.

        Raises:
            ConfigError: names are wrong or not unique.
            CheckpointError: a checkpoint or export can't be used.
            PolicyError: no policy of a run can be served, or one can't answer in place of another one.
            ImportError: a network can only be run in TensorFlow, which is not installed.
        """
        super().__init__()
        load = partial(load_policies, threads=threads, seed=seed)
        self._share = share
        self._sources = [_Source(target, follow, load) for target in targets]
        for source in self._sources:
            if not source.folders:
                self._take(source, list(load(source.path)))
            elif self.waiting == source.path:  # the first of them, so that arms get the order of targets
                self._take(source, source.newer())

    @property
    def waiting(self) -> Path | None:  # noqa: D102 (the class describes it)
        return next((source.path for source in self._sources if not source.arms), None)

    async def follow(self) -> None:
        """Serve newer checkpoints of followed runs in place of older ones, until cancelled."""
        while True:
            for source in self._sources:
                if source.folders and (found := await asyncio.to_thread(source.newer)):
                    try:
                        self._take(source, found)
                        logger.info("version %s of %s is served", found[0].name, source.path)
                    except AiorlError as error:
                        logger.warning("version %s of %s can't be served: %s", found[0].name, source.path, error)
                if not source.arms:
                    break
            await asyncio.sleep(_LOOK_S)

    def _take(self, source: _Source, versions: Sequence[Version]) -> None:
        for version in versions:
            policy_id = version.actor.policy_id
            if policy_id in source.arms:
                name, index = source.arms[policy_id]
                self[name].put(index, version)
                continue
            name = policy_id
            if source.name:
                name = source.name if len(versions) == 1 else f"{source.name}.{policy_id}"
            if name not in self:
                self[name] = Model(name, version, self._share)
            elif self._share and (count := len(self[name].arms)) * self._share < 1.0:
                self[name].put(count, version)
            elif self._share:
                said = f"{count} further paths of the name {name!r} leave no share for the first one."
                raise ConfigError(said, key="share", value=self._share, hint="Give a smaller --share.")
            else:
                hint = f"Give names, such as first={source.path}; or a --share, for two versions of one policy."
                raise ConfigError(
                    f"Two policies have the name {name!r}.", key="PATH", value=str(source.path), hint=hint
                )
            source.arms[policy_id] = name, len(self[name].arms) - 1


class _Source:
    """Path of policies.

    Attributes:
        name: the user's name for them, "" if there is none.
        path: the path.
        folders: directories in which newer checkpoints appear; empty if the path is not followed.
        arms: policy id -> name of its model, and index of the arm.
    """

    def __init__(self, target: str, follow: Follow, load: Callable[[Path], Iterable[Version]]) -> None:
        self.name, self.path = split_target(target)
        self.arms: dict[str, tuple[str, int]] = {}
        is_fixed = not follow or export_in(self.path) is not None or (self.path / "meta.json").exists()
        self.folders = [] if is_fixed else [self.path / _FOLDERS[follow], self.path]
        self._load = load
        self._loaded: object = None
        self._damaged: dict[Path, object] = {}

    def newer(self) -> list[Version]:
        """Return the policies of the newest whole checkpoint; [] if it was the last one returned, or there is none."""
        found: list[Path] = []
        with contextlib.suppress(CheckpointError):  # a directory that can't be read now
            found = next(filter(None, map(list_checkpoints, self.folders)), [])
        for path in reversed(found):
            state = None
            try:
                stats = [file.stat() for file in sorted(path.iterdir())]
                state = path, [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
                if state == self._loaded:
                    return []
                if state != self._damaged.get(path):
                    versions = list(self._load(path))
                    self._loaded = state
                    return versions
            except Exception as error:  # whatever a damaged file leads to
                if path not in self._damaged and path.exists():  # others were removed, as the oldest ones are
                    logger.warning("%s; it is not served", error)
                self._damaged[path] = state
        return []


def split_target(target: str) -> tuple[str, Path]:
    """Return name ("" if there is none) and path of a target.

    Raises:
        ConfigError: the name can't be used in an address.
    """
    name, equals, path = target.partition("=")
    if not equals or "/" in name:
        return "", Path(target).expanduser()
    if not (name.strip(".") and is_label(name) and "?" not in name and "#" not in name):
        raise ConfigError(f"{name!r} can't be the name of a model.", key="PATH", value=target, hint="Use letters.")
    return name, Path(path).expanduser()


def load_policies(path: Path, *, threads: int, seed: int | None) -> Iterable[Version]:
    """Yield the policies of a run, checkpoint or export.

    Raises:
        CheckpointError: see `Models`, also for further errors.
    """
    if (directory := export_in(path)) is not None:
        exported = ExportedActor(directory, threads=threads)
        yield Version(str(exported.number), exported, exported.env, exported.env_steps)
        return
    run = SavedRun.open(path)
    number, env = str(run.checkpoint.number), run.acting.part.env
    if not run.acting.graphs:
        raise PolicyError(f"{run.checkpoint.path} has no network of a learner that could be served")
    for policy_id in run.acting.part.policies:
        if policy_id in run.acting.graphs:
            yield Version(number, run.actor(policy_id, threads=threads, seed=seed), env, run.env_steps)
        else:
            logger.warning("policy %r is of a class of your own, so it is not served", policy_id)
