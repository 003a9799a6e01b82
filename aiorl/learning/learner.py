"""Learner of a policy, or of several together: networks, experience and compiled update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aiorl.acting.filters import NoFilter, ObservationFilter
from aiorl.config.schema import CommonConfig
from aiorl.data.columns import DEFAULT_POLICY_ID, Array, Piece
from aiorl.errors import CheckpointError, ConfigError, TrainingDiverged
from aiorl.learning.algorithm import (
    Algorithm,
    AlgorithmState,
    Batch,
    Feed,
    Networks,
    Update,
    UpdateResult,
    own_config,
)
from aiorl.learning.compiled import CompiledUpdate
from aiorl.learning.joint import JointBatches, joint_experience_of
from aiorl.learning.lazy import tf
from aiorl.learning.steps import STEPS_BEFORE

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic
    from aiorl.learning.replay.ring import Snapshot

_log = logging.getLogger(__name__)


MAX_SKIPS_IN_A_ROW = 10
"""Maximum number of consecutive updates that may be skipped for non-finite numbers; then training
ends."""

# separates the learner's random numbers from those of workers with the same seed
_SEED_KEY = 0x616C676F


class Learner:
    """Learns one policy by what its algorithm says; or several policies together, if the algorithm
    is joint.

    If there are several, fragments, batches and weights are by policy id.

    One thread, which runs the updates, calls `warm_up` and then the other methods. Only
    `check_fragment` and `hurry` are called in any thread.

    Attributes:
        config: config of the run, or of the policy if it has its own settings.
        networks: networks to train.
        rng: generator of the learner's random numbers.
        feed: takes the fragments.
        update_plan: what the algorithm's `update` returned: loop, knobs, adaptations and further
            variables.
        compiled: compiled update.
        updates: number of updates so far that were not skipped.
    """

    def __init__(
        self,
        kind: type[Algorithm[Any]],
        config: CommonConfig,
        model: ActorCritic | Networks,
        *,
        merged_filter: ObservationFilter | None = None,
    ) -> None:
        """Take over the model without changing it, and allocate buffers; nothing is compiled yet.

        Args:
            kind: algorithm.
            config: its config.
            model: network to train, from the algorithm's `build_model`; the networks of all
                policies for an algorithm that is joint.
            merged_filter: merged filter of the policy's observations, for observations that arrive
                unfiltered; another thread may merge into it.

        Raises:
            ConfigError: a setting can't be honoured, there is not enough room, or the algorithm's
                update doesn't fit its experience.
        """
        self.config = own_config(kind, config)
        self.networks = model if isinstance(model, Networks) else Networks.of(model)
        self.rng = np.random.default_rng(
            np.random.SeedSequence(config.seed, spawn_key=(_SEED_KEY,))
        )
        self.update_plan = kind.update(self.config, self.networks)
        if not isinstance(self.update_plan, Update):
            raise ConfigError(
                f"{kind.__name__}.update returned a {type(self.update_plan).__name__}, expected an Update.",
                key="algo",
                hint="Return Update(loop=..., knobs=...).",
            )
        self._is_joint = kind.is_joint
        self.feed: Feed
        if kind.is_joint:
            joint_experience = joint_experience_of(kind, self.config)
            self.feed = JointBatches(joint_experience, self.networks, self.update_plan, self.rng)
        else:
            experience = kind.experience(self.config)
            self.feed = experience.feed(self.model, self.update_plan, self.rng)
        self.feed.merged_filter = merged_filter or NoFilter()
        self.compiled = CompiledUpdate(
            self.feed.fit(self.update_plan.loop),
            [*self.update_plan.knobs_at(0), STEPS_BEFORE],
            xla=config.update_mode,
            shares_memory=self.feed.shares_memory,
        )
        self.updates = 0
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._lr_is_over = False
        self._handles: list[tuple[str, Any, Any]] = []  # name, handle and dtype of each variable

    @property
    def model(self) -> Any:  # Any: algorithms build networks of their own classes
        """The network of the only policy."""
        return self.networks.model

    def check_fragment(self, fragment: Mapping[str, Any]) -> None:
        """See `Feed.check_fragment`. Can be called in any thread."""
        self.feed.check_fragment(fragment)

    def make_batch(self, fragments: Sequence[Mapping[str, Any]]) -> Batch:
        """See `Feed.make_batch`."""
        return self.feed.make_batch(fragments)

    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Learn from one train batch, or make all the optimiser steps that are due for the rows
        stored.

        Args:
            batch: batch of any shape from `make_batch`.
            env_steps_total: env steps trained on before this batch; schedules depend on it.

        Returns:
            Metrics of the update, and whether it was skipped.

        Raises:
            TrainingDiverged: `MAX_SKIPS_IN_A_ROW` updates in a row were skipped.
        """
        knobs = self.update_plan.knobs_at(env_steps_total)
        if knobs["lr"] <= 0:
            self._warn_of_last_lr(env_steps_total)
        finished = []
        bad_column = None
        num_steps_of_skipped = 0.0
        for due in self.feed.rounds(batch, env_steps_total):
            result = self.compiled(
                due.columns,
                due.order,
                {STEPS_BEFORE: 0.0, **knobs, **due.knobs},
                max_steps=due.num_steps,
            )
            if not result.is_kept:
                bad_column = self.feed.first_not_finite(due)
                num_steps_of_skipped = result.metrics["num_sgd_steps"]
                self._note_skipped(bad_column)
                continue
            self.updates += 1
            self._skipped_in_a_row = 0
            self.feed.take_back(due, result.written)
            if due.num_steps:
                for adaptation in self.update_plan.adaptations:
                    adaptation.after_update(result.metrics, self.updates)
            finished.append((due, result.metrics))
        metrics = {
            "num_sgd_steps": num_steps_of_skipped,  # if no call was kept
            **self.feed.report(finished),
            "cur_lr": knobs["lr"],
            **{name: knobs[name] for name in self.update_plan.reported},
            "updates_skipped": float(self._skipped),
        }
        return UpdateResult(metrics, bad_column is not None, bad_column or "")

    def warm_up(self) -> None:
        """Compile the update so that the first batch doesn't wait.

        Changes neither weights nor random states.
        """
        usual = self.feed.nominal()
        self.compiled.warm_up(usual.columns, usual.order)

    def hurry(self) -> None:
        """Ask a running update to end early, in a state from which training can continue.

        Can be called in any thread. No update follows.
        """
        self.feed.hurry()

    def get_weights(self) -> dict[str, Any]:
        """Return copies of the weights, of any shape, by the names that the acting graph uses;
        always finite. If there are several policies, they are by policy id and name.
        """
        read = tf.raw_ops.ReadVariableOp  # takes a fraction of the time of a variable's own method
        weights = {
            policy_id: {
                name: np.array(read(resource=item.handle, dtype=item.dtype).numpy())
                for name, item in network.variables.items()
            }
            for policy_id, network in self.networks.by_policy.items()
        }
        return weights if self._is_joint else weights[DEFAULT_POLICY_ID]

    def get_state(self) -> AlgorithmState:
        """Return copies of everything that `set_state` needs."""
        return self.hold_state()()

    def hold_state(self) -> Callable[[], AlgorithmState]:
        """Return a function that returns the current state, even after later updates. It can be
        called in any thread.

        Called after every update, so that the state before an update stays available while that
        update runs. A tensor read from a variable is immutable; TensorFlow copies it only when the
        variable changes.

        Raises:
            ConfigError: two adaptations, or one and the feed, save a value of the same name.
        """
        if not self._handles:
            self._handles = [
                (name, item.handle, tf.as_dtype(item.dtype))
                for name, item in self._variables().items()
            ]
        read = tf.raw_ops.ReadVariableOp  # see `get_weights`
        tensors = {
            name: read(resource=handle, dtype=dtype) for name, handle, dtype in self._handles
        }
        values: dict[str, Any] = {
            "rng": self.rng.bit_generator.state,
            "updates": self.updates,
            "updates_skipped": self._skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }
        adaptations = self.update_plan.adaptations
        for part in (self.feed.state(), *(adaptation.state() for adaptation in adaptations)):
            for name in values.keys() & part.keys():
                raise ConfigError(
                    f"two parts of {self.config.algo} save a value named {name!r}.",
                    key="algo",
                    hint="Give each value of an adaptation or a feed of your own another name.",
                )
            values |= part
        return lambda: AlgorithmState(
            {name: np.array(tensor.numpy()) for name, tensor in tensors.items()}, values
        )

    def set_state(self, state: AlgorithmState) -> None:
        """Continue from `state`. All of it is checked before any of it is used.

        Raises:
            CheckpointError: a tensor is missing, superfluous or has another shape, or a value is
                missing.
        """
        expected = {name: _form(item.numpy()) for name, item in self._variables().items()}
        _check_tensors(expected, state.tensors)
        try:
            self.feed.set_state(state.values)
            for adaptation in self.update_plan.adaptations:
                adaptation.set_state(state.values)
            self.rng.bit_generator.state = state.values["rng"]
            self.updates = int(state.values["updates"])
            self._skipped = int(state.values["updates_skipped"])
            self._skipped_in_a_row = int(state.values["skipped_in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "values", f"a counter or random state is missing or wrong: {error!r}"
            ) from error
        for policy_id, network in self.networks.by_policy.items():
            prefix = self._prefix_of_weights(policy_id)
            network.set_weights(
                {name: state.tensors[f"{prefix}{name}"] for name in network.variables}
            )
        for name, variable in self.update_plan.other_variables().items():
            variable.assign(state.tensors[name])

    def weights_replaced(self) -> None:
        """Adapt to weights that `set_state` took from elsewhere: copy them to the target networks
        of the networks that act.

        Targets of other networks catch up during training.
        """
        networks: list[Any] = list(self.networks.by_policy.values())
        for target in self.update_plan.targets.values():
            if any(target.network is network for network in networks):
                target.take_over()

    def _variables(self) -> dict[str, Any]:
        """Return all variables to save, by names that never change."""
        weights = {
            f"{self._prefix_of_weights(policy_id)}{name}": variable
            for policy_id, network in self.networks.by_policy.items()
            for name, variable in network.variables.items()
        }
        return weights | self.update_plan.other_variables()

    def _prefix_of_weights(self, policy_id: str) -> str:
        return f"weights/{policy_id}/" if self._is_joint else "weights/"

    @property
    def stores_experience(self) -> bool:
        """See `Feed.stores_experience`."""
        return self.feed.stores_experience

    def hold_experience(self) -> Snapshot | None:
        """See `Feed.hold_experience`."""
        return self.feed.hold_experience()

    def restore_experience(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """See `Feed.restore_experience`."""
        self.feed.restore_experience(values, pieces)

    def _warn_of_last_lr(self, env_steps: int) -> None:
        """Warn, once, if the learning rate, which is 0, stays there."""
        lr = self.update_plan.knobs["lr"]
        if self._lr_is_over or env_steps < lr.end:
            return
        self._lr_is_over = True
        _log.warning(
            "the learning rate is now 0 and the policy won't change any more: lr_schedule ended at"
            " %s env steps. To keep learning, let lr_schedule end later or at a value above 0. To"
            " end the run there, set stop_timesteps: %d",
            f"{lr.end:,.0f}",
            lr.end,
        )

    def _note_skipped(self, bad_column: str) -> None:
        """Count a skipped update: a number in `bad_column`, or if that is "" in the computation,
        was not finite.

        Raises:
            TrainingDiverged: `MAX_SKIPS_IN_A_ROW` updates in a row were skipped.
        """
        self._skipped += 1
        self._skipped_in_a_row += 1
        where = "the loss or its gradient; the batch itself is finite"
        if bad_column:
            where = f"column {bad_column!r} of the batch"
        _log.warning(
            "update skipped: a number in %s is not finite; the weights are unchanged", where
        )
        if self._skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} updates in a row were skipped because numbers were not"
                f" finite, the last time in {where}. The weights are those of the last good update."
                " Check the environment's rewards and observations, or set a lower lr or a smaller"
                " grad_clip."
            )


def _check_tensors(expected: Mapping[str, str], tensors: Mapping[str, Array]) -> None:
    """Check the names, dtypes and shapes of saved tensors.

    Args:
        expected: dtype and shape by name.
        tensors: saved tensors by name.

    Raises:
        CheckpointError: they differ from those of the model.
    """
    saved = {name: _form(tensor) for name, tensor in tensors.items()}
    if expected == saved:
        return
    names = sorted(expected.keys() | saved.keys())
    differing = [name for name in names if expected.get(name) != saved.get(name)]
    first = differing[0]
    raise CheckpointError(
        "tensors",
        f"they don't fit this model: {first} is {saved.get(first, 'missing')} in the checkpoint"
        f" and {expected.get(first, 'unknown')} in the model ({len(differing)} tensors differ)",
    )


def _form(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
