"""Minibatches that are drawn from a replay, as many as are due for the fragments that came."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aiorl.acting.exploration import Schedule
from aiorl.acting.filters import MeanStdFilter, Normalisation
from aiorl.data import columns as c
from aiorl.data.columns import Array, Columns, ColumnSpec, Piece, first_not_finite
from aiorl.data.fragment import SamplePlan, refuse_others
from aiorl.errors import BatchError, ConfigError
from aiorl.learning.algorithm import Batch, Feed, Round
from aiorl.learning.keys.replay import ReplayKeys
from aiorl.learning.lazy import Tensors, tf
from aiorl.learning.replay.replay import Replay, Sample
from aiorl.learning.replay.ring import Snapshot
from aiorl.learning.replay.spec import ReplaySpec
from aiorl.learning.steps import SEEDS, STEPS_BEFORE, WEIGHTS, Loop, prepare

if TYPE_CHECKING:
    from aiorl.learning.models.actor_critic import ActorCritic

_CAME = "came"
_MAX_SAMPLE_BYTES = 64 << 20
"""Maximum size of the minibatches of one compiled call."""


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
        config: ReplayKeys,
        plan: SamplePlan,
        model: ActorCritic,
        *,
        replay: Replay,
        loop: Loop,
        rng: np.random.Generator,
    ) -> None:
        """Begin with an empty replay.

        Args:
            config: sizes of the replay and its minibatches.
            plan: columns of a fragment.
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
        self.replay = replay
        self.steps_per_call = _steps_per_call(config, replay.sampled_columns)
        self._config = config
        self._columns = plan.columns
        self._sequences = config.sequences(model)
        self._period = loop.step.period
        self._stacks = _Stacks(self.steps_per_call, loop.seeds, rng)
        self._pieces = Pieces()
        self._progress = _Progress()
        self._is_hurried = False
        self._beta = _Beta(config)
        self._metrics: dict[str, float] = {}
        self._normaliser: _Normaliser | None = None
        if config.is_filtered:
            self._normaliser = _Normaliser(model.obs_shape)

    def fit(self, loop: Loop) -> Loop:
        """See `Feed.fit`: unfiltered observations are filtered."""
        if self._normaliser is None:
            return loop
        return dataclasses.replace(loop, step=prepare(self._normaliser.normalised, loop.step))

    def check_fragment(self, fragment: Columns) -> None:
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

    def make_batch(self, fragments: Sequence[Columns]) -> Batch:
        """Store the fragments; each row of stored experience is stored only once while the replay
        has room.

        Args:
            fragments: each has the columns of the sample plan, ``[T, N, ...]``.

        Returns:
            Numbers of rows for `rounds`, ``[2]``: all that came, and those read again.
        """
        came = 0
        again = 0
        for fragment in fragments:
            if not self.replay.stored:  # a checkpoint without the replay can still know pieces
                self._pieces = Pieces()
            new = self._pieces.new_rows(fragment, is_whole=not self.replay.evicted)
            num_rows = _num_rows(fragment)
            num_new = 0
            num_stored = 0
            if new is not None:
                num_new = _num_rows(new)
                num_stored = self._store(new)
            if new is fragment and self._sequences is None:
                came += num_stored  # of a whole fragment that is new, the rows that had room count
            else:
                came += num_rows
            again += num_rows - num_new
        return {_CAME: np.array([came, again])}

    def _store(self, fragment: Columns) -> int:
        """Store a fragment; return the number of entries that it adds to the replay."""
        if self._sequences is None:
            return self.replay.insert_fragment(fragment)
        sequences = self._sequences.cut(fragment)
        if not len(sequences[c.OBS]):
            return 0
        return self.replay.insert_fragment(sequences)

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
        num_due = self._progress.count(came if has_begun else again, config)
        if num_due and self._normaliser is not None:
            self._normaliser.take(cast(MeanStdFilter, self.merged_filter))
        beta = self._beta.at(env_steps_total)
        while num_due and not self._is_hurried:
            num_steps = min(num_due, self.steps_per_call)
            num_due -= num_steps
            sample = self.replay.sample(config.minibatch_entries, num_batches=num_steps, beta=beta)
            # modulo the period, so that a knob, which is a float32, never loses count
            before = self._progress.steps % self._period
            yield Round(
                self._stacks.stacked(sample),
                order=None,
                num_steps=num_steps,
                knobs={STEPS_BEFORE: float(before)},
                ids=sample.ids,
            )
        self._progress.due += num_due

    def nominal(self) -> Round:
        """See `Feed.nominal`; there is only one shape."""
        leading = (self.steps_per_call, self._config.minibatch_entries)
        columns = {
            column.name: np.zeros((*leading, *column.shape), column.dtype)
            for column in self.replay.sampled_columns
        }
        columns |= self._stacks.nominal_seeds()
        columns[WEIGHTS] = np.zeros(leading, np.float32)
        return Round(columns, order=None, num_steps=0)

    def first_not_finite(self, drawn: Round) -> str:
        """See `Feed.first_not_finite`."""
        return first_not_finite(drawn.columns)

    def take_back(self, drawn: Round, written: Columns) -> None:
        """See `Feed.take_back`."""
        self._progress.steps += drawn.num_steps
        columns = {name: column[: drawn.num_steps] for name, column in written.items()}
        self.replay.write_back(drawn.ids, columns)

    def report(self, rounds: Sequence[tuple[Round, dict[str, float]]]) -> dict[str, float]:
        """Return means over the minibatches, and the newest ones of metrics that were not
        measured.
        """
        config = self._config
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        num_steps = 0
        for drawn, metrics in rounds:
            num_steps += drawn.num_steps
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value * drawn.num_steps
                counts[name] = counts.get(name, 0) + drawn.num_steps
        self._metrics |= {name: total / counts[name] for name, total in sums.items()}
        trained = self._progress.steps * config.minibatch_rows
        figures = {
            "num_sgd_steps": float(num_steps),
            "replay_rows": float(len(self.replay) * config.entry_steps),
            "rows_stored": float(self.replay.stored * config.entry_steps),
            "rows_evicted": float(self.replay.evicted * config.entry_steps),
            "rows_trained": float(trained),
            "training_intensity": trained / max(1, self._progress.counted),
        }
        if config.prioritized_replay:
            figures["prioritized_replay_beta"] = self._beta.current
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
        values = dataclasses.asdict(self._progress)
        if self._config.reads_only_stored:
            values["pieces"] = self._pieces.numbers
        return values

    def set_state(self, values: Mapping[str, Any]) -> None:
        """See `Feed.set_state`."""
        self._progress = _Progress(
            steps=int(values["steps"]), due=float(values["due"]), counted=int(values["counted"])
        )
        if self._config.reads_only_stored:
            # a run that sampled before has none
            self._pieces.take([int(number) for number in values.get("pieces", ())])

    @property
    def stores_experience(self) -> bool:
        """See `Feed.stores_experience`."""
        return self._config.checkpoint_replay

    def hold_experience(self) -> Snapshot | None:
        """See `Feed.hold_experience`."""
        if not self.stores_experience:
            return None
        return self.replay.snapshot()

    def restore_experience(self, values: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
        """See `Feed.restore_experience`; ignored if `checkpoint_replay` is off."""
        if self.stores_experience:
            self.replay.restore(values, pieces)


@dataclasses.dataclass
class _Progress:
    """Minibatches made and due.

    Attributes:
        steps: minibatches made so far.
        due: minibatches that are due, with the fraction of the next one.
        counted: rows for which minibatches were due.
    """

    steps: int = 0
    due: float = 0.0
    counted: int = 0

    def count(self, num_rows: int, config: ReplayKeys) -> int:
        """Count rows that came; return the number of whole minibatches that are due, which are
        then no longer counted as such.
        """
        self.counted += num_rows
        self.due += num_rows * config.training_intensity / config.minibatch_rows
        whole = int(self.due)
        self.due -= whole
        return whole


class _Beta:
    """Exponent of the importance weights over env steps.

    Attributes:
        current: the exponent that was last used; 0 before.
    """

    def __init__(self, config: ReplayKeys) -> None:
        last = config.prioritized_replay_beta_timesteps, config.final_prioritized_replay_beta
        points = [(0, config.prioritized_replay_beta), last]
        self._schedule = Schedule(points, key="prioritized_replay_beta")
        self.current = 0.0

    def at(self, env_steps_total: int) -> float:
        """Return the exponent after this number of env steps."""
        self.current = self._schedule.value(env_steps_total)
        return self.current


class _Stacks:
    """Arrays of K minibatches for one call; those beyond the ones drawn are padding."""

    def __init__(self, size: int, seeds: Sequence[int] | None, rng: np.random.Generator) -> None:
        self._size = size
        self._seeds = seeds
        self._rng = rng
        self._padded: dict[str, Array] = {}

    def nominal_seeds(self) -> dict[str, Array]:
        """Return zeros in place of seeds, if minibatches have seeds."""
        if self._seeds is None:
            return {}
        return {SEEDS: np.zeros((self._size, *self._seeds), np.int32)}

    def stacked(self, sample: Sample) -> dict[str, Array]:
        """Return the columns of a sample with weights and, if minibatches have them, new seeds."""
        num = len(sample.ids)
        arrays = {**sample.columns, WEIGHTS: sample.weights}
        if self._seeds is not None:
            shape = (num, *self._seeds)
            highest = np.iinfo(np.int32).max
            arrays[SEEDS] = self._rng.integers(highest, size=shape, dtype=np.int32)
        if num == self._size:
            return arrays
        for name, array in arrays.items():
            if name not in self._padded:
                self._padded[name] = np.zeros((self._size, *array.shape[1:]), array.dtype)
            self._padded[name][:num] = array
        return self._padded


def _steps_per_call(config: ReplayKeys, columns: Sequence[ColumnSpec]) -> int:
    """Return the usual minibatches of an update, or fewer if they would take too much memory."""
    row_bytes = sum(np.dtype(column.dtype).itemsize * column.width for column in columns)
    most = max(1, _MAX_SAMPLE_BYTES // (row_bytes * config.minibatch_entries))
    return min(config.usual_minibatches(), most)


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


def _num_rows(fragment: Columns) -> int:
    if c.VALID not in fragment:
        return math.prod(fragment[c.ACTIONS].shape[:2])
    return int(np.count_nonzero(fragment[c.VALID]))


_MAX_KNOWN = 1 << 20
"""Maximum number of known pieces, which fits into the meta.json of a checkpoint; further pieces
always count as new."""


class Pieces:
    """Known pieces of stored experience, by number.

    Workers that come and go read stored experience over and over; the numbers identify the pieces
    stored before.
    """

    def __init__(self) -> None:
        """Begin without known pieces."""
        self._known: dict[int, None] = {}  # in order of arrival
        self._numbers: tuple[int, ...] | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the known pieces, in order of arrival."""
        if self._numbers is None:
            self._numbers = tuple(self._known)
        return self._numbers

    @property
    def is_full(self) -> bool:
        """True if there can be stored pieces that are not known."""
        return len(self._known) >= _MAX_KNOWN

    def take(self, numbers: Sequence[int]) -> None:
        """Replace the known pieces by those with these numbers."""
        self._known = dict.fromkeys(numbers)
        self._numbers = None

    @staticmethod
    def check(arrays: Columns) -> None:
        """Check the shape and dtype of a fragment's piece numbers, if it has any.

        Raises:
            BatchError: they are wrong.
        """
        if c.PIECE not in arrays:
            return
        numbers = arrays[c.PIECE]
        shape = arrays[c.ACTIONS].shape[:2]
        if numbers.shape != shape or numbers.dtype != np.int64:
            raise BatchError(c.PIECE, f"int64 {shape}", f"{numbers.dtype} {numbers.shape}")

    def new_rows(self, arrays: Columns, *, is_whole: bool) -> Columns | None:
        """Return a fragment without the rows of known pieces, and remember its new pieces.

        Args:
            arrays: arrays of the fragment by name.
            is_whole: True if the replay still has all rows it ever stored; otherwise everything is
                new.

        Returns:
            The fragment, with known rows not `aiorl.data.columns.VALID`; None if all rows are
            known.
        """
        if c.PIECE not in arrays:
            return arrays
        if not is_whole:
            self.take(())
            return arrays
        column = arrays[c.PIECE]
        is_transition = arrays.get(c.VALID, np.ones(column.shape, np.bool_))
        numbers = np.unique(column[is_transition]).tolist()
        again = [number for number in numbers if number in self._known]
        self._remember([number for number in numbers if number and number not in self._known])
        if not again:
            return arrays
        valid = is_transition & ~np.isin(column, again)
        if not valid.any():
            return None
        return {**arrays, c.VALID: valid}

    def _remember(self, numbers: Sequence[int]) -> None:
        """Remember new pieces, unless they would be too many."""
        if numbers and len(self._known) + len(numbers) <= _MAX_KNOWN:
            self._known.update(dict.fromkeys(numbers))
            self._numbers = None
