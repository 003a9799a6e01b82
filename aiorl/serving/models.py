"""Models: policies by name, loaded from runs, checkpoints and exports; newer versions replace older
ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from prometheus_client import Counter, Histogram

from aiorl.acting.acting_graph import ActingSpec
from aiorl.acting.acting_state import SavedRun
from aiorl.acting.actor import CARRIES_ACTION, Actor
from aiorl.acting.checkpoint import list_checkpoints
from aiorl.acting.filters import NoFilter
from aiorl.acting.graph_policy import OnnxPolicy
from aiorl.acting.older_order import KEEPS_ORDER, sampled_action_space, sampled_observation_space
from aiorl.acting.preprocessors import make_preprocessor
from aiorl.config.files import parse_json, read_regular
from aiorl.data.spaces import space_from_dict
from aiorl.errors import AiorlError, CheckpointError, ConfigError, PolicyError
from aiorl.serving.batching import OUTPUTS, Version
from aiorl.serving.tensors import Tensor, tensors_of
from aiorl.text import is_label

logger = logging.getLogger(__name__)

_FOLDERS = {"newest": "checkpoints", "best": "best"}
"""Checkpoints of a run that replace older ones, and their folder."""
_LOOK_S = 0.5
_DESCRIPTION = "policy.json"
_MAX_DESCRIPTION = 16 << 20
_MAX_GRAPH = 2 << 30


class Model:
    """Policy of one name, with one version or several side by side.

    Attributes:
        name: its name.
        arms: its versions side by side.
        share: share of the requests that each arm but the first one gets, in [0, 1].
        env: name of the environment that it was trained on.
        observation_space: space of its observations, as the environment gives them.
        action_space: space of its actions.
        inputs: arrays of an observation, by their names as tensors.
        outputs: arrays of an action, and further outputs.
        state_shapes: shapes of its recurrent state, as `Actor.initial_memory`.
    """

    def __init__(self, name: str, first: Version, share: float) -> None:
        """Begin without a version, for versions like the `first` one; see the class."""
        self.name = name
        self.env = first.env
        self.share = share
        self.arms: list[Version] = []
        self.observation_space = first.actor.observation_space
        self.action_space = first.actor.layout.space
        self.inputs, self.outputs = (
            tensors_of("obs", self.observation_space),
            tensors_of("action", self.action_space),
        )
        self.outputs |= {name: Tensor(name, (), np.dtype(np.float32)) for name in OUTPUTS}
        self.state_shapes = [state.shape for state in first.actor.initial_memory]

    def pick(self) -> int:
        """Return the index of the arm for a request without a session."""
        if len(self.arms) == 1:
            return 0
        # each further arm has a part of [0, 1) as long as its share; the first arm has the rest
        index = 1 + int(random.random() / self.share)
        return index if index < len(self.arms) else 0

    def put(self, index: int, version: Version) -> Version | None:
        """Serve a version as a further arm, or in place of one, which first answers the requests
        that it has.

        Args:
            index: index of the arm.
            version: the version; numbers of arms but the first one get their index, such as
                "120.1".

        Returns:
            The version that was replaced, if there was one.

        Raises:
            PolicyError: it can't be a version of this model.
        """
        given = version.actor
        for what, found, known in (
            ("observation space", given.observation_space, self.observation_space),
            ("action space", given.layout.space, self.action_space),
            ("recurrent state", [state.shape for state in given.initial_memory], self.state_shapes),
        ):
            if found != known:
                raise PolicyError(f"its {what} is {found}, that of model {self.name!r} is {known}")
        version.name += f".{index}" if index else ""
        if index == len(self.arms):
            self.arms.append(version)
            return None
        old = self.arms[index]
        self.arms[index] = version
        old.finish()
        return old


class Models(dict[str, Model]):
    """Models by name, loaded from runs, checkpoints and exports.

    Attributes:
        waiting: path of a followed run that has no checkpoint yet; None if there is none.
        rows: rows of evaluations, for Prometheus.
        swaps: versions that replaced others, for Prometheus.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        follow: str = "",
        share: float = 0.0,
        threads: int = 1,
        seed: int | None = None,
    ) -> None:
        """Load all policies.

        Args:
            targets: paths, each also as ``NAME=PATH``; without a name, models get the ids of
                policies.
            follow: checkpoints of runs that `follow` loads: "newest", "best", or "" for none.
            share: share of a model's requests for each further target of its name; 0 refuses
                further targets.
            threads: threads that an evaluation of a network can use.
            seed: seed of sampled actions.

        Raises:
            ConfigError: names are wrong or not unique.
            CheckpointError: a checkpoint or export can't be used.
            PolicyError: no policy of a run can be served, or one can't answer in place of another
                one.
            ImportError: a network can only be run in TensorFlow, which is not installed.
        """
        super().__init__()
        self.rows = Histogram(
            "aiorl_batch_rows",
            "Rows of an evaluation.",
            ["policy", "version"],
            registry=None,
            buckets=[2**power for power in range(10)],
        )
        self.swaps = Counter(
            "aiorl_swaps", "Versions that replaced others.", ["policy"], registry=None
        )
        self._share = share
        load = partial(_load, threads=threads, seed=seed)
        self._sources = [_Source(target, follow, load) for target in targets]
        self.waiting: Path | None = self._sources[0].path
        for source in self._sources:
            if not source.folders:
                self._take(source, load(source.path))
            elif (
                self.waiting == source.path
            ):  # the first of them, so that arms get the order of targets
                self._take(source, source.newer())

    async def follow(self) -> None:
        """Serve newer checkpoints of followed runs in place of older ones; without such runs,
        return at once.
        """
        while any(source.folders for source in self._sources):
            for source in self._sources:
                if source.folders and (found := await asyncio.to_thread(source.newer)):
                    try:
                        self._take(source, found)
                        logger.info("version %s of %s is served", found[0].name, source.path)
                    except AiorlError as error:
                        logger.warning(
                            "version %s of %s can't be served: %s",
                            found[0].name,
                            source.path,
                            error,
                        )
                if not source.arms:
                    break
            await asyncio.sleep(_LOOK_S)

    def _take(self, source: _Source, versions: Sequence[Version]) -> None:
        for version in versions:
            policy_id = version.actor.policy_id
            model, index = source.arms.get(policy_id) or self._arm_for(
                source, version, is_only=len(versions) == 1
            )
            if (old := model.put(index, version)) is not None:
                self.rows.remove(model.name, old.name)
                self.swaps.labels(model.name).inc()
            version.count_rows = self.rows.labels(model.name, version.name).observe
            source.arms[policy_id] = model, index
        self.waiting = next((source.path for source in self._sources if not source.arms), None)

    def _arm_for(self, source: _Source, version: Version, *, is_only: bool) -> tuple[Model, int]:
        """Return the model of a source's first version, and the index of its arm."""
        name = version.actor.policy_id
        if source.name:
            name = source.name if is_only else f"{source.name}.{name}"
        model = self.setdefault(name, Model(name, version, self._share))
        index = len(model.arms)
        if index and not 0.0 < index * self._share < 1.0:
            said = f"There is no share of the requests to policy {name!r} left for {source.path}."
            hint = (
                f"Give names, such as first={source.path}; or versions of one policy a --share"
                f" below {1 / index:g}."
            )
            raise ConfigError(said, key="share", value=self._share, hint=hint)
        return model, index


class _Source:
    """Path of policies.

    Attributes:
        name: the user's name for them, "" if there is none.
        path: the path.
        folders: directories in which newer checkpoints appear; empty if the path is not followed.
        arms: policy id -> its model, and index of the arm.
    """

    def __init__(self, target: str, follow: str, load: Callable[[Path], list[Version]]) -> None:
        name, equals, path = target.partition("=")
        is_named = bool(equals) and "/" not in name
        # names are parts of addresses
        if is_named and not (name.strip(".") and is_label(name) and not {*name} & {"?", "#"}):
            raise ConfigError(
                f"{name!r} can't be the name of a model.",
                key="PATH",
                value=target,
                hint="Use letters.",
            )
        self.name = name if is_named else ""
        self.path = Path(path if is_named else target).expanduser()
        self.arms: dict[str, tuple[Model, int]] = {}
        is_fixed = (
            not follow or _export_in(self.path) is not None or (self.path / "meta.json").exists()
        )
        self.folders = [] if is_fixed else [self.path / _FOLDERS[follow], self.path]
        self._load = load
        self._seen: object = None

    def newer(self) -> list[Version]:
        """Return the policies of the newest checkpoint; [] if it is the one of the last look, or
        damaged.
        """
        try:
            path = next(filter(None, map(list_checkpoints, self.folders)))[-1]
            stats = [file.stat() for file in sorted(path.iterdir())]
        except (
            StopIteration,
            CheckpointError,
            OSError,
        ):  # there is none, or it is being replaced now
            return []
        seen = self._seen
        self._seen = (path, [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats])
        if self._seen == seen:
            return []
        try:
            return self._load(
                path if self.arms else path.parent
            )  # an older one is better than none
        except Exception as error:  # whatever a damaged file leads to
            logger.warning("%s; it is not served", error)
            return []


def _load(path: Path, *, threads: int, seed: int | None) -> list[Version]:
    """Return the policies of a run, checkpoint or export; see `Models` for errors."""
    if (directory := _export_in(path)) is not None:
        return [_load_export(directory, threads=threads, seed=seed)]
    run = SavedRun.open(path)
    known = run.acting.part.policies
    env = run.acting.part.env
    number = run.checkpoint.number
    own = [policy_id for policy_id in known if policy_id in run.acting.graphs]
    if not own:
        raise PolicyError(f"{run.checkpoint.path} has no network of a learner that could be served")
    if len(own) < len(known):
        logger.warning(
            "policies %s are of classes of your own, so they are not served",
            sorted({*known} - {*own}),
        )
    return [
        Version(number, run.actor(name, threads=threads, seed=seed), env, run.env_steps)
        for name in own
    ]


def _export_in(path: Path) -> Path | None:
    """Return the directory of an ONNX export; the path is that, its parent or its file.

    None if there is no export.
    """
    candidates = path, path / "onnx", path.parent if path.suffix == ".onnx" else path
    return next(
        (directory for directory in candidates if (directory / _DESCRIPTION).is_file()), None
    )


def _load_export(directory: Path, *, threads: int, seed: int | None) -> Version:
    """Return the policy of an ONNX export, whose file is an acting graph with weights and filter
    inside.
    """
    try:
        said = parse_json(read_regular(directory / _DESCRIPTION, max_bytes=_MAX_DESCRIPTION))
        if said["format"] != "onnx":
            raise PolicyError(f"it is an export to {said['format']}; only ONNX can be served")
        graph = read_regular(directory / "policy.onnx", max_bytes=_MAX_GRAPH)
        described = said["observation_space"]
        described_actions = said["action_space"]
        if said.get(KEEPS_ORDER) is not True:
            described = sampled_observation_space(described, was_rebuilt=False)
            described_actions = sampled_action_space(described_actions)
        space = space_from_dict(described)
        action_space = space_from_dict(described_actions)
        preprocessor = make_preprocessor(space, action_space=action_space)
        if type(preprocessor).__name__ != said["preprocessor"]["name"]:
            raise PolicyError(f"its preprocessor {said['preprocessor']['name']} is the user's own")
        shapes = {
            one["name"]: (one["shape"][1:], one["dtype"])
            for one in (*said["inputs"], *said["outputs"])
        }
        spec = ActingSpec.from_dict(
            {
                "format": 1,
                "obs_shape": shapes["obs"][0],
                "obs_dtype": shapes["obs"][1],
                "state_shapes": [
                    shape for name, (shape, _) in shapes.items() if name.startswith("state_in_")
                ],
                "num_dist_inputs": shapes["dist_inputs"][0][0],
                "distribution": said["distribution"],
                "action_space": described_actions,
                "weights": [],
                "prev_action": shapes.get("prev_actions"),
            }
        )
        policy = OnnxPolicy(
            graph,
            spec,
            threads=threads,
            seed=seed,
            observation_space=preprocessor.observation_space,
        )
        policy.set_weights({})
        clips = said["clip_actions"] is True
        actor = Actor(
            str(said["policy_id"]),
            policy,
            preprocessor,
            NoFilter(),
            clip_actions=clips,
            carries_action=said.get(CARRIES_ACTION) is True,
        )
        number = int(str(said["checkpoint"]).rpartition("-")[2] or 0)
        return Version(number, actor, str(said["env"]), int(said["env_steps"]))
    except Exception as error:  # whatever a damaged file leads to
        raise CheckpointError(directory, f"its export can't be used: {error!s:.300}") from error
