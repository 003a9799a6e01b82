"""Train batches of several policies, in which rows of the same number belong together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.columns import Array, Columns, ColumnSpec
from aiorl.data.fragment import SamplePlan, check_fragment
from aiorl.errors import BatchError, ConfigError
from aiorl.learning.algorithm import (
    Algorithm,
    Feed,
    Networks,
    Round,
    Update,
    experience_of,
)
from aiorl.learning.batch_buffers import BatchBuffers, Layout
from aiorl.learning.experience import Fragments
from aiorl.learning.lazy import Tensors
from aiorl.learning.rows import by_time
from aiorl.learning.steps import Loop, prepare
from aiorl.learning.train_batches import TrainBatches

_STEP = (c.EPS_ID, c.T)
"""Columns by which rows of several policies are put together."""


def with_steps(plan: SamplePlan) -> SamplePlan:
    """Return the plan of a policy that is updated together with others: its rows also say their
    episode and step.
    """
    further = [name for name in _STEP if name not in plan.columns]
    return dataclasses.replace(plan, columns=(*plan.columns, *further))


def joint_experience_of(kind: type[Algorithm[Any]], config: CommonConfig) -> Fragments:
    """Return what an algorithm whose update is of several policies learns from with this `config`.

    Raises:
        ConfigError: the rows of several policies can't be put together.
        InternalError: the config belongs to another algorithm.
    """
    experience = experience_of(kind, config)
    of_several = f"{config.algo} updates several policies at once"
    if not isinstance(experience, Fragments):
        raise ConfigError(
            f"{of_several}, but its experience stores the rows of each policy apart, without"
            " the steps in which they belong together.",
            key="algo",
            value=config.algo,
            hint="Return on_policy(config, plan) or streamed(config, plan) from experience.",
        )
    if experience.sends_gradients:
        raise ConfigError(
            f"{of_several}, so workers, which have one policy's rows for each gradient, can't"
            " compute its gradients.",
            key="gradients",
            value="workers",
            hint="Set gradients: learner.",
        )
    if config.input != "sampler" or experience.sample_plan.raw_obs:
        raise ConfigError(
            f"{of_several}, so it can't learn from stored experience, which has no order in which"
            " the rows of several policies belong together.",
            key="input",
            value=config.input,
            hint="Leave out input, so that workers sample.",
        )
    return experience


class JointBatches(Feed):
    """Fragments of several policies, laid out as train batches by policy id.

    Rows of the same number end in the same env step of the same episode. If one policy has a row
    there and another has none, because its agent has left or did not act, the other gets a row of
    zeros whose VALID is 0. At each step, a policy acts for at most one agent.

    Sequences of a recurrent network, or of a plan with LAST_OBS, are not filled up: all policies
    must have the same ones, as they do if all agents act in each step. Other fragments are refused.
    """

    shares_memory = True

    def __init__(
        self,
        experience: Fragments,
        networks: Networks,
        update: Update,
        rng: np.random.Generator,
    ) -> None:
        """Lay out a train batch for each policy.

        Args:
            experience: experience of each policy, from `joint_experience_of`.
            networks: networks of the policies.
            update: update that will use the batches.
            rng: generator of the random orders.

        Raises:
            ConfigError: the loop of the update is over minibatches from a replay.
        """
        feeds: dict[str, Any] = {
            policy_id: experience.feed(model, update, rng)
            for policy_id, model in networks.by_policy.items()
        }
        self._batches: dict[str, TrainBatches] = feeds
        self._first = next(iter(self._batches.values()))
        self._ignored = set(_STEP) - set(self._first.columns)

    def fit(self, loop: Loop) -> Loop:
        """See `Feed.fit`: steps and `begin` of a loop see columns by policy id and name. Those of
        steps are rows [R, ...] or sequences [T, M, ...].

        `begin` can add columns that belong to no policy.
        """
        buffers = {policy_id: batches.buffers for policy_id, batches in self._batches.items()}
        # the columns that `begin` makes are known only when it is traced
        layouts: dict[str, Layout] = dict(buffers)
        time_major = not self._first.visits_rows
        begin = loop.begin

        def unpack(minibatch: Tensors) -> Tensors:
            columns = {}
            for name, part in minibatch.items():
                if name in layouts:
                    columns[name] = layouts[name].unpack(part, time_major=time_major)
                elif time_major:
                    columns[name] = by_time(part)
                else:
                    columns[name] = part
            return columns

        step = prepare(unpack, loop.step)
        if begin is None:
            return dataclasses.replace(loop, step=step)

        def repack(batch: Tensors, knobs: Tensors) -> Tensors:
            columns = begin({name: buffers[name].unpack(batch[name]) for name in buffers}, knobs)
            for policy_id in buffers:
                num_leading = 2 if time_major else 1
                layout = Layout.of_tensors(columns[policy_id], num_leading=num_leading)
                layouts[policy_id] = layout
                columns = {**columns, policy_id: layout.pack(columns[policy_id])}
            return columns

        return dataclasses.replace(loop, begin=repack, step=step)

    def check_fragment(self, fragment: Mapping[str, Any]) -> None:
        """Check that `make_batch` can use a `fragment`. Can be called in any thread.

        Args:
            fragment: columns ``[T, N, ...]`` by policy id and name.

        Raises:
            BatchError: a column is wrong; the error names it. Or a policy acted for two agents in
                one step, or policies have different sequences.
        """
        for policy_id, columns in fragment.items():
            batches = self._batches[policy_id]
            batches.check_fragment(self._without_steps(columns))
            first = batches.buffers.columns[0]
            steps = [ColumnSpec(name, dtype="int32") for name in _STEP]
            check_fragment([first, *steps], columns, is_finite=False)
            rows = _steps_of(columns)
            if not self._first.has_sequences and len(np.unique(rows, axis=0)) < len(rows):
                raise BatchError(
                    c.T,
                    f"one agent of policy {policy_id!r} at each step of an episode, because its"
                    " update is of several policies at once",
                    "several agents",
                )
        if self._first.has_sequences:
            self._check_same(fragment)

    def make_batch(self, fragments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Lay out the rows of all fragments, or their sequences; see `TrainBatches.make_batch`.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``, by policy id and
                name.

        Returns:
            Columns by policy id and name, of any shape. The second call after this one overwrites
            them.
        """
        joined = [self._joined(fragment) for fragment in fragments]
        return {
            policy_id: batches.make_batch([fragment[policy_id] for fragment in joined])
            for policy_id, batches in self._batches.items()
        }

    def rounds(self, batch: Mapping[str, Any], env_steps_total: int) -> Iterator[Round]:
        """See `Feed.rounds`: one round, with all epochs."""
        order, num_minibatches = self._order(batch)
        yield Round(batch, order, num_minibatches)

    def nominal(self) -> Round:
        """See `Feed.nominal`."""
        batch = {policy_id: batches.nominal_batch() for policy_id, batches in self._batches.items()}
        order, _ = self._order(batch)
        return Round(batch, order, 0)

    def first_not_finite(self, made: Round) -> str:
        """Return the first column of a round, `made`, with a non-finite number, as "POLICY/COLUMN";
        "" if all are finite.
        """
        for policy_id, batches in self._batches.items():
            column = batches.buffers.first_not_finite(made.columns[policy_id])
            if column:
                return f"{policy_id}/{column}"
        return ""

    def _order(self, batch: Mapping[str, Any]) -> tuple[NDArray[np.int32], int]:
        """Return the indices of every minibatch, and the number of minibatches; see
        `TrainBatches.order`.
        """
        valid = [
            batches.buffers.column(batch[policy_id], c.VALID)
            for policy_id, batches in self._batches.items()
        ]
        return self._first.order(np.maximum.reduce(valid))

    def _without_steps(self, columns: Columns) -> dict[str, Array]:
        return {name: column for name, column in columns.items() if name not in self._ignored}

    def _joined(self, fragment: Mapping[str, Columns]) -> dict[str, dict[str, Array]]:
        """Return the rows of all policies, as many of each."""
        if self._first.has_sequences:
            return {
                policy_id: self._without_steps(columns) for policy_id, columns in fragment.items()
            }
        steps = [_steps_of(columns) for columns in fragment.values()]
        numbers, num_rows = _row_numbers(steps)
        places = dict(zip(fragment, numbers, strict=True))
        return {
            policy_id: _filled_up(
                batches.buffers, fragment.get(policy_id, {}), places.get(policy_id), num_rows
            )
            for policy_id, batches in self._batches.items()
        }

    def _check_same(self, fragment: Mapping[str, Columns]) -> None:
        """Check that all policies have the same sequences.

        Raises:
            BatchError: they have different ones.
        """
        policy_ids = ", ".join(self._batches)
        if fragment.keys() != self._batches.keys():
            raise BatchError("batches", f"sequences of {policy_ids}", ", ".join(fragment))
        for name in (*_STEP, c.VALID):
            first, *rest = [
                self._batches[policy_id].buffers.source(columns, name)
                for policy_id, columns in fragment.items()
            ]
            if not all(np.array_equal(first, column) for column in rest):
                raise BatchError(
                    name,
                    f"the same sequences of the policies {policy_ids}, whose agents all act in"
                    " each step",
                    "different ones",
                )


def _steps_of(columns: Columns) -> NDArray[np.int64]:
    """Return episode and step of each row, [R, 2]."""
    return np.stack([columns[name].reshape(-1).astype(np.int64) for name in _STEP], axis=1)


def _row_numbers(steps: Sequence[NDArray[np.int64]]) -> tuple[list[NDArray[np.intp]], int]:
    """Return the number of each row, equal for equal steps of any policy, and how many there are.

    Numbers are in the order in which the steps first appear.

    Args:
        steps: episode and step [R, 2] of the rows of each policy.
    """
    _, first, places = np.unique(
        np.concatenate(steps), axis=0, return_index=True, return_inverse=True
    )
    ranks = np.argsort(np.argsort(first))
    ends = np.cumsum([len(rows) for rows in steps])
    return np.split(ranks[places.reshape(-1)], ends[:-1]), len(first)


def _filled_up(
    buffers: BatchBuffers, columns: Columns, places: NDArray[np.intp] | None, num_rows: int
) -> dict[str, Array]:
    """Return rows [num_rows, 1, ...] with those of a policy in their `places`; all others are zeros
    and not valid.
    """
    filled = {}
    for spec in buffers.columns:
        column = np.zeros((num_rows, 1, *spec.shape), spec.dtype)
        if places is not None:
            column[places, 0] = buffers.source(columns, spec.name).reshape(-1, *spec.shape)
        filled[spec.name] = column
    return filled
