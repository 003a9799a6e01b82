"""Base class of algorithms that store samples in a replay and train on minibatches drawn from
it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from aiorl.acting.exploration import Schedule
from aiorl.acting.filters import MeanStdFilter, Normalisation
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.data.arrays import first_not_finite
from aiorl.data.columns import Piece
from aiorl.data.fragment import SamplePlan, refuse_others
from aiorl.learning.algorithms.algorithm import (
    Array,
    Batch,
    CompiledBase,
    LeasePlan,
    UpdateResult,
    want_stored_experience,
)
from aiorl.learning.algorithms.compiled_update import STEPS_BEFORE, CompiledUpdate, UpdateSpec
from aiorl.learning.algorithms.replay_config import ReplayConfig
from aiorl.learning.algorithms.rows import model_columns
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.replay.pieces import Pieces
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay, Sample
from aiorl.learning.replay.ring import Snapshot
from aiorl.learning.replay.spec import ReplaySpec, check_fits

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_log = logging.getLogger(__name__)

ReplayT = TypeVar("ReplayT", bound=ReplayConfig)

WEIGHTS = "weights"
"""Column of a minibatch: importance weight of each row."""

_CAME = "came"
_MANY = 0.75
"""Share of rows with all n steps below which a warning is logged."""
_MAX_SAMPLE_BYTES = 64 << 20
"""Maximum size of the minibatches of one compiled call."""


class ReplayAlgorithm(CompiledBase[ReplayT]):
    """Algorithm that stores fragments, then makes the minibatches due for them, several in one
    compiled call.

    Columns of the replay are `obs`, `actions`, `n_step_returns`, `discounts` and `new_obs`, the
    observation after the steps whose rewards are summed. For a recurrent network, each entry is a
    whole sequence with its initial state (see `aiorl.learning.replay.sequences`). If the sample
    plan has `priorities`, they are the initial priorities of rows. With a filter, observations are
    stored unfiltered, and filtered with the current merged filter when they are drawn. Subclasses
    define the update of one minibatch and its target networks.

    New rows make minibatches due. With stored experience, new rows are stored, and only rows that
    are read again make minibatches due until `learning_starts` rows are stored or the replay is
    full; from then on both do. So once each worker has read its share, the number of minibatches
    per row read is the same as with one worker, however unevenly the workers read.

    Attributes:
        replay: stored rows or sequences.
        steps_per_call: K, minibatches of one compiled call.
    """

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Return a plan with leases that are kept topped up, up to a limit; experience of any age
        is used.

        Args:
            config: config of the run.

        Raises:
            ConfigError: there is no stored experience and the algorithm learns from nothing else.
        """
        own = cls.own_config(config)
        if own.is_offline:
            want_stored_experience(own)
        return LeasePlan(
            "streaming",
            own.fragments_per_update,
            own.outstanding_fragments_per_worker,
            max_under_way=own.max_fragments_under_way(),
            publish_every=own.broadcast_updates,
            publish_interval_s=own.broadcast_interval_ms / 1000,
        )

    @classmethod
    def sample_plan(cls, config: CommonConfig) -> SamplePlan:
        """Return a plan of rows with the discounted sum of up to n rewards and the observation that
        followed.

        Args:
            config: config of the run, which sets n.
        """
        own = cls.own_config(config)
        steps = (c.N_STEPS,) if own.n_step > 1 else ()
        piece = (c.PIECE,) if own.reads_only_stored else ()
        columns = (c.OBS, c.ACTIONS, c.NEW_OBS, c.N_STEP_RETURNS, c.DISCOUNTS, *steps, *piece)
        return SamplePlan(
            "n_step", {"gamma": own.gamma, "n": own.n_step}, columns, raw_obs=own.is_filtered
        )

    @classmethod
    def check_room(cls, policies: Sequence[tuple[CommonConfig, ActorCritic]]) -> None:
        """Check that there is room for the replays of all policies together, and log how much they
        take.

        Args:
            policies: config and model of every policy that learns in the run, with any algorithm.

        Raises:
            ConfigError: there is no room.
        """
        learners = [
            (config, model) for config, model in policies if isinstance(config, ReplayConfig)
        ]
        stored = [(config, model, replay_spec(config, model)) for config, model in learners]
        check_fits([spec for *_, spec in stored])
        for own, model, spec in stored:
            saved = spec.saved_bytes * (own.checkpoint_keep + 1) if own.checkpoint_replay else 0
            _log.info(
                "the replay has %s, %.3g MB in all; checkpoints take up to %.3g MB of disk for it,"
                " with the %d that are kept (see checkpoint_replay and checkpoint_keep)",
                spec,
                spec.bytes_needed / 1e6,
                saved / 1e6,
                own.checkpoint_keep,
            )
            full = 1 - (own.n_step - 1) / own.cut_length
            if full < _MANY and own.sequences(model) is None:
                _log.warning(
                    "n_step is %d, but fragments end after %d steps, so only %.0f %% of the rows"
                    " have all n steps. Set rollout_fragment_length to %d or more",
                    own.n_step,
                    own.rollout_fragment_length,
                    100 * full,
                    4 * own.n_step,
                )
        if stored:  # the run has one lease plan, with the tightest limit
            own = min(
                (config for config, *_ in stored),
                key=lambda config: config.max_fragments_under_way(),
            )
            most_at_once = own.max_fragments_under_way()
            if own.num_workers > most_at_once:
                _log.warning(
                    "no more than %d fragments are under way at a time, because max_env_steps_ahead"
                    " is %d and a fragment has %d env steps: some of the %d workers will wait."
                    " Raise it, or set fewer workers",
                    most_at_once,
                    own.max_env_steps_ahead,
                    own.fragment_steps,
                    own.num_workers,
                )

    def __init__(self, config: CommonConfig, model: ActorCritic) -> None:
        """Allocate the replay; nothing is compiled yet.

        Args:
            config: config of the run, or of the policy if it has its own settings.
            model: network to train.

        Raises:
            ConfigError: there is not enough room.
        """
        super().__init__(config, model)
        own = self.config
        spec = replay_spec(own, model)
        self.replay = self.make_replay(spec, seed=int(self.rng.integers(1 << 62)))
        self._columns = self.sample_plan(config).columns
        self._sequences = own.sequences(model)
        self._pieces = Pieces()
        self._is_hurried = False
        self._lr = Schedule.of(own.lr, own.lr_schedule, key="lr_schedule")
        last = own.prioritized_replay_beta_timesteps, own.final_prioritized_replay_beta
        self._beta = Schedule(
            [(0, own.prioritized_replay_beta), last], key="prioritized_replay_beta"
        )
        row_bytes = sum(
            np.dtype(column.dtype).itemsize * math.prod(column.shape) for column in spec.columns
        )
        most = max(1, _MAX_SAMPLE_BYTES // (row_bytes * own.minibatch_entries))
        self.steps_per_call = min(own.usual_minibatches(), most)
        self._due = 0.0
        self._counted = 0
        self._steps = 0
        self._metrics: dict[str, float] = {}
        self._padded: dict[str, Array] = {}
        update = self.update_spec()
        if own.is_filtered:
            shape = list(model.obs_shape)
            self._normalisation = [
                tf.Variable(tf.fill(shape, value), trainable=False) for value in (0.0, 1.0, 0.0)
            ]
            update = dataclasses.replace(update, prepare=self._normalised)
        self.compiled = CompiledUpdate(
            update,
            self.trained_variables(),
            self.adam(own.adam_epsilon),
            grad_clip=own.grad_clip,
            xla=own.update_mode,
        )

    def make_replay(self, spec: ReplaySpec, seed: int) -> Replay:
        """Create the replay; custom algorithms can return a subclass that stores or draws
        differently.

        Args:
            spec: size and columns of the replay.
            seed: seed of the random draws.

        Raises:
            ConfigError: there is not enough room.
        """
        return Replay(spec, seed=seed)

    def _normalised(self, minibatch: Tensors) -> Tensors:
        """Return the columns with their unfiltered observations filtered, by statistics kept in
        variables.
        """
        centre, scale, shift = self._normalisation
        names = [name for name in (c.OBS, c.NEW_OBS) if name in minibatch]
        return {**minibatch, **{name: (minibatch[name] - centre) * scale - shift for name in names}}

    @abstractmethod
    def update_spec(self) -> UpdateSpec:
        """Return the update of one minibatch to compile; it returns the TD error of each row."""

    def trained_variables(self) -> list[Any]:
        """Return the variables that the loss itself trains, without those of its phases."""
        return self.model.trainable_variables

    def drawn_columns(self, num: int) -> dict[str, Array]:
        """Return the columns [num, ...] of `num` minibatches that are not stored: random numbers,
        new in each call.
        """
        return {}

    def coefficients(self, env_steps_total: int) -> dict[str, float]:
        """Return the coefficients of the steps after `env_steps_total` env steps; subclasses add
        theirs.
        """
        return {
            "lr": self._lr.value(env_steps_total),
            STEPS_BEFORE: self._steps % self.config.minibatch_cycle(),
        }

    def check_fragment(self, fragment: Mapping[str, Array]) -> None:
        """Check that a fragment can be stored. Can be called in any thread.

        Args:
            fragment: columns ``[T, N, ...]`` by name.

        Raises:
            BatchError: a column is wrong; the error names it.
        """
        refuse_others(fragment, self._columns)
        if self._sequences is not None:
            self._sequences.check(fragment)
        else:
            self.replay.check_fragment(fragment)
        Pieces.check(fragment)

    def make_batch(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """Store the fragments; each row of stored experience is stored only once while the replay
        has room.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``.

        Returns:
            Numbers of rows for `update`, ``[2]``: all that came, and those read again.
        """
        rows = again = 0
        for fragment in fragments:
            if not self.replay.stored:  # a checkpoint without the replay can still know pieces
                self._pieces = Pieces()
            new = self._pieces.new_rows(fragment, is_whole=not self.replay.evicted)
            stored = 0 if new is None else self._store(new)
            came = stored if new is fragment and self._sequences is None else _num_rows(fragment)
            rows += came
            again += _num_rows(fragment) - (0 if new is None else _num_rows(new))
        return {_CAME: np.array([rows, again])}

    def _store(self, fragment: Mapping[str, Array]) -> int:
        """Store a fragment; return the number of entries that it adds to the replay."""
        if self._sequences is None:
            return self.replay.insert_fragment(fragment)
        cut = self._sequences.cut(fragment)
        return self.replay.insert_fragment(cut) if len(cut[c.OBS]) else 0

    def update(self, batch: Batch, env_steps_total: int) -> UpdateResult:
        """Make the minibatches that are due; until `learning_starts` rows are stored, only rows
        read again count.

        Args:
            batch: numbers of rows ``[2]`` from `make_batch`.
            env_steps_total: env steps trained on before this batch; schedules depend on it.

        Raises:
            TrainingDiverged: too many calls in a row were skipped.
        """
        own = self.config
        self._warn_of_last_lr(self._lr, env_steps_total)
        came, again = map(int, batch[_CAME])
        stored = self.replay.stored * own.entry_steps
        counted = (
            came
            if stored >= own.first_rows or self.replay.evicted or self._pieces.is_full
            else again
        )
        self._counted += counted
        self._due += counted * own.training_intensity / own.minibatch_rows
        left = steps = int(self._due)
        if steps and own.is_filtered:
            now = Normalisation.of(cast(MeanStdFilter, self.merged_filter))
            for variable, statistic in zip(
                self._normalisation, (now.centre, now.scale, now.shift), strict=True
            ):
                variable.assign(statistic)
        self._due -= steps
        beta = self._beta.value(env_steps_total)
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        made = 0
        bad_column = None
        while left and not self._is_hurried:
            num = min(left, self.steps_per_call)
            left -= num
            found = self.replay.sample(own.minibatch_entries, num_batches=num, beta=beta)
            coefficients = self.coefficients(env_steps_total)
            metrics, held = self.compiled(self._stacked(found), None, coefficients, max_steps=num)
            if not held:
                bad_column = first_not_finite(found.columns)
                self._note_skipped(bad_column)
                continue
            self._note_held()
            self._steps += num
            assert self.compiled.rows is not None, "the spec has gives_rows"
            self.replay.update_priorities(found.ids, self.compiled.rows[:num])
            made += num
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value * num
                counts[name] = counts.get(name, 0) + num
        self._due += left
        self._metrics |= {name: total / counts[name] for name, total in sums.items()}
        figures = {
            "cur_lr": self._lr.value(env_steps_total),
            "num_sgd_steps": float(made),
            "updates_skipped": float(self._skipped),
            "replay_rows": float(len(self.replay) * own.entry_steps),
            "rows_stored": float(self.replay.stored * own.entry_steps),
            "rows_evicted": float(self.replay.evicted * own.entry_steps),
            "rows_trained": float(self._steps * own.minibatch_rows),
            "training_intensity": self._steps * own.minibatch_rows / max(1, self._counted),
        }
        if own.prioritized_replay:
            figures["prioritized_replay_beta"] = beta
        return UpdateResult({**self._metrics, **figures}, bad_column is not None, bad_column or "")

    def hurry(self) -> None:
        """See `Algorithm.hurry`; remaining minibatches stay due, so that the replay can be saved
        soon.
        """
        self._is_hurried = True

    def warm_up(self) -> None:
        """Compile the one kind of call there is; changes neither weights nor random states."""
        leading = (self.steps_per_call, self.config.minibatch_entries)
        batch = {
            column.name: np.zeros((*leading, *column.shape), column.dtype)
            for column in self.replay.spec.columns
        }
        rng = self.rng.bit_generator.state
        batch |= self.drawn_columns(self.steps_per_call)
        self.rng.bit_generator.state = rng
        self.compiled.warm_up({**batch, WEIGHTS: np.zeros(leading, np.float32)}, None)

    def _stacked(self, found: Sample) -> dict[str, Array]:
        """Return K minibatches by column; those beyond the ones found are padding."""
        num = len(found.ids)
        arrays = {**found.columns, **self.drawn_columns(num), WEIGHTS: found.weights}
        if num == self.steps_per_call:
            return arrays
        for name, array in arrays.items():
            if name not in self._padded:
                self._padded[name] = np.zeros((self.steps_per_call, *array.shape[1:]), array.dtype)
            self._padded[name][:num] = array
        return self._padded

    def extra_state(self) -> dict[str, Any]:
        """Return the steps made, the fraction of a minibatch due, the rows counted, and the known
        stored experience.
        """
        values: dict[str, Any] = {"steps": self._steps, "due": self._due, "counted": self._counted}
        if self.config.reads_only_stored:
            values["pieces"] = self._pieces.numbers
        return values

    def set_extra_state(self, values: Mapping[str, Any]) -> None:
        """Restore the `values` that `extra_state` returned."""
        self._steps = int(values["steps"])
        self._due = float(values["due"])
        self._counted = int(values["counted"])
        if self.config.reads_only_stored:
            # a run that sampled before has none
            self._pieces.take([int(n) for n in values.get("pieces", ())])

    @property
    def stores_experience(self) -> bool:
        """See `Algorithm.stores_experience`."""
        return self.config.checkpoint_replay

    def hold_experience(self) -> Snapshot | None:
        """See `Algorithm.hold_experience`."""
        return self.replay.snapshot() if self.stores_experience else None

    def restore_experience(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """See `Algorithm.restore_experience`; ignored if `checkpoint_replay` is off."""
        if self.stores_experience:
            self.replay.restore(values, pieces)


def _num_rows(fragment: Mapping[str, Array]) -> int:
    valid = fragment.get(c.VALID)
    return int(
        math.prod(fragment[c.ACTIONS].shape[:2]) if valid is None else np.count_nonzero(valid)
    )


def replay_spec(config: ReplayConfig, model: ActorCritic) -> ReplaySpec:
    """Return the layout of a policy's replay; a whole image is kept once for the rows before and
    after it.

    Sequences are kept with the observations that they share.
    """
    sequences = config.sequences(model)
    names = (c.OBS, c.NEW_OBS, c.ACTIONS, c.N_STEP_RETURNS, c.DISCOUNTS)
    columns = tuple(model_columns(model, names)) if sequences is None else sequences.columns
    is_image = model.obs_dtype == "uint8" and len(model.obs_shape) == 3
    priorities = None
    made_with = ["gamma", "n_step", "clip_rewards"]
    if config.prioritized_replay:
        priorities = Prioritised(config.prioritized_replay_alpha, config.prioritized_replay_eps)
        made_with += ["prioritized_replay_alpha", "prioritized_replay_eps"]
    return ReplaySpec(
        columns,
        max(1, config.replay_capacity // config.entry_steps),
        priorities,
        stack=model.layout.num_frames if is_image and sequences is None else 0,
        spill_dir=config.replay_spill_dir,
        unit=(
            "rows" if sequences is None else f"sequences ({config.entry_steps} trained steps each)"
        ),
        made_with={name: getattr(config, name) for name in made_with},
    )
