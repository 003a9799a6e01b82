"""Settings of environments that change during a run, such as the levels of a curriculum.

A change is planned at any time and made between two iterations. It travels to workers with the next
weights, so that those that join later have it as well. Each environment takes it before its next
episode. Checkpoints contain it, and evaluations play with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiorl.acting.checkpoint import Checkpoint
from aiorl.config import to_plain
from aiorl.config.code import (
    check_takes,
    import_object,
    named_failures,
    refuse_objects,
    with_objects,
    without_objects,
)
from aiorl.env.base_env import has_settings_method
from aiorl.env.env_maker import EnvMaker
from aiorl.env.kinds import EnvKind
from aiorl.env.wrapping import EnvPlan
from aiorl.errors import CheckpointError, ConfigError

KEY = "env_config_fn"
"""Config key that names a function of the result."""
_MADE = "env_config_changes"


@dataclass(slots=True)
class EnvChanges:
    """Differences between the settings of a run's environments and its configuration.

    Attributes:
        made: settings that differ, as plain data.
        planned: settings that will, with the objects in them; empty if no change waits.
        number: number of changes made since the learner began.
        obstacle: reason why these environments can't change, or "".
        has_processes: True if worker processes sample, which get plain data only.
        function: called with the result of each iteration; returns settings that change, or None.
    """

    made: dict[str, Any] = field(default_factory=dict)
    planned: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    obstacle: str = ""
    has_processes: bool = False
    function: Callable[[Mapping[str, Any]], Any] | None = None

    def plan_by(
        self, function: Callable[[Mapping[str, Any]], Any], result: Mapping[str, Any]
    ) -> None:
        """Plan the settings that a function returns for a result; None changes nothing.

        Raises:
            ConfigError: the function failed, or returned something else.
        """
        changes = function(result)
        if changes is not None:
            self.plan(changes, KEY)

    def plan(self, changes: Mapping[str, Any], key: str = "env_config") -> None:
        """Plan other settings.

        Args:
            changes: settings that change; the others stay as they are.
            key: name of what asks for them, for messages.

        Raises:
            ConfigError: they are no settings, or these environments can't change.
        """
        if not isinstance(changes, Mapping) or not all(isinstance(name, str) for name in changes):
            raise ConfigError(
                f"other settings of the environments are {changes!r:.200}, expected a dict of"
                " settings by name.",
                key=key,
            )
        self.check_possible(key)
        if self.has_processes:
            refuse_objects(changes, "env_config")
        self.planned |= changes

    def check_possible(self, key: str) -> None:
        """Refuse to change environments that can't.

        Raises:
            ConfigError: they can't.
        """
        if self.obstacle:
            raise ConfigError(
                f"settings of the environments can't change during this run: {self.obstacle}.",
                key=key,
                hint=(
                    "Use vectorize: serial (or remote), or give an object that holds several"
                    " environments a method set_env_config(config)."
                ),
            )

    def make(self, env_config: Mapping[str, Any]) -> dict[str, Any]:
        """Make the planned changes, and return all settings from now on.

        Args:
            env_config: all settings before.
        """
        planned = self.planned
        self.planned = {}
        self.made |= _as_data(planned)
        self.number += 1
        return {**env_config, **planned}


def obstacle_to_changes(plan: EnvPlan, vectorize: str, env: Any, kind: EnvKind) -> str:
    """Return the reason why settings of environments can't change during a run; "" if they can.

    Args:
        plan: description of a worker's environments.
        vectorize: the user's choice of their form.
        env: the first of them.
        kind: its kind.
    """
    if plan.vectorize != "remote":
        maker = EnvMaker(dataclasses.replace(plan, vectorize=vectorize))
        if maker.form == "native":
            return f"{maker.env_id} is vectorised by itself (vectorize: {vectorize})"
    if kind.holds_copies and not has_settings_method(env):
        return f"{kind.name} ({type(env).__name__}) holds all environments of a worker"
    return ""


# In checkpoints
# --------------------------------------------------------------------------------------------------


def made_changes(changes: EnvChanges) -> dict[str, Any]:
    """Return the entry of a checkpoint's meta; empty if nothing has changed."""
    return {_MADE: changes.made} if changes.made else {}


def changes_made_in(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of environments that had changed in a checkpoint's run.

    Raises:
        CheckpointError: they make no sense.
    """
    made = checkpoint.meta.get(_MADE, {})
    if not isinstance(made, dict):
        raise CheckpointError(checkpoint.path, f"its {_MADE} are {made!r:.100}, expected a map")
    return made


def _as_data(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain data, which name objects."""
    plain: dict[str, Any] = to_plain(without_objects(dict(settings)))
    return plain


def changed(settings: Mapping[str, Any], changes: EnvChanges) -> dict[str, Any]:
    """Return all keys of a run's config, as plain data, with the settings that have changed."""
    return {**settings, "env_config": {**settings["env_config"], **changes.made}}


def with_changes(env_config: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a checkpoint on top, with the objects that they name."""
    return {**env_config, **with_objects(dict(made))}


# A function of the result
# --------------------------------------------------------------------------------------------------


def curriculum_function(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return the function that the key names.

    Raises:
        ConfigError: it can't be imported or called with a result.
    """
    function = import_object(name, key=KEY)
    if not callable(function):
        raise ConfigError(f"{KEY} is {name!r}, which is not a function.", key=KEY, value=name)
    check_takes(function, f"{KEY} {name!r}", KEY, {})
    return named_failures(function, f"{KEY} {name!r}", KEY)
