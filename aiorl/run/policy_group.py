"""All policies of a run that have a network: trained ones, each with its learner, and fixed ones.

For the `Updater`, a group looks like one learner with train batches by policy id.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.errors import BatchError, CheckpointError, TrainingDiverged
from aiorl.learning.algorithm import AlgorithmState, Batch, LeasePlan, UpdateResult
from aiorl.learning.learner import Learner
from aiorl.learning.replay.ring import Snapshot
from aiorl.run.ingest import AssembledBatch

Array = NDArray[Any]
PolicyColumns = Mapping[str, Mapping[str, Array]]
"""Policy id -> columns by name."""


class PolicyGroup:
    """Updates several policies, one after the other, in the order of their ids.

    Attributes:
        learners: policy id -> learner, for trained policies.
        fixed: policy id -> weights, for fixed policies.
    """

    def __init__(
        self,
        learners: Mapping[str, Learner],
        fixed: Mapping[str, Mapping[str, Array]] | None = None,
    ) -> None:
        """Take ownership of learners and weights; no other code must use them afterwards."""
        self.learners = {policy_id: learners[policy_id] for policy_id in sorted(learners)}
        self.fixed = {
            policy_id: dict(weights) for policy_id, weights in sorted((fixed or {}).items())
        }
        self._is_single = set(self.learners) == {DEFAULT_POLICY_ID} and not self.fixed

    def check_fragment(self, batches: PolicyColumns) -> None:
        """Check, before a fragment is queued, that `make_batch` can use it. Can be called in any
        thread.

        Raises:
            BatchError: `make_batch` cannot use it; the error names the policy or column at fault.
        """
        for policy_id, columns in batches.items():
            learner = self.learners.get(policy_id)
            if learner is None:
                raise BatchError(
                    "batches",
                    f"policies that learn, {', '.join(self.learners)}",
                    f"{policy_id!r:.100}",
                )
            learner.check_fragment(columns)

    def make_batch(self, fragments: Sequence[PolicyColumns]) -> dict[str, Batch]:
        """Make a train batch for each policy with rows in these fragments, in the order given.

        Returns:
            Policy id -> train batch; see `Learner.make_batch`.

        Raises:
            BatchError: a column is missing or does not fit.
        """
        batches = {}
        for policy_id, learner in self.learners.items():
            own = [fragment[policy_id] for fragment in fragments if policy_id in fragment]
            if own:
                batches[policy_id] = learner.make_batch(own)
        return batches

    def update(self, batches: Mapping[str, Batch], env_steps_total: int) -> UpdateResult:
        """Learn from the train batches; policies without a batch stay as they are.

        Args:
            batches: result of `make_batch`.
            env_steps_total: env steps trained on before; schedules depend on it.

        Returns:
            Metrics by name, or by ``policy id/name`` if there are policies other than the default
            one. The result counts as skipped if the update of any policy was skipped.

        Raises:
            TrainingDiverged: too many updates of a policy were skipped in a row.
        """
        metrics: dict[str, float] = {}
        skipped = False
        bad_column = ""
        for policy_id, batch in batches.items():
            prefix = "" if self._is_single else f"{policy_id}/"
            try:
                result = self.learners[policy_id].update(batch, env_steps_total)
            except TrainingDiverged as error:
                if self._is_single:
                    raise
                raise TrainingDiverged(f"policy {policy_id!r}: {error}") from error
            metrics |= {f"{prefix}{name}": value for name, value in result.metrics.items()}
            skipped |= result.skipped
            bad_column = bad_column or (result.bad_column and f"{prefix}{result.bad_column}")
        return UpdateResult(metrics, skipped, bad_column)

    def hurry(self) -> None:
        """See `Learner.hurry`."""
        for learner in self.learners.values():
            learner.hurry()

    def warm_up(self) -> None:
        """Compile every update."""
        for learner in self.learners.values():
            learner.warm_up()

    def get_weights(self) -> dict[str, dict[str, Array]]:
        """Return policy id -> weights by the names in its acting graph; copies for trained
        policies.
        """
        learned = {policy_id: learner.get_weights() for policy_id, learner in self.learners.items()}
        return {**learned, **self.fixed}

    def get_state(self) -> AlgorithmState:
        """Return copies of everything that `set_state` needs: tensors by ``policy id/name``, values
        by policy id.
        """
        return self.hold_state()()

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """See `Learner.hold_state`."""
        held = {policy_id: learner.hold_state() for policy_id, learner in self.learners.items()}
        return lambda: self._merged({policy_id: state() for policy_id, state in held.items()})

    def weights_replaced(self) -> None:
        """See `Learner.weights_replaced`."""
        for learner in self.learners.values():
            learner.weights_replaced()

    @property
    def stores_experience(self) -> bool:
        """True if any policy stores experience, so that `hold_experience` returns some."""
        return any(learner.stores_experience for learner in self.learners.values())

    def hold_experience(self) -> dict[str, Snapshot]:
        """Return policy id -> stored experience, for policies that store any; see
        `Learner.hold_experience`.
        """
        held = {
            policy_id: learner.hold_experience() for policy_id, learner in self.learners.items()
        }
        return {
            policy_id: experience
            for policy_id, experience in held.items()
            if experience is not None
        }

    def _merged(self, states: Mapping[str, AlgorithmState]) -> AlgorithmState:
        tensors: dict[str, Array] = {}
        values: dict[str, Any] = {}
        for policy_id, state in states.items():
            tensors |= {f"{policy_id}/{name}": tensor for name, tensor in state.tensors.items()}
            values[policy_id] = state.values
        for policy_id, weights in self.fixed.items():
            tensors |= {
                f"{policy_id}/weights/{name}": np.array(weight) for name, weight in weights.items()
            }
        return AlgorithmState(tensors, values)

    def set_state(self, state: AlgorithmState) -> None:
        """Continue from `state`.

        Raises:
            CheckpointError: the state belongs to other policies, or does not fit one of them.
        """
        there = {name.partition("/")[0] for name in state.tensors}
        here = {*self.learners, *self.fixed}
        if there != here or state.values.keys() != self.learners.keys():
            raise CheckpointError(
                "tensors",
                f"they belong to the policies {_list(there)}, of which {_list(state.values)} learn;"
                f" this run has {_list(here)}, of which {_list(self.learners)} learn",
            )
        tensors: dict[str, dict[str, Array]] = {policy_id: {} for policy_id in here}
        for name, tensor in state.tensors.items():
            policy_id, _, inner = name.partition("/")
            tensors[policy_id][inner] = tensor
        fixed: dict[str, dict[str, Array]] = {}
        for policy_id, weights in self.fixed.items():
            given = {
                name.removeprefix("weights/"): tensor for name, tensor in tensors[policy_id].items()
            }
            if {name: (tensor.shape, tensor.dtype) for name, tensor in given.items()} != {
                name: (weight.shape, weight.dtype) for name, weight in weights.items()
            }:
                raise CheckpointError(
                    "tensors", f"the weights of policy {policy_id!r} don't fit its model"
                )
            fixed[policy_id] = given
        for policy_id, learner in self.learners.items():
            learner.set_state(AlgorithmState(tensors[policy_id], state.values[policy_id]))
        self.fixed.update(fixed)


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


@dataclass(frozen=True, slots=True)
class WarmUpDone:
    """Event: the update is compiled.

    Attributes:
        took_s: compilation time in seconds.
    """

    took_s: float


@dataclass(frozen=True, slots=True)
class UpdateDone:
    """Event: an update with one train batch was made or skipped.

    Attributes:
        batch: the train batch.
        result: result returned by the learners.
        weights: policy id -> copies of the weights after the update; None if they are not published
            yet.
        wait_s: seconds the thread waited for the batch.
        make_batch_s: seconds taken to lay out the batch.
        update_s: seconds taken by the update.
        state: returns the state of all policies after the update, see `Learner.hold_state`.
        experience: policy id -> stored experience after the update, if it was requested; see
            `Learner.hold_experience`.
    """

    batch: AssembledBatch
    result: UpdateResult
    weights: dict[str, dict[str, NDArray[Any]]] | None
    wait_s: float
    make_batch_s: float
    update_s: float
    state: Callable[[], AlgorithmState]
    experience: dict[str, Snapshot] | None = None


class Updater:
    """Makes updates in the thread of the caller.

    Attributes:
        group: the policies that are updated.
        wants_experience: set to have the next update return the stored experience; any thread can
            set it.
    """

    def __init__(self, group: PolicyGroup, plan: LeasePlan, env_steps_total: int = 0) -> None:
        """Prepare updates without compiling yet.

        Args:
            group: the policies that are updated.
            plan: decides how often weights are published.
            env_steps_total: env steps trained on before, when a run is resumed.
        """
        self.group = group
        self.wants_experience = threading.Event()
        self._env_steps_total = env_steps_total
        self._plan = plan
        self._unpublished = 0
        self._published_at = -math.inf

    def warm_up(self) -> WarmUpDone:
        """Compile the update."""
        started = time.perf_counter()
        self.group.warm_up()
        return WarmUpDone(time.perf_counter() - started)

    def update(self, batch: AssembledBatch, wait_s: float = 0.0) -> UpdateDone:
        """Make an update with a train batch, for which the caller waited ``wait_s`` seconds."""
        started = time.perf_counter()
        laid_out = self.group.make_batch(batch.batches)
        made = time.perf_counter()
        result = self.group.update(laid_out, self._env_steps_total)
        updated = time.perf_counter()
        self._env_steps_total += batch.env_steps
        weights = self.group.get_weights() if self._publishes(updated) else None
        state = self.group.hold_state()
        experience = None
        if self.wants_experience.is_set():
            self.wants_experience.clear()
            experience = self.group.hold_experience()
        return UpdateDone(
            batch, result, weights, wait_s, made - started, updated - made, state, experience
        )

    def publish_next(self) -> None:
        """Publish the weights of the next update, like those of the first one."""
        self._unpublished = 0
        self._published_at = -math.inf

    def _publishes(self, now: float) -> bool:
        """Count an update and return True if its weights must be published."""
        self._unpublished += 1
        plan = self._plan
        if (
            self._unpublished < plan.publish_every
            and now - self._published_at < plan.publish_interval_s
        ):
            return False
        self._unpublished = 0
        self._published_at = now
        return True
