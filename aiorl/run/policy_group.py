"""All policies of a run that have a network: trained ones with their learners, and fixed ones.

For the `Updater`, a group looks like one learner. Train batches, metrics and states are by the name
of a learner: the id of its policy; or, for a joint learner of several policies, such as "left" and
"right", the name that `aiorl.run.joint_policies` gives it, "left+right".
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.data.columns import DEFAULT_POLICY_ID, Array
from aiorl.errors import BatchError, CheckpointError, TrainingDiverged
from aiorl.learning.algorithm import AlgorithmState, Batch, LeasePlan, UpdateResult
from aiorl.learning.learner import Learner
from aiorl.learning.replay.ring import Snapshot
from aiorl.run.ingest import AssembledBatch

PolicyColumns = Mapping[str, Mapping[str, Array]]
"""Policy id -> columns by name."""


class PolicyGroup:
    """Updates several policies, one learner after the other, in the order of their names.

    Attributes:
        learners: name -> learner, for trained policies.
        joint: name of a joint learner -> ids of its policies.
        fixed: policy id -> weights, for fixed policies.
        trained_ids: ids of the policies that learn.
        num_updates: number of calls of `update`.
    """

    def __init__(
        self,
        learners: Mapping[str, Learner],
        fixed: Mapping[str, Mapping[str, Array]] | None = None,
        joint: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Take ownership of learners and weights; no other code must use them afterwards."""
        self.learners = {name: learners[name] for name in sorted(learners)}
        self.joint = dict(joint or {})
        self.fixed = {
            policy_id: dict(weights) for policy_id, weights in sorted((fixed or {}).items())
        }
        self.trained_ids = {
            policy_id for name in self.learners for policy_id in self.policies_of(name)
        }
        self._is_single = set(self.learners) == {DEFAULT_POLICY_ID} and not self.fixed
        self.num_updates = 0
        self._changed_at = dict.fromkeys(self.learners, 0)

    @property
    def policy_ids(self) -> set[str]:
        """Ids of all policies."""
        return {*self.trained_ids, *self.fixed}

    def policies_of(self, learner_name: str) -> Sequence[str]:
        """Return the ids of the policies of a learner."""
        return self.joint.get(learner_name, (learner_name,))

    def check_fragment(self, batches: PolicyColumns) -> None:
        """Check, before a fragment is queued, that `make_batch` can use it. Can be called in any
        thread.

        Raises:
            BatchError: `make_batch` cannot use it; the error names the policy or column at fault.
        """
        for policy_id in batches.keys() - self.trained_ids:
            raise BatchError(
                "batches",
                f"policies that learn, {_list(self.trained_ids)}",
                f"{policy_id!r:.100}",
            )
        for name, part in self._parts(batches):
            self.learners[name].check_fragment(part)

    def make_batch(self, fragments: Sequence[PolicyColumns]) -> dict[str, Batch]:
        """Make a train batch for each learner with rows in these fragments, in the order given.

        Returns:
            Name of the learner -> train batch; see `Learner.make_batch`.

        Raises:
            BatchError: a column is missing or does not fit.
        """
        parts: dict[str, list[Mapping[str, Any]]] = {name: [] for name in self.learners}
        for fragment in fragments:
            for name, part in self._parts(fragment):
                parts[name].append(part)
        return {
            name: learner.make_batch(parts[name])
            for name, learner in self.learners.items()
            if parts[name]
        }

    def update(self, batches: Mapping[str, Batch], env_steps_total: int) -> UpdateResult:
        """Learn from the train batches; learners without a batch stay as they are.

        Args:
            batches: result of `make_batch`.
            env_steps_total: env steps trained on before; schedules depend on it.

        Returns:
            Metrics by name, or by ``name of the learner/name`` if there are policies other than the
            default one. The result counts as skipped if the update of any learner was skipped.

        Raises:
            TrainingDiverged: too many updates of a learner were skipped in a row.
        """
        self.num_updates += 1
        self._changed_at |= dict.fromkeys(batches, self.num_updates)
        metrics: dict[str, float] = {}
        skipped = False
        bad_column = ""
        for learner_name, batch in batches.items():
            prefix = "" if self._is_single else f"{learner_name}/"
            try:
                result = self.learners[learner_name].update(batch, env_steps_total)
            except TrainingDiverged as error:
                if self._is_single:
                    raise
                raise TrainingDiverged(f"policy {learner_name!r}: {error}") from error
            metrics |= {f"{prefix}{name}": value for name, value in result.metrics.items()}
            skipped |= result.skipped
            if result.bad_column and not bad_column:
                bad_column = f"{prefix}{result.bad_column}"
        return UpdateResult(metrics, skipped, bad_column)

    def hurry(self) -> None:
        """See `Learner.hurry`."""
        for learner in self.learners.values():
            learner.hurry()

    def warm_up(self) -> None:
        """Compile every update."""
        for learner in self.learners.values():
            learner.warm_up()

    def get_weights(self, since: int = -1) -> dict[str, dict[str, Array]]:
        """Return policy id -> weights by the names in its acting graph; copies for trained
        policies.

        Args:
            since: a former value of `num_updates`: policies that no later update has changed are
                left out. -1 returns all policies.
        """
        learned: dict[str, dict[str, Array]] = {}
        for name, learner in self.learners.items():
            if self._changed_at[name] <= since:
                continue
            weights = learner.get_weights()
            if name in self.joint:
                learned |= weights
            else:
                learned[name] = weights
        return learned if since >= 0 else {**learned, **self.fixed}

    def get_state(self) -> AlgorithmState:
        """Return copies of everything that `set_state` needs: tensors by ``policy id/name`` or
        ``name of the learner/name``, values by name of the learner.
        """
        return self.hold_state()()

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """See `Learner.hold_state`."""
        states = {name: learner.hold_state() for name, learner in self.learners.items()}
        fixed = self.fixed
        return lambda: self._merged({name: state() for name, state in states.items()}, fixed)

    def change_fixed(
        self, added: Mapping[str, Mapping[str, Array]], removed: Collection[str]
    ) -> None:
        """Add fixed policies and remove others. States held before do not change.

        Args:
            added: policy id -> weights.
            removed: ids of fixed policies.
        """
        remaining = {name: arrays for name, arrays in self.fixed.items() if name not in removed}
        self.fixed = {**remaining, **{name: dict(arrays) for name, arrays in added.items()}}

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
        stored = {}
        for policy_id, learner in self.learners.items():
            experience = learner.hold_experience()
            if experience is not None:
                stored[policy_id] = experience
        return stored

    def _parts(self, fragment: PolicyColumns) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the names of the learners with rows in a fragment, and the part of each: columns by
        name, or for a joint learner by policy id and name.
        """
        for name in self.learners:
            if name in self.joint:
                part = {
                    policy_id: fragment[policy_id]
                    for policy_id in self.joint[name]
                    if policy_id in fragment
                }
                if part:
                    yield name, part
            elif name in fragment:
                yield name, fragment[name]

    def _merged(
        self, states: Mapping[str, AlgorithmState], fixed: Mapping[str, Mapping[str, Array]]
    ) -> AlgorithmState:
        tensors: dict[str, Array] = {}
        values: dict[str, Any] = {}
        for learner_name, state in states.items():
            values[learner_name] = state.values
            for name, tensor in state.tensors.items():
                tensors[self._saved_name(learner_name, name)] = tensor
        for policy_id, weights in fixed.items():
            tensors |= {
                f"{policy_id}/weights/{name}": np.array(weight) for name, weight in weights.items()
            }
        return AlgorithmState(tensors, values)

    def _saved_name(self, learner_name: str, name: str) -> str:
        """Return the name under which a tensor of a learner is saved.

        Weights are saved under the id of their policy, where everything that acts looks for them.
        """
        if learner_name in self.joint and name.startswith("weights/"):
            _, policy_id, weight = name.split("/", 2)
            return f"{policy_id}/weights/{weight}"
        return f"{learner_name}/{name}"

    def set_state(self, state: AlgorithmState) -> None:
        """Continue from `state`.

        Raises:
            CheckpointError: the state belongs to other policies, or does not fit one of them.
        """
        saved_owners = {name.partition("/")[0] for name in state.tensors}
        owners = {*self.policy_ids, *self.learners}
        if saved_owners != owners or state.values.keys() != self.learners.keys():
            raise CheckpointError(
                "tensors",
                f"they belong to the policies {_list(saved_owners)}, of which"
                f" {_list(state.values)} learn; this run has {_list(owners)}, of which"
                f" {_list(self.learners)} learn",
            )
        tensors: dict[str, dict[str, Array]] = {owner: {} for owner in owners}
        for name, tensor in state.tensors.items():
            owner, _, inner_name = name.partition("/")
            tensors[owner][inner_name] = tensor
        fixed: dict[str, dict[str, Array]] = {}
        for policy_id, weights in self.fixed.items():
            saved_weights = _weights_in(tensors[policy_id])
            if _forms(saved_weights) != _forms(weights):
                raise CheckpointError(
                    "tensors", f"the weights of policy {policy_id!r} don't fit its model"
                )
            fixed[policy_id] = saved_weights
        for learner_name, learner in self.learners.items():
            of_learner = tensors[learner_name]
            for policy_id in self.joint.get(learner_name, ()):
                for name, tensor in _weights_in(tensors[policy_id]).items():
                    of_learner[f"weights/{policy_id}/{name}"] = tensor
            learner.set_state(AlgorithmState(of_learner, state.values[learner_name]))
        self.fixed = fixed


def _weights_in(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights among a policy's saved tensors, by the names in its acting graph."""
    return {name.removeprefix("weights/"): tensor for name, tensor in tensors.items()}


def _forms(weights: Mapping[str, Array]) -> dict[str, tuple[Any, ...]]:
    return {name: (weight.shape, weight.dtype) for name, weight in weights.items()}


def _list(names: Iterable[str]) -> str:
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
        weights: policy id -> copies of the weights after the update, of the policies that have
            changed since weights were last published; None if they are not published yet.
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
        self._published_updates = group.num_updates

    def warm_up(self) -> WarmUpDone:
        """Compile the update."""
        started = time.perf_counter()
        self.group.warm_up()
        return WarmUpDone(time.perf_counter() - started)

    def update(self, batch: AssembledBatch, wait_s: float = 0.0) -> UpdateDone:
        """Make an update with a train batch, for which the caller waited ``wait_s`` seconds."""
        started = time.perf_counter()
        train_batches = self.group.make_batch(batch.batches)
        batch_made = time.perf_counter()
        result = self.group.update(train_batches, self._env_steps_total)
        updated = time.perf_counter()
        self._env_steps_total += batch.env_steps
        weights = None
        if self._publishes(updated):
            weights = self.group.get_weights(self._published_updates)
            self._published_updates = self.group.num_updates
        state = self.group.hold_state()
        experience = None
        if self.wants_experience.is_set():
            self.wants_experience.clear()
            experience = self.group.hold_experience()
        return UpdateDone(
            batch=batch,
            result=result,
            weights=weights,
            wait_s=wait_s,
            make_batch_s=batch_made - started,
            update_s=updated - batch_made,
            state=state,
            experience=experience,
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
