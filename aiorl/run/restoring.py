"""Resume of a run: finding and checking a checkpoint, and restoring policies, filters, counters and
ledger from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aiorl.acting.acting_state import ActingState
from aiorl.acting.checkpoint import Checkpoint, check_compatible, find_checkpoint, list_checkpoints
from aiorl.acting.filters import ReturnFilter, check_states, returns_of
from aiorl.acting.graph_policy import FIXED_TIMESTEP
from aiorl.acting.run_dir import RunDirectory
from aiorl.config.worker import PolicyPart
from aiorl.errors import CheckpointError, InternalError, PolicyError
from aiorl.learning.algorithm import AlgorithmState
from aiorl.net.protocol.ledger import Ledger
from aiorl.run.build import Learning, unusable_init_from
from aiorl.run.counters import Counters
from aiorl.run.env_changes import changes_made_in, with_changes
from aiorl.run.policy_changes import repeat_changes
from aiorl.run.report.results import Progress, Results

_log = logging.getLogger(__name__)

_OF_OUTPUTS = ("v_min", "v_max")
"""Keys of algorithms that decide what the outputs of a network mean, but not how many there are."""


def checkpoint_to_resume(
    directory: RunDirectory, tell: Callable[[str, int], None]
) -> Restored | None:
    """Return the newest checkpoint in the run's directory if the run is resumed, else None.

    Raises:
        CheckpointError: there are checkpoints, but none can be used.
    """
    if directory.is_new:
        return None
    if not list_checkpoints(directory.checkpoints):
        tell("the run has no checkpoint yet: it starts from the beginning", logging.WARNING)
        return None
    restored = Restored.find(directory.checkpoints)
    tell(f"resuming from {restored.checkpoint.path}", logging.INFO)
    return restored


def give_back(restored: Restored | None, learning: Learning, *, init_from: str | None) -> None:
    """Restore policies and filters from the run's checkpoint, or initialize them from
    ``init_from``.

    Args:
        restored: the run's checkpoint, or None.
        learning: policies and filters, which get the state.
        init_from: where the checkpoint of another run was looked for, if there is one.

    Raises:
        CheckpointError: the checkpoint belongs to another run, or does not fit.
        ConfigError: ``init_from`` cannot be used.
    """
    begins_with = learning.begins_with
    learning.begins_with = None
    learning.is_fresh = restored is None and begins_with is None
    if restored is not None:
        take_up(restored.checkpoint, learning)
        _warn_of_other_networks(restored.checkpoint, learning, learning.worker_part.policies.keys())
    elif begins_with is not None:
        try:
            begin_with(begins_with, learning)
        except CheckpointError as error:
            raise unusable_init_from(init_from, error) from error


def take_up(checkpoint: Checkpoint, learning: Learning) -> None:
    """Restore policies and filters from a checkpoint of the run; workers get seeds that were not
    used before.

    Raises:
        CheckpointError: the checkpoint belongs to another run, or does not fit.
    """
    repeat_changes(checkpoint, learning)
    _repeat_env_changes(checkpoint, learning)
    check_compatible(checkpoint, identity_of(learning))
    _check_returns(checkpoint, learning)
    _check_units(checkpoint, learning)
    states = {name: checkpoint.filter_state(name) for name in learning.filters}
    check_states(learning.filters, states, checkpoint.path)
    try:
        learning.group.set_state(
            AlgorithmState(checkpoint.under("algorithm/"), dict(checkpoint.meta["algorithm"]))
        )
    except (PolicyError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        # an algorithm can raise any of these for foreign values
        raise CheckpointError(
            checkpoint.path, f"its algorithm's state is invalid: {error!r:.300}"
        ) from error
    for name, statistic in learning.filters.items():
        statistic.restore(states[name])
    _restore_experience(checkpoint, learning)
    learning.worker_part = learning.worker_part.model_copy(update={"life": checkpoint.number})
    _fix_timesteps(checkpoint, learning, learning.group.fixed.keys())


def _repeat_env_changes(checkpoint: Checkpoint, learning: Learning) -> None:
    """Give environments the settings that had changed in a checkpoint's run."""
    made = changes_made_in(checkpoint)
    learning.env_changes.made |= made
    part = learning.worker_part
    env_config = with_changes(part.env_config, made)
    learning.worker_part = part.model_copy(update={"env_config": env_config})


def begin_with(checkpoint: Checkpoint, learning: Learning) -> None:
    """Initialize a new run with the weights, critics and filter statistics from a checkpoint of
    another run.

    Policies of which the checkpoint has none stay new. A warning names them, those that are left
    out, and settings of networks that differ although the weights fit.

    Raises:
        CheckpointError: the checkpoint has none of the policies, or one of them does not fit.
    """
    _check_units(checkpoint, learning)
    state = learning.group.get_state()
    tensors = dict(state.tensors)
    shared = _shared_policies(checkpoint, learning.group.policy_ids)
    for name in tensors:
        if "/weights/" in name and name.partition("/")[0] in shared:
            if f"algorithm/{name}" not in checkpoint.tensors:
                raise CheckpointError(
                    checkpoint.path,
                    f"it contains no {name!r}; init_from needs the policies and networks of"
                    " this run",
                )
            tensors[name] = checkpoint.tensors[f"algorithm/{name}"]
    for name in learning.group.learners:
        if shared.issuperset(learning.group.policies_of(name)):
            tensors |= _critics_of(name, checkpoint, state.tensors)
    states = {name: checkpoint.filter_state(name) for name in learning.filters}
    filters = {
        name: statistic
        for name, statistic in learning.filters.items()
        if states[name] or (name in shared and not isinstance(statistic, ReturnFilter))
    }
    check_states(filters, states, checkpoint.path)
    try:
        learning.group.set_state(AlgorithmState(tensors, state.values))
    except CheckpointError as error:
        raise CheckpointError(checkpoint.path, error.reason) from error
    learning.group.weights_replaced()
    for name, statistic in filters.items():
        statistic.restore(states[name])
    _fix_timesteps(checkpoint, learning, learning.group.fixed.keys() & shared)
    _warn_of_other_networks(checkpoint, learning, shared)


def _fix_timesteps(checkpoint: Checkpoint, learning: Learning, policy_ids: Set[str]) -> None:
    """Let the schedules of policies that don't learn stand where they did in a checkpoint."""
    saved = _saved_policies(checkpoint)
    timestep = checkpoint.meta.get("counters", {}).get("env_steps_sampled", 0)
    policies = dict(learning.worker_part.policies)
    for policy_id in policy_ids:
        part = policies[policy_id]
        config = {**part.config, FIXED_TIMESTEP: timestep}
        if policy_id in saved and FIXED_TIMESTEP in saved[policy_id].config:
            config[FIXED_TIMESTEP] = saved[policy_id].config[FIXED_TIMESTEP]  # it stood still there
        policies[policy_id] = part.model_copy(update={"config": config})
    learning.worker_part = learning.worker_part.model_copy(update={"policies": policies})


def _shared_policies(checkpoint: Checkpoint, policy_ids: Set[str]) -> set[str]:
    """Return the policies of this run whose weights a checkpoint has; a warning names all others.

    Args:
        checkpoint: the checkpoint.
        policy_ids: ids of this run's policies.

    Raises:
        CheckpointError: it has none of them.
    """
    stored = {
        name.split("/")[1]
        for name in checkpoint.tensors
        if name.startswith("algorithm/") and "/weights/" in name
    }
    if not stored & policy_ids:
        raise CheckpointError(
            checkpoint.path,
            f"it has the policies {_listed(stored)}, and this run {_listed(policy_ids)}; init_from"
            " needs one of the latter",
        )
    new = policy_ids - stored
    unused = stored - policy_ids
    if new:
        _log.warning("new policies: %s, of which %s has no weights", _listed(new), checkpoint.path)
    if unused:
        _log.warning(
            "policies of %s that this run does not have are left out: %s",
            checkpoint.path,
            _listed(unused),
        )
    return stored & policy_ids


def _saved_policies(checkpoint: Checkpoint) -> Mapping[str, PolicyPart]:
    """Return the settings of a checkpoint's policies; empty in early versions, which stored
    none.
    """
    try:
        return ActingState.from_checkpoint(checkpoint).part.policies
    except CheckpointError:
        return {}


def _listed(policy_ids: Set[str]) -> str:
    return ", ".join(map(repr, sorted(policy_ids))) or "none"


def _warn_of_other_networks(
    checkpoint: Checkpoint, learning: Learning, policy_ids: Set[str]
) -> None:
    """Warn of settings by which a network means something else with the same weights, such as its
    activation.
    """
    saved = _saved_policies(checkpoint)
    for policy_id in sorted(policy_ids & saved.keys() & learning.worker_part.policies.keys()):
        theirs = _settings_of_network(saved[policy_id].config)
        ours = _settings_of_network(learning.worker_part.policies[policy_id].config)
        for key in sorted(theirs.keys() & ours.keys()):
            if theirs[key] != ours[key]:
                text = (
                    f"policy {policy_id!r} has {key}: {ours[key]} here, but its weights from"
                    f" {checkpoint.path} were trained with {theirs[key]}"
                )
                _log.warning("%s", text)


def _settings_of_network(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a policy that decide what its weights mean, by dotted key."""
    settings = {name: config[name] for name in _OF_OUTPUTS if name in config}
    model = config.get("model")
    if isinstance(model, Mapping):
        settings |= {f"model.{name}": value for name, value in model.items()}
    settings.pop("model.initial_log_std", None)  # the weights have taken its place
    return settings


def _critics_of(
    learner_name: str, checkpoint: Checkpoint, tensors: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Return a learner's critics and their targets from a checkpoint; empty unless all of them fit
    the run's ``tensors``.
    """
    prefixes = f"{learner_name}/critics/", f"{learner_name}/target/critics/"
    critics: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefixes):
            continue
        stored = checkpoint.tensors.get(f"algorithm/{name}")
        if stored is None or (stored.shape, stored.dtype) != (tensor.shape, tensor.dtype):
            _log.warning(
                "policy %r begins with new critics: %s contains none that fit",
                learner_name,
                checkpoint.path,
            )
            return {}
        critics[name] = stored
    return critics


def _restore_experience(checkpoint: Checkpoint, learning: Learning) -> None:
    """Restore the experience stored by policies; a policy without any in the checkpoint begins with
    an empty replay.

    Raises:
        CheckpointError: the stored experience does not fit.
    """
    stored: dict[str, Any] = checkpoint.meta.get("experience", {})
    for policy_id, learner in learning.group.learners.items():
        if learner.stores_experience and policy_id not in stored:
            _log.warning(
                "policy %r continues with an empty replay, which fills with new samples: %s"
                " contains no stored experience",
                policy_id,
                checkpoint.path,
            )
    for policy_id, values in stored.items():
        if policy_id not in learning.group.learners:
            raise CheckpointError(
                checkpoint.path, f"its experience of policy {policy_id!r:.100} is useless here"
            )
        learner = learning.group.learners[policy_id]
        try:
            learner.restore_experience(values, checkpoint.pieces_of(policy_id))
        except CheckpointError as error:
            raise CheckpointError(
                checkpoint.path, f"its experience of {policy_id!r}: {error.reason}"
            ) from error


def identity_of(learning: Learning) -> dict[str, Any]:
    """Return the facts in which a checkpoint must agree with the run that resumes from it."""
    part = learning.worker_part
    other_algos = {name: policy.algo for name, policy in part.policies.items() if policy.algo}
    return {
        "env": part.env,
        "algo": part.algo,
        "other_algos": other_algos or None,
        "spaces": learning.spaces,
    }


@dataclass(frozen=True, slots=True)
class RunState:
    """Counters, episodes and ledger of a run; as a dict it is part of a checkpoint's meta.

    Attributes:
        counters: totals of the run.
        results: value of `Results.to_state`.
        ledger: value of `Ledger.as_dict`.
    """

    counters: Counters
    results: dict[str, Any]
    ledger: dict[str, Any]

    @classmethod
    def from_meta(cls, checkpoint: Checkpoint) -> RunState:
        """Read the state from a checkpoint and check that results and ledger can be restored from
        it.

        Raises:
            CheckpointError: a part is missing or invalid.
        """
        meta = checkpoint.meta
        try:
            state = cls(Counters(**meta["counters"]), dict(meta["results"]), dict(meta["ledger"]))
            dict(meta["algorithm"])
            Results(1, 0.0).from_state(state.results, 0.0, Progress(0, 0))
            Ledger.from_dict(state.ledger)
        except KeyError as error:
            raise CheckpointError(
                checkpoint.path, f"its meta.json lacks a key that every run has: {error}"
            ) from error
        except (TypeError, ValueError, AttributeError, OverflowError, InternalError) as error:
            raise CheckpointError(checkpoint.path, f"its meta.json is invalid: {error}") from error
        return state


@dataclass(frozen=True, slots=True)
class Restored:
    """Checkpoint that a run resumes from.

    Attributes:
        checkpoint: the checkpoint as read.
        run: the run's state in it.
    """

    checkpoint: Checkpoint
    run: RunState

    @classmethod
    def find(
        cls, path: str | Path, also: Callable[[Checkpoint], object] = lambda checkpoint: None
    ) -> Restored:
        """Find a checkpoint: the one at ``path``, or the newest intact one of a run.

        Args:
            path: path of the checkpoint, of a run or of a directory of checkpoints.
            also: further check, which raises CheckpointError to reject a checkpoint.

        Raises:
            CheckpointError: no checkpoint can be used.
        """

        def check(candidate: Checkpoint) -> None:
            also(candidate)
            RunState.from_meta(candidate)
            candidate.check_pieces()

        checkpoint = find_checkpoint(path, check)
        return cls(checkpoint, RunState.from_meta(checkpoint))


def _check_returns(checkpoint: Checkpoint, learning: Learning) -> None:
    """Check that a checkpoint was trained with rewards scaled as in the run.

    Raises:
        CheckpointError: ``normalize_rewards`` differs.
    """
    for policy_id, statistic in learning.filters.items():
        if not isinstance(statistic, ReturnFilter):
            name = returns_of(policy_id)
            _check_unchanged(
                checkpoint,
                policy_id,
                "normalize_rewards",
                was=bool(checkpoint.filter_state(name)),
                now=name in learning.filters,
            )


def _check_units(checkpoint: Checkpoint, learning: Learning) -> None:
    """Check that a checkpoint's policies act in the units of the run's.

    Raises:
        CheckpointError: ``normalize_actions`` differs.
    """
    try:
        saved = ActingState.from_checkpoint(checkpoint).graphs
    except CheckpointError:  # early versions stored no graphs, and had no units
        saved = {}
    for policy_id, graph in learning.graphs.items():
        if policy_id in saved or not saved:
            _check_unchanged(
                checkpoint,
                policy_id,
                "normalize_actions:",
                was=is_scaled(saved.get(policy_id, {})),
                now=is_scaled(graph),
            )


def _check_unchanged(
    checkpoint: Checkpoint,
    policy_id: str,
    setting: str,
    *,
    was: bool,
    now: bool,
) -> None:
    """Check that a setting is as in the training of a checkpoint's policy.

    Raises:
        CheckpointError: it is not.
    """
    if was != now:
        raise CheckpointError(
            checkpoint.path,
            f"policy {policy_id!r} was trained with {setting} {str(was).lower()}, but"
            f" it is {str(now).lower()} here; set it as in training, or start a new run",
        )


def is_scaled(graph: Mapping[str, Any]) -> bool:
    """Return True if the actions of an acting graph are in units of `normalize_actions`."""
    return str(graph.get("spec", {}).get("distribution", "")).startswith("scaled")
