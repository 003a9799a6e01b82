"""Replay: experience that is kept and drawn many times, on NumPy only.

- `spec`: what a replay holds and what that takes; `memory`: whether there is room for it.
- `replay`: rows in, minibatches out.
- `ring`, `frames`: where rows lie, and frames of observations, each once.
- `sequences`: fragments cut into what recurrent networks are trained through, each a row.
- `pieces`: what of stored experience is there already.
- `sum_tree`, `priorities`: which rows are drawn.
- `snapshot`: the whole of it for a checkpoint, beside training.
"""

from aiorl.learning.replay.fragments import Pieces, check_priorities
from aiorl.learning.replay.priorities import Prioritised
from aiorl.learning.replay.replay import Replay, Sample
from aiorl.learning.replay.ring import Snapshot
from aiorl.learning.replay.sequences import Sequences, SequenceShape
from aiorl.learning.replay.spec import ReplaySpec, check_fits

__all__ = [
    "Pieces",
    "Prioritised",
    "Replay",
    "ReplaySpec",
    "Sample",
    "SequenceShape",
    "Sequences",
    "Snapshot",
    "check_fits",
    "check_priorities",
]
