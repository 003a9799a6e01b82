"""What a run goes on from: a checkpoint is found, checked, and given back to policies, filters, counters and ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from aiorl.acting.checkpoint import Checkpoint, check_compatible, find_checkpoint, list_checkpoints
from aiorl.acting.filters import ReturnFilter, check_states, returns_of
from aiorl.acting.run_dir import RunDirectory
from aiorl.config.schema import CommonConfig
from aiorl.errors import CheckpointError, InternalError, PolicyError
from aiorl.learning.algorithms.algorithm import AlgorithmState
from aiorl.net.protocol.ledger import Ledger
from aiorl.run.build import Learning, unusable_init_from
from aiorl.run.flow import Counters
from aiorl.run.report.results import Progress, Results

_log = logging.getLogger(__name__)


def checkpoint_to_resume(
    config: CommonConfig, directory: RunDirectory, tell: Callable[[str, int], None]
) -> Restored | None:
    """The newest checkpoint of the run's directory if the config says to resume; None for a run from the beginning.

    Raises:
        CheckpointError: none of those that are there can be used.
    """
    if not config.resume:
        return None
    if not list_checkpoints(directory.checkpoints):
        tell("the run has no checkpoint yet: it starts from the beginning", logging.WARNING)
        return None
    restored = Restored.find(directory.checkpoints)
    tell(f"going on from {restored.checkpoint.path}", logging.INFO)
    return restored


def give_back(restored: Restored | None, config: CommonConfig, learning: Learning) -> None:
    """Give policies and filters what they are to go on from: a checkpoint, or what a new run begins with.

    Raises:
        CheckpointError: the checkpoint is of another run, or does not fit.
        ConfigError: ``init_from`` can't be used.
    """
    begins_with, learning.begins_with = learning.begins_with, None
    if restored is not None:
        take_up(restored.checkpoint, config, learning)
    elif begins_with is not None:
        try:
            begin_with(begins_with, learning)
        except CheckpointError as error:
            raise unusable_init_from(config, error) from error


def take_up(checkpoint: Checkpoint, config: CommonConfig, learning: Learning) -> None:
    """Give policies and filters back what a checkpoint of the run holds of them; workers get numbers not drawn yet.

    Raises:
        CheckpointError: it is of another run, or does not fit.
    """
    check_compatible(checkpoint, identity_of(config, learning))
    _check_returns(checkpoint, learning)
    states = {name: checkpoint.filter_state(name) for name in learning.filters}
    check_states(learning.filters, states, checkpoint.path)
    try:
        learning.group.set_state(AlgorithmState(checkpoint.under("algorithm/"), dict(checkpoint.meta["algorithm"])))
    except (PolicyError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        # what an algorithm makes of values that are none of its own
        raise CheckpointError(checkpoint.path, f"its algorithm's state makes no sense: {error!r:.300}") from error
    for name, own in learning.filters.items():
        own.restore(states[name])
    _give_experience_back(checkpoint, learning)
    learning.worker_part = learning.worker_part.model_copy(update={"life": checkpoint.number})


def begin_with(checkpoint: Checkpoint, learning: Learning) -> None:
    """Give the policies of a new run the weights, critics and filter statistics that a checkpoint of another one holds.

    Raises:
        CheckpointError: it doesn't hold them, or they don't fit.
    """
    state = learning.group.get_state()
    tensors = dict(state.tensors)
    for name in tensors:
        if "/weights/" in name:
            found = checkpoint.tensors.get(f"algorithm/{name}")
            if found is None:
                raise CheckpointError(
                    checkpoint.path, f"it holds no {name!r}; a run can begin with the policies and networks of its own"
                )
            tensors[name] = found
    for policy_id in learning.group.algorithms:
        tensors |= _critics_of(policy_id, checkpoint, state.tensors)
    states = {name: checkpoint.filter_state(name) for name in learning.filters}
    filters = {name: own for name, own in learning.filters.items() if states[name] or not isinstance(own, ReturnFilter)}
    check_states(filters, states, checkpoint.path)
    try:
        learning.group.set_state(AlgorithmState(tensors, state.values))
    except CheckpointError as error:
        raise CheckpointError(checkpoint.path, error.reason) from error
    learning.group.weights_replaced()
    for name, own in filters.items():
        own.restore(states[name])


def _critics_of(policy_id: str, checkpoint: Checkpoint, own: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a policy's critics and their targets as a checkpoint holds them; none if they don't fit all of its own."""
    prefixes = f"{policy_id}/critics/", f"{policy_id}/target/critics/"
    found: dict[str, NDArray[Any]] = {}
    for name, tensor in own.items():
        if not name.startswith(prefixes):
            continue
        other = checkpoint.tensors.get(f"algorithm/{name}")
        if other is None or (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            _log.warning("policy %r begins with new critics: %s holds none that fit", policy_id, checkpoint.path)
            return {}
        found[name] = other
    return found


def _give_experience_back(checkpoint: Checkpoint, learning: Learning) -> None:
    """Give policies back what they had stored; one of which the checkpoint holds none begins to store anew, as is said.

    Raises:
        CheckpointError: it does not fit.
    """
    stored: dict[str, Any] = checkpoint.meta.get("experience", {})
    for policy_id, own in learning.group.algorithms.items():
        if own.stores_experience and policy_id not in stored:
            _log.warning(
                "policy %r goes on with an empty replay, which fills with what is sampled now: %s holds nothing of "
                "what was stored", policy_id, checkpoint.path,
            )  # fmt: skip
    for policy_id, values in stored.items():
        algorithm = learning.group.algorithms.get(policy_id)
        if algorithm is None:
            raise CheckpointError(checkpoint.path, f"its experience of policy {policy_id!r:.100} is of no use here")
        try:
            algorithm.restore_experience(values, checkpoint.pieces_of(policy_id))
        except CheckpointError as error:
            raise CheckpointError(checkpoint.path, f"its experience of {policy_id!r}: {error.reason}") from error


def identity_of(config: CommonConfig, learning: Learning) -> dict[str, Any]:
    """What a checkpoint has to have in common with the run that resumes from it."""
    others = {policy_id: part.algo for policy_id, part in learning.worker_part.policies.items() if part.algo}
    return {"env": config.env, "algo": config.algo, "other_algos": others or None, "spaces": learning.spaces}


@dataclass(frozen=True, slots=True)
class RunState:
    """Counters, episodes and ledger of a run; as a dict it is a part of a checkpoint's meta.

    Attributes:
        counters: totals.
        results: `Results.to_state`.
        ledger: `Ledger.as_dict`.
    """

    counters: Counters
    results: dict[str, Any]
    ledger: dict[str, Any]

    @classmethod
    def from_meta(cls, checkpoint: Checkpoint) -> RunState:
        """What a checkpoint holds, tried out: whatever takes it up later can.

        Raises:
            CheckpointError: something is missing or makes no sense.
        """
        meta = checkpoint.meta
        try:
            state = cls(Counters(**meta["counters"]), dict(meta["results"]), dict(meta["ledger"]))
            dict(meta["algorithm"])
            Results(1, 0.0).from_state(state.results, 0.0, Progress(0, 0))
            Ledger.from_dict(state.ledger)
        except KeyError as error:
            raise CheckpointError(checkpoint.path, f"its meta.json lacks what every run has: {error}") from error
        except (TypeError, ValueError, AttributeError, OverflowError, InternalError) as error:
            raise CheckpointError(checkpoint.path, f"its meta.json makes no sense: {error}") from error
        return state


@dataclass(frozen=True, slots=True)
class Restored:
    """What a run goes on from.

    Attributes:
        checkpoint: as it was read.
        run: what it holds of the run.
    """

    checkpoint: Checkpoint
    run: RunState

    @classmethod
    def find(cls, path: str | Path, also: Callable[[Checkpoint], object] = lambda found: None) -> Restored:
        """A checkpoint, or the newest one that is whole of a run.

        Args:
            path: of either.
            also: raises CheckpointError where more is wanted than what every run goes on from.

        Raises:
            CheckpointError: there is none that can be used.
        """

        def check(found: Checkpoint) -> None:
            also(found)
            RunState.from_meta(found)
            found.check_pieces()

        checkpoint = find_checkpoint(path, check)
        return cls(checkpoint, RunState.from_meta(checkpoint))


def _check_returns(checkpoint: Checkpoint, learning: Learning) -> None:
    """Refuse a checkpoint whose values are of rewards scaled otherwise than the run's.

    Raises:
        CheckpointError: they are.
    """
    for policy_id in [name for name, own in learning.filters.items() if not isinstance(own, ReturnFilter)]:
        name = returns_of(policy_id)
        was, now = bool(checkpoint.filter_state(name)), name in learning.filters
        if was != now:
            raise CheckpointError(
                checkpoint.path,
                f"policy {policy_id!r} was trained with normalize_rewards {str(was).lower()}, and it is "
                f"{str(now).lower()} here; take what it was trained with, or start a new run",
            )
