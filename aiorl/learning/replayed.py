"""Experience that is kept in a replay and drawn many times."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from aiorl.acting.exploration import Schedule
from aiorl.acting.filters import MeanStdFilter, Normalisation
from aiorl.data import columns as c
from aiorl.data.arrays import first_not_finite
from aiorl.data.columns import Piece
from aiorl.data.fragment import SamplePlan, refuse_others
from aiorl.errors import ConfigError
from aiorl.learning.algorithm import (
    Array,
    Batch,
    Feed,
    LeasePlan,
    Round,
    Update,
    want_stored_experience,
)
from aiorl.learning.algorithms.replay_config import ReplayKeys
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.losses.q_learning import weighted_mean
from aiorl.learning.replay.pieces import Pieces
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay, Sample
from aiorl.learning.replay.ring import Snapshot
from aiorl.learning.replay.spec import ReplaySpec, check_fits
from aiorl.learning.rows import model_columns
from aiorl.learning.steps import STEPS_BEFORE, WEIGHTS, Loop, Loss, prepare

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_log = logging.getLogger(__name__)

SEEDS = "seeds"
"""Column of a minibatch: seeds for its random numbers, of the shape that `drawn` was given."""

_CAME = "came"
_MANY = 0.75
"""Share of rows with all n steps below which a warning is logged."""
_MAX_SAMPLE_BYTES = 64 << 20
"""Maximum size of the minibatches of one compiled call."""


class MakeReplay(Protocol):
    """Creates a replay."""

    def __call__(self, spec: ReplaySpec, *, seed: int) -> Replay:
        """Create a replay.

        Args:
            spec: size and columns of the replay.
            seed: seed of the random draws.

        Raises:
            ConfigError: there is not enough room.
        """


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Experience in a replay; see `aiorl.learning.algorithm.Experience`.

    Attributes:
        config: sizes of the replay and its minibatches.
        sample_plan: columns of a fragment.
        make_replay: creates the replay.
    """

    config: ReplayKeys
    sample_plan: SamplePlan
    make_replay: MakeReplay = Replay
    sends_gradients: bool = False

    def lease_plan(self) -> LeasePlan:
        """Return a plan with leases that are kept topped up, up to a limit; experience of any age
        is used.

        Raises:
            ConfigError: there is no stored experience and the algorithm learns from nothing else.
        """
        config = self.config
        if config.is_offline:
            want_stored_experience(config)
        return LeasePlan(
            "streaming",
            config.fragments_per_update,
            outstanding_per_worker=config.outstanding_fragments_per_worker,
            max_under_way=config.max_fragments_under_way(),
            publish_every=config.broadcast_updates,
            publish_interval_s=config.broadcast_interval_ms / 1000,
        )

    def feed(self, model: ActorCritic, update: Update, rng: np.random.Generator) -> Feed:
        """See `Experience`."""
        spec = replay_spec(self.config, model)
        replay = self.make_replay(spec, seed=int(rng.integers(1 << 62)))
        return ReplayFeed(self, model, replay, loop=update.loop, rng=rng)

    @staticmethod
    def check_room(policies: Sequence[tuple[Any, ActorCritic]]) -> None:
        """Check that there is room for the replays of all policies together, and log how much they
        take; see `Experience`.
        """
        replays = [
            (experience.config, model, replay_spec(experience.config, model))
            for experience, model in policies
            if isinstance(experience, Replayed)
        ]
        check_fits([spec for *_, spec in replays])
        for config, model, spec in replays:
            _log_size(config, spec)
            _warn_of_short_fragments(config, model)
        if replays:  # the run has one lease plan, with the tightest limit
            _warn_of_waiting_workers(
                min(
                    (config for config, *_ in replays),
                    key=lambda config: config.max_fragments_under_way(),
                )
            )


def replayed(
    config: ReplayKeys,
    *,
    columns: Sequence[str] = (),
    postprocess: str = "n_step",
    make_replay: MakeReplay = Replay,
) -> Replayed:
    """Return experience in a replay, as rows with the discounted sum of up to n rewards and the
    observation that followed.

    Columns of a minibatch are `obs`, `actions`, `n_step_returns`, `discounts`, `new_obs` (the
    observation after the steps whose rewards are summed) and the importance `weights`.

    Args:
        config: config of the algorithm, which sets n.
        columns: further columns that workers send.
        postprocess: what makes the n-step returns, see `aiorl.acting.postprocess`.
        make_replay: creates the replay, for example of a subclass that stores or draws differently.
    """
    steps = (c.N_STEPS,) if config.n_step > 1 else ()
    piece = (c.PIECE,) if config.reads_only_stored else ()
    usual = (c.OBS, c.ACTIONS, c.NEW_OBS, c.N_STEP_RETURNS, c.DISCOUNTS, *steps, *piece)
    plan = SamplePlan(
        postprocess,
        {"gamma": config.gamma, "n": config.n_step},
        (*usual, *columns),
        raw_obs=config.is_filtered,
    )
    return Replayed(config, plan, make_replay)


def replay_knobs(config: ReplayKeys) -> dict[str, Schedule]:
    """Return the knob "lr" of a `config`."""
    return {"lr": Schedule.of(config.lr, config.lr_schedule, key="lr_schedule")}


def per_row(
    judge: Callable[[Tensors, Tensors], tuple[tf.Tensor, tf.Tensor, Tensors]],
) -> Loss:
    """Return the loss of a drawn minibatch whose rows have importance weights and priorities.

    Args:
        judge: (columns, knobs) -> (losses [B], absolute TD errors [B], further tensors).

    Returns:
        Loss that is the weighted mean of the losses. It gives the metric "mean_td_error", and the
        errors as `aiorl.data.columns.PRIORITIES`, which `drawn` can write back.
    """

    def loss(columns: Tensors, knobs: Tensors) -> tuple[tf.Tensor, Tensors]:
        losses, errors, tensors = judge(columns, knobs)
        errors = tf.stop_gradient(errors)
        metrics = {**tensors, "mean_td_error": tf.reduce_mean(errors)}
        return weighted_mean(losses, columns[WEIGHTS]), {**metrics, c.PRIORITIES: errors}

    return loss


def replay_spec(config: ReplayKeys, model: ActorCritic) -> ReplaySpec:
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
    unit = "rows"
    if sequences is not None:
        unit = f"sequences ({config.entry_steps} trained steps each)"
    return ReplaySpec(
        columns,
        max(1, config.replay_capacity // config.entry_steps),
        priorities,
        stack=model.layout.num_frames if is_image and sequences is None else 0,
        spill_dir=config.replay_spill_dir,
        unit=unit,
        made_with={name: getattr(config, name) for name in made_with},
    )


class ReplayFeed(Feed):
    """Stores fragments, then draws the minibatches due for them, several for one compiled call.

    Columns of the replay are `obs`, `actions`, `n_step_returns`, `discounts` and `new_obs`, the
    observation after the steps whose rewards are summed. For a recurrent network, each entry is a
    whole sequence with its initial state (see `aiorl.learning.replay.sequences`). If the sample
    plan has `priorities`, they are the initial priorities of rows. With a filter, observations are
    stored unfiltered, and filtered with the current merged filter when they are drawn.

    New rows make minibatches due. With stored experience, new rows are stored, and only rows that
    are read again make minibatches due until `learning_starts` rows are stored or the replay is
    full; from then on both do. So once each worker has read its share, the number of minibatches
    per row read is the same as with one worker, however unevenly the workers read.

    Attributes:
        replay: stored rows or sequences.
        steps_per_call: K, minibatches of one compiled call.
    """

    def __init__(
        self,
        experience: Replayed,
        model: ActorCritic,
        replay: Replay,
        loop: Loop,
        rng: np.random.Generator,
    ) -> None:
        """Begin with an empty replay.

        Args:
            experience: config and columns.
            model: network of the policy.
            replay: stores the rows.
            loop: steps of a minibatch.
            rng: generator of the seeds of minibatches.

        Raises:
            ConfigError: the loop is over train batches, or writes what the replay doesn't store.
        """
        if not loop.is_drawn:
            raise ConfigError(
                "the experience is kept in a replay, but the update passes over train batches.",
                key="algo",
                hint=(
                    "Set loop=drawn(step) in the Update, or return experience of fragments, such as"
                    " on_policy."
                ),
            )
        _check_written(loop.write_back, replay.spec)
        config = experience.config
        self.replay = replay
        self._config = config
        self._columns = experience.sample_plan.columns
        self._sequences = config.sequences(model)
        self._seeds = loop.seeds
        self._period = loop.step.period
        self._rng = rng
        self._pieces = Pieces()
        self._is_hurried = False
        last = config.prioritized_replay_beta_timesteps, config.final_prioritized_replay_beta
        self._beta = Schedule(
            [(0, config.prioritized_replay_beta), last], key="prioritized_replay_beta"
        )
        row_bytes = sum(
            np.dtype(column.dtype).itemsize * math.prod(column.shape)
            for column in replay.spec.columns
        )
        most = max(1, _MAX_SAMPLE_BYTES // (row_bytes * config.minibatch_entries))
        self.steps_per_call = min(config.usual_minibatches(), most)
        self._due = 0.0
        self._counted = 0
        self._steps = 0
        self._last_beta = 0.0
        self._metrics: dict[str, float] = {}
        self._padded: dict[str, Array] = {}
        self._normaliser = _Normaliser(model.obs_shape) if config.is_filtered else None

    def fit(self, loop: Loop) -> Loop:
        """See `Feed.fit`: unfiltered observations are filtered."""
        if self._normaliser is None:
            return loop
        return dataclasses.replace(loop, step=prepare(self._normaliser.normalised, loop.step))

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
            Numbers of rows for `rounds`, ``[2]``: all that came, and those read again.
        """
        rows = 0
        again = 0
        for fragment in fragments:
            if not self.replay.stored:  # a checkpoint without the replay can still know pieces
                self._pieces = Pieces()
            new = self._pieces.new_rows(fragment, is_whole=not self.replay.evicted)
            num_rows = _num_rows(fragment)
            num_stored = 0 if new is None else self._store(new)
            # of a whole fragment that is new, the rows that had room count
            rows += num_stored if new is fragment and self._sequences is None else num_rows
            again += num_rows - (0 if new is None else _num_rows(new))
        return {_CAME: np.array([rows, again])}

    def _store(self, fragment: Mapping[str, Array]) -> int:
        """Store a fragment; return the number of entries that it adds to the replay."""
        if self._sequences is None:
            return self.replay.insert_fragment(fragment)
        cut = self._sequences.cut(fragment)
        return self.replay.insert_fragment(cut) if len(cut[c.OBS]) else 0

    def rounds(self, batch: Batch, env_steps_total: int) -> Iterator[Round]:
        """Draw the minibatches that are due; until `learning_starts` rows are stored, only rows
        read again count.

        Args:
            batch: numbers of rows ``[2]`` from `make_batch`.
            env_steps_total: env steps trained on before this batch; schedules depend on it.
        """
        config = self._config
        came, again = map(int, batch[_CAME])
        stored = self.replay.stored * config.entry_steps
        has_begun = stored >= config.first_rows or self.replay.evicted or self._pieces.is_full
        counted = came if has_begun else again
        self._counted += counted
        self._due += counted * config.training_intensity / config.minibatch_rows
        left = int(self._due)
        if left and self._normaliser is not None:
            self._normaliser.take(cast(MeanStdFilter, self.merged_filter))
        self._due -= left
        self._last_beta = self._beta.value(env_steps_total)
        while left and not self._is_hurried:
            num = min(left, self.steps_per_call)
            left -= num
            sample = self.replay.sample(
                config.minibatch_entries, num_batches=num, beta=self._last_beta
            )
            # modulo the period, so that a knob, which is a float32, never loses count
            before = self._steps % self._period
            yield Round(
                self._stacked(sample),
                order=None,
                num_steps=num,
                knobs={STEPS_BEFORE: float(before)},
                ids=sample.ids,
            )
        self._due += left

    def nominal(self) -> Round:
        """See `Feed.nominal`; there is only one shape."""
        leading = (self.steps_per_call, self._config.minibatch_entries)
        columns = {
            column.name: np.zeros((*leading, *column.shape), column.dtype)
            for column in self.replay.spec.columns
        }
        if self._seeds is not None:
            columns[SEEDS] = np.zeros((self.steps_per_call, *self._seeds), np.int32)
        return Round({**columns, WEIGHTS: np.zeros(leading, np.float32)}, None, 0)

    def first_not_finite(self, made: Round) -> str:
        """See `Feed.first_not_finite`."""
        return first_not_finite(made.columns)

    def take_back(self, made: Round, written: Mapping[str, Array]) -> None:
        """See `Feed.take_back`."""
        self._steps += made.num_steps
        columns = {name: column[: made.num_steps] for name, column in written.items()}
        self.replay.write_back(made.ids, columns)

    def report(self, made: Sequence[tuple[Round, dict[str, float]]]) -> dict[str, float]:
        """Return means over the minibatches, and the newest ones of metrics that were not
        measured.
        """
        config = self._config
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for each, metrics in made:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value * each.num_steps
                counts[name] = counts.get(name, 0) + each.num_steps
        self._metrics |= {name: total / counts[name] for name, total in sums.items()}
        trained = self._steps * config.minibatch_rows
        figures = {
            "num_sgd_steps": float(sum(each.num_steps for each, _ in made)),
            "replay_rows": float(len(self.replay) * config.entry_steps),
            "rows_stored": float(self.replay.stored * config.entry_steps),
            "rows_evicted": float(self.replay.evicted * config.entry_steps),
            "rows_trained": float(trained),
            "training_intensity": trained / max(1, self._counted),
        }
        if config.prioritized_replay:
            figures["prioritized_replay_beta"] = self._last_beta
        return {**self._metrics, **figures}

    def hurry(self) -> None:
        """See `Feed.hurry`; remaining minibatches stay due, so that the replay can be saved
        soon.
        """
        self._is_hurried = True

    def state(self) -> dict[str, Any]:
        """Return the steps made, the fraction of a minibatch due, the rows counted, and the known
        stored experience.
        """
        values: dict[str, Any] = {"steps": self._steps, "due": self._due, "counted": self._counted}
        if self._config.reads_only_stored:
            values["pieces"] = self._pieces.numbers
        return values

    def set_state(self, values: Mapping[str, Any]) -> None:
        """See `Feed.set_state`."""
        self._steps = int(values["steps"])
        self._due = float(values["due"])
        self._counted = int(values["counted"])
        if self._config.reads_only_stored:
            # a run that sampled before has none
            self._pieces.take([int(n) for n in values.get("pieces", ())])

    @property
    def stores_experience(self) -> bool:
        """See `Feed.stores_experience`."""
        return self._config.checkpoint_replay

    def hold_experience(self) -> Snapshot | None:
        """See `Feed.hold_experience`."""
        return self.replay.snapshot() if self.stores_experience else None

    def restore_experience(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """See `Feed.restore_experience`; ignored if `checkpoint_replay` is off."""
        if self.stores_experience:
            self.replay.restore(values, pieces)

    def _stacked(self, sample: Sample) -> dict[str, Array]:
        """Return K minibatches by column; those beyond the ones drawn are padding."""
        num = len(sample.ids)
        arrays = {**sample.columns, WEIGHTS: sample.weights}
        if self._seeds is not None:
            shape = (num, *self._seeds)
            highest = np.iinfo(np.int32).max
            arrays[SEEDS] = self._rng.integers(highest, size=shape, dtype=np.int32)
        if num == self.steps_per_call:
            return arrays
        for name, array in arrays.items():
            if name not in self._padded:
                self._padded[name] = np.zeros((self.steps_per_call, *array.shape[1:]), array.dtype)
            self._padded[name][:num] = array
        return self._padded


def _check_written(names: Sequence[str], spec: ReplaySpec) -> None:
    """Raise ConfigError unless all columns to write back can be written, a number for each row."""
    numbers = [
        column.name
        for column in spec.plain_columns
        if column.dtype == "float32" and not column.shape
    ]
    allowed = sorted({c.PRIORITIES, *numbers})
    for name in names:
        if name not in allowed:
            raise ConfigError(
                f"the loop writes {name!r} back, which the replay doesn't store as a number of each"
                " row.",
                key="algo",
                hint=(
                    f"write_back of drawn can name {', '.join(allowed)}. A replay of your own, see"
                    " make_replay of replayed, can store more."
                ),
            )


class _Normaliser:
    """Statistics of a filter in variables, by which a compiled update filters observations."""

    def __init__(self, obs_shape: Sequence[int]) -> None:
        shape = list(obs_shape)
        self._centre = tf.Variable(tf.fill(shape, 0.0), trainable=False)
        self._scale = tf.Variable(tf.fill(shape, 1.0), trainable=False)
        self._shift = tf.Variable(tf.fill(shape, 0.0), trainable=False)

    def take(self, merged_filter: MeanStdFilter) -> None:
        """Take the current statistics of a filter."""
        current = Normalisation.of(merged_filter)
        self._centre.assign(current.centre)
        self._scale.assign(current.scale)
        self._shift.assign(current.shift)

    def normalised(self, columns: Tensors) -> Tensors:
        """Return columns with their observations filtered."""
        filtered = {
            name: (columns[name] - self._centre) * self._scale - self._shift
            for name in (c.OBS, c.NEW_OBS)
            if name in columns
        }
        return {**columns, **filtered}


def _num_rows(fragment: Mapping[str, Array]) -> int:
    valid = fragment.get(c.VALID)
    if valid is None:
        return math.prod(fragment[c.ACTIONS].shape[:2])
    return int(np.count_nonzero(valid))


def _log_size(config: ReplayKeys, spec: ReplaySpec) -> None:
    saved = 0
    if config.checkpoint_replay:
        saved = spec.saved_bytes * (config.checkpoint_keep + 1)
    _log.info(
        "the replay has %s, %.3g MB in all; checkpoints take up to %.3g MB of disk for it,"
        " with the %d that are kept (see checkpoint_replay and checkpoint_keep)",
        spec,
        spec.bytes_needed / 1e6,
        saved / 1e6,
        config.checkpoint_keep,
    )


def _warn_of_short_fragments(config: ReplayKeys, model: ActorCritic) -> None:
    full = 1 - (config.n_step - 1) / config.cut_length
    if full < _MANY and config.sequences(model) is None:
        _log.warning(
            "n_step is %d, but fragments end after %d steps, so only %.0f %% of the rows"
            " have all n steps. Set rollout_fragment_length to %d or more",
            config.n_step,
            config.rollout_fragment_length,
            100 * full,
            4 * config.n_step,
        )


def _warn_of_waiting_workers(config: ReplayKeys) -> None:
    most_at_once = config.max_fragments_under_way()
    if config.num_workers > most_at_once:
        _log.warning(
            "no more than %d fragments are under way at a time, because max_env_steps_ahead"
            " is %d and a fragment has %d env steps: some of the %d workers will wait."
            " Raise it, or set fewer workers",
            most_at_once,
            config.max_env_steps_ahead,
            config.fragment_steps,
            config.num_workers,
        )
