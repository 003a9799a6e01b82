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
_POLL_S = 0.5
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
        self.inputs = tensors_of("obs", self.observation_space)
        self.outputs = tensors_of("action", self.action_space)
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
        actor = version.actor
        for what, actual, expected in (
            ("observation space", actor.observation_space, self.observation_space),
            ("action space", actor.layout.space, self.action_space),
            ("recurrent state", [state.shape for state in actor.initial_memory], self.state_shapes),
        ):
            if actual != expected:
                raise PolicyError(
                    f"its {what} is {actual}, that of model {self.name!r} is {expected}"
                )
        if index:
            version.name += f".{index}"
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
            ConfigError: names are wrong or not unique, or there is nothing to share.
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
                self._serve(source, load(source.path))
            elif self.waiting == source.path:  # one by one: arms get the order of targets
                self._serve(source, source.newer())
        may_have_arms = self.waiting is not None and len(targets) > 1
        if share and not may_have_arms and all(len(model.arms) == 1 for model in self.values()):
            raise ConfigError(
                f"--share {share:g} is for a policy with two versions, and each has one.",
                key="share",
                value=share,
                hint="Give two paths under one name, such as game=runs/mine game=exported/onnx.",
            )

    async def follow(self) -> None:
        """Serve newer checkpoints of followed runs in place of older ones; without such runs,
        return at once.
        """
        while any(source.folders for source in self._sources):
            for source in self._sources:
                versions = []
                if source.folders:
                    versions = await asyncio.to_thread(source.newer)
                if versions:
                    try:
                        self._serve(source, versions)
                        logger.info("version %s of %s is served", versions[0].name, source.path)
                    except AiorlError as error:
                        logger.warning(
                            "version %s of %s can't be served: %s",
                            versions[0].name,
                            source.path,
                            error,
                        )
                if not source.arms:
                    break
            await asyncio.sleep(_POLL_S)

    def _serve(self, source: _Source, versions: Sequence[Version]) -> None:
        for version in versions:
            policy_id = version.actor.policy_id
            model, index = source.arms.get(policy_id) or self._arm_for(
                source, version, is_only=len(versions) == 1
            )
            old = model.put(index, version)
            if old is not None:
                self.rows.remove(model.name, old.name)
                self.swaps.labels(model.name).inc()
            version.count_rows = self.rows.labels(model.name, version.name).observe
            source.arms[policy_id] = model, index
        self._drop_removed(source, {version.actor.policy_id for version in versions})
        self.waiting = next((source.path for source in self._sources if not source.arms), None)

    def _drop_removed(self, source: _Source, policy_ids: set[str]) -> None:
        """Serve policies no longer that the run has removed; one with versions side by side stays.

        Args:
            source: the run.
            policy_ids: the policies of its newest checkpoint.
        """
        for policy_id in source.arms.keys() - policy_ids:
            model, _ = source.arms[policy_id]
            if len(model.arms) > 1:
                continue
            del source.arms[policy_id], self[model.name]
            model.arms[0].finish()
            self.rows.remove(model.name, model.arms[0].name)
            logger.info("%s is not served any more: %s has removed it", model.name, source.path)

    def _arm_for(self, source: _Source, version: Version, *, is_only: bool) -> tuple[Model, int]:
        """Return the model of a source's first version, and the index of its arm."""
        name = version.actor.policy_id
        if source.name:
            name = source.name if is_only else f"{source.name}.{name}"
        model = self.setdefault(name, Model(name, version, self._share))
        index = len(model.arms)
        if index and not 0.0 < index * self._share < 1.0:
            raise ConfigError(
                f"There is no share of the requests to policy {name!r} left for {source.path}.",
                key="share",
                value=self._share,
                hint=(
                    f"Give names, such as first={source.path}; or versions of one policy a --share"
                    f" below {1 / index:g}."
                ),
            )
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
        is_run = _export_in(self.path) is None and not (self.path / "meta.json").exists()
        self.folders: list[Path] = []
        if follow and is_run:
            self.folders = [self.path / _FOLDERS[follow], self.path]
        self._load = load
        self._last_signature: object = None

    def newer(self) -> list[Version]:
        """Return the policies of the newest checkpoint; [] if it is the one of the last call, or
        damaged.
        """
        try:
            path = next(filter(None, map(list_checkpoints, self.folders)))[-1]
            stats = [file.stat() for file in sorted(path.iterdir())]
        except (StopIteration, CheckpointError, OSError):
            return []  # there is none, or it is being replaced now
        signature = (path, [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats])
        if self._last_signature == signature:
            return []
        self._last_signature = signature
        try:
            # a run's newest usable checkpoint at first: an older one is better than none
            return self._load(path if self.arms else path.parent)
        except Exception as error:  # whatever a damaged file leads to
            logger.warning("%s; it is not served", error)
            return []


def _load(path: Path, *, threads: int, seed: int | None) -> list[Version]:
    """Return the policies of a run, checkpoint or export; see `Models` for errors."""
    directory = _export_in(path)
    if directory is not None:
        return [_load_export(directory, threads=threads, seed=seed)]
    run = SavedRun.open(path)
    policy_ids = [name for name in run.acting.part.policies if name in run.acting.graphs]
    if not policy_ids:
        raise PolicyError(f"{run.checkpoint.path} has no network of a learner that could be served")
    without_graph = {*run.acting.part.policies} - {*policy_ids}
    if without_graph:
        logger.warning(
            "policies %s are of classes of your own, so they are not served", sorted(without_graph)
        )
    return [
        Version(
            number=run.checkpoint.number,
            actor=run.actor(policy_id, threads=threads, seed=seed),
            env=run.acting.part.env,
            env_steps=run.env_steps,
        )
        for policy_id in policy_ids
    ]


def _export_in(path: Path) -> Path | None:
    """Return the directory of an ONNX export, None if there is no export.

    Args:
        path: the directory, its parent or its file.
    """
    candidates = [path, path / "onnx"]
    if path.suffix == ".onnx":
        candidates.append(path.parent)
    for directory in candidates:
        if (directory / _DESCRIPTION).is_file():
            return directory
    return None


def _load_export(directory: Path, *, threads: int, seed: int | None) -> Version:
    """Return the policy of an ONNX export, whose file is an acting graph with weights and filter
    inside.
    """
    try:
        export = parse_json(read_regular(directory / _DESCRIPTION, max_bytes=_MAX_DESCRIPTION))
        if export["format"] != "onnx":
            raise PolicyError(f"it is an export to {export['format']}; only ONNX can be served")
        graph = read_regular(directory / "policy.onnx", max_bytes=_MAX_GRAPH)
        obs_description = export["observation_space"]
        action_description = export["action_space"]
        if export.get(KEEPS_ORDER) is not True:
            obs_description = sampled_observation_space(obs_description, was_rebuilt=False)
            action_description = sampled_action_space(action_description)
        preprocessor = make_preprocessor(
            space_from_dict(obs_description), action_space=space_from_dict(action_description)
        )
        if type(preprocessor).__name__ != export["preprocessor"]["name"]:
            raise PolicyError(
                f"its preprocessor {export['preprocessor']['name']} is the user's own"
            )
        shapes = {
            tensor["name"]: (tensor["shape"][1:], tensor["dtype"])
            for tensor in (*export["inputs"], *export["outputs"])
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
                "distribution": export["distribution"],
                "action_space": action_description,
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
        actor = Actor(
            str(export["policy_id"]),
            policy,
            preprocessor,
            NoFilter(),
            clip_actions=export["clip_actions"] is True,
            carries_action=export.get(CARRIES_ACTION) is True,
        )
        return Version(
            number=int(str(export["checkpoint"]).rpartition("-")[2] or 0),
            actor=actor,
            env=str(export["env"]),
            env_steps=int(export["env_steps"]),
        )
    except Exception as error:  # whatever a damaged file leads to
        raise CheckpointError(directory, f"its export can't be used: {error!s:.300}") from error
