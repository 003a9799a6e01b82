"""Models: policies by name, loaded from runs, checkpoints and exports."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from aiorl.acting.acting_state import SavedRun
from aiorl.errors import ConfigError, PolicyError
from aiorl.serving.batching import Acting, Version
from aiorl.serving.exported import ExportedActor, export_in
from aiorl.serving.values import leaves_of
from aiorl.text import is_label

logger = logging.getLogger(__name__)


class Model:
    """Policy of one name, with one version or several side by side.

    Attributes:
        name: its name.
        arms: its versions side by side; requests are dealt to them by `shares`.
        shares: share of the requests that each arm but the first gets, in [0, 1].
        env: name of the environment that it was trained on.
        env_steps: env steps that the first version was trained on.
        observation_space: space of its observations, as the environment gives them.
        action_space: space of its actions.
        observations: its observation's arrays, each as path and space.
        actions: its action's arrays, each as path and space.
        swaps: number of versions that replaced others.
    """

    def __init__(self, name: str, version: Version, env: str, env_steps: int) -> None:
        """Begin with one version; see the class."""
        self.name, self.env, self.env_steps = name, env, env_steps
        self.arms = [version]
        self.shares: list[float] = []
        self.swaps = 0
        self.observation_space = version.actor.observation_space
        self.action_space = version.actor.layout.space
        self.observations = list(leaves_of(self.observation_space))
        self.actions = list(leaves_of(self.action_space))

    @property
    def actor(self) -> Acting:
        """The policy of the first version."""
        return self.arms[0].actor

    def pick(self) -> int:
        """Return the index of the versions that a request without a session goes to."""
        if not self.shares:
            return 0
        drawn = random.random()
        for index, share in enumerate(self.shares, 1):
            if drawn < share:
                return index
            drawn -= share
        return 0

    def fault_of(self, actor: Acting) -> str:
        """Return why a policy can't be another version of this model, "" if it can."""
        own = self.actor
        for what, given, known in (
            ("observation space", actor.observation_space, self.observation_space),
            ("action space", actor.layout.space, self.action_space),
            ("recurrent state", [s.shape for s in actor.initial_state], [s.shape for s in own.initial_state]),
        ):
            if given != known:
                return f"its {what} is {given}, that of model {self.name!r} is {known}"
        return ""


def load_models(targets: Sequence[str], *, threads: int = 1, seed: int | None = None) -> dict[str, Model]:
    """Load all policies of runs, checkpoints and exports.

    Args:
        targets: paths, each also as ``NAME=PATH``; without a name, models get the ids of policies.
        threads: threads that an evaluation of a network can use.
        seed: seed of sampled actions.

    Returns:
        Models by name.

    Raises:
        ConfigError: names are wrong or not unique.
        CheckpointError: a checkpoint or export can't be used.
        PolicyError: no policy of a run can be served.
        ImportError: a network can only be run in TensorFlow, which is not installed.
    """
    models: dict[str, Model] = {}
    for target in targets:
        name, path = split_target(target)
        found = list(load_policies(path, threads=threads, seed=seed))
        for actor, version, env, env_steps in found:
            own = actor.policy_id if not name else name if len(found) == 1 else f"{name}.{actor.policy_id}"
            if own in models:
                hint = (
                    f"Give names: {targets[0].rpartition('=')[2]} as first={targets[0].rpartition('=')[2]}, and so on."
                )
                raise ConfigError(f"Two policies have the name {own!r}.", key="PATH", value=target, hint=hint)
            models[own] = Model(own, Version(version, actor), env, env_steps)
    return models


def split_target(target: str) -> tuple[str, Path]:
    """Return name ("" if there is none) and path of a target.

    Raises:
        ConfigError: the name can't be used in an address.
    """
    name, equals, path = target.partition("=")
    if not equals or "/" in name:
        return "", Path(target).expanduser()
    if not (name and is_label(name) and "?" not in name and "#" not in name):
        raise ConfigError(f"{name!r} can't be the name of a model.", key="PATH", value=target, hint="Use letters.")
    return name, Path(path).expanduser()


def load_policies(path: Path, *, threads: int, seed: int | None) -> Iterable[tuple[Acting, str, str, int]]:
    """Yield the policies of a run, checkpoint or export: policy, version, environment and env steps.

    Raises:
        CheckpointError: see `load_models`, also for further errors.
    """
    if (directory := export_in(path)) is not None:
        exported = ExportedActor(directory, threads=threads)
        yield exported, str(exported.number), exported.env, exported.env_steps
        return
    run = SavedRun.open(path)
    version, env = str(run.checkpoint.number), run.acting.part.env
    if not run.acting.graphs:
        raise PolicyError(f"{run.checkpoint.path} has no network of a learner that could be served")
    for policy_id in run.acting.part.policies:
        if policy_id in run.acting.graphs:
            yield run.actor(policy_id, threads=threads, seed=seed), version, env, run.env_steps
        else:
            logger.warning("policy %r is of a class of your own, so it is not served", policy_id)
