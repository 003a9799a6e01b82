"""`python -m benchmarks.staleness`: measure learning from samples of a fixed age in policy
versions.

In a normal run, the age of samples depends on the speed of learner and workers. Here it is fixed.
One process samples a train batch, learns from it, and passes the weights to the sampler only after
``lag`` further updates. So each train batch comes from a policy exactly ``lag`` versions older than
the one that learns. All other settings are the preset's. Each row of ``docs/results/staleness.csv``
is one algorithm, lag and seed; existing rows are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.rows import add_row, read_csv

if TYPE_CHECKING:
    from aiorl.net.wire.messages import Snapshot

__all__ = ["LAGS", "StaleRow", "main", "measured", "read_stale_rows", "section_of"]

LAGS = (0, 1, 4, 16, 64)
PRESETS = {"impala": "impala-cartpole", "appo": "appo-cartpole"}
ENV = "CartPole-v1"
ENV_STEPS = 1_000_000
SEEDS = (0, 1, 2)
_LAST = 100
_FILE = "staleness.csv"
_HEAD = f"""
## Policy lag

IMPALA and APPO on {ENV} for {ENV_STEPS:,} env steps, with their presets. Each train batch of 4,096 env steps was
sampled with weights that are exactly the given number of versions old (`python -m benchmarks.staleness`,
[all seeds](results/staleness.csv)). "Last" is the mean return of the last {_LAST} sampled episodes. "Over all" is the
mean over all episodes, weighted by their steps, which shows how fast the policy learned. Figures are means over seeds,
with the worst seed in parentheses.

| Lag, versions | Lag, env steps | IMPALA, last | IMPALA, over all | APPO, last | APPO, over all |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class StaleRow:
    """Result of one seed.

    Attributes:
        algo: name of the algorithm.
        lag: lag in versions.
        seed: seed of the run.
        env_steps: env steps trained on.
        train_batch_size: env steps of one version.
        return_last: mean return of the last episodes.
        return_over_all: mean return of all episodes, weighted by their lengths.
    """

    algo: str
    lag: int
    seed: int
    env_steps: int
    train_batch_size: int
    return_last: float
    return_over_all: float


def measured(algo: str, lag: int, seed: int, env_steps: int = ENV_STEPS) -> StaleRow:
    """Train one seed in this process."""
    from aiorl.config.presets import named_preset
    from aiorl.data.columns import DEFAULT_POLICY_ID
    from aiorl.learning.algorithms.registry import config_class
    from aiorl.run.build import build_learning
    from aiorl.run.core import Publisher
    from aiorl.run.worker.sampler_unit import SamplerUnit, UnitPlace

    settings = named_preset(PRESETS[algo]).settings
    config = config_class(algo).from_mapping(
        {**settings, "env": ENV, "seed": seed, "num_workers": 0}
    )
    learning = build_learning(config)
    algorithm = learning.group.learners[DEFAULT_POLICY_ID]
    algorithm.warm_up()
    publisher = Publisher(learning.filters)
    place = UnitPlace(slot=1, incarnation="1")
    publisher.join(place.incarnation)

    def snapshot() -> Snapshot:
        return publisher.next_snapshot(learning.group.get_weights(), {"timestep": trained})

    trained = 0
    unit = SamplerUnit(learning.worker_part, learning.graphs, snapshot(), place)
    waiting: deque[Snapshot] = deque()
    lengths: list[int] = []
    returns: list[float] = []
    numbers = itertools.count(1)
    try:
        while trained < env_steps:
            fragments = []
            for _ in range(learning.lease_plan.fragments_per_batch):
                produced = unit.sample()
                assert (
                    produced.first_version
                    == produced.last_version
                    == max(0, publisher.version - lag)
                ), "its lag"
                number = next(numbers)
                publisher.merge_deltas(place.incarnation, number, unit.take_deltas(number))
                fragments.append(produced.batches[DEFAULT_POLICY_ID])
                lengths += produced.episodes["lengths"].tolist()
                returns += produced.episodes["rewards"].tolist()
                trained += produced.env_steps
            algorithm.update(algorithm.make_batch(fragments), trained)
            waiting.append(snapshot())
            if len(waiting) > lag:
                unit.offer(waiting.popleft())
    finally:
        unit.close()
    last = float(np.mean(returns[-_LAST:]))
    over_all = float(np.average(returns, weights=lengths))
    return StaleRow(
        algo, lag, seed, trained, config.train_batch_size, round(last, 2), round(over_all, 2)
    )


def read_stale_rows(folder: Path) -> list[StaleRow]:
    """Return the existing rows."""
    return read_csv(folder / _FILE, StaleRow)


def section_of(rows: Iterable[StaleRow]) -> list[str]:
    """Return the lines of the results page; none without rows."""
    rows = list(rows)
    if not rows:
        return []
    lines = [_HEAD]
    for lag in sorted({row.lag for row in rows}):
        own = [row for row in rows if row.lag == lag]
        cells = [str(lag), f"{lag * own[0].train_batch_size:,}"]
        for algo in PRESETS:
            found = [row for row in own if row.algo == algo]
            for values in (
                [row.return_last for row in found],
                [row.return_over_all for row in found],
            ):
                cells.append(f"{np.mean(values):.1f} ({min(values):.1f})" if values else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the missing rows; `python -m benchmarks.results --page` then writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__)
    parser.parse_args(argv)
    folder = Path(__file__).parents[1] / "docs" / "results"
    for seed, lag, algo in itertools.product(SEEDS, LAGS, PRESETS):
        if any(_key(row) == (algo, lag, seed) for row in read_stale_rows(folder)):
            continue
        row = measured(algo, lag, seed)
        print(
            f"{algo}, lag {lag}, seed {seed}: {row.return_last:.1f}, over all"
            f" {row.return_over_all:.1f}",
            flush=True,
        )
        add_row(folder / _FILE, row, _key)
    return 0


def _key(row: StaleRow) -> tuple[str, int, int]:
    return row.algo, row.lag, row.seed


if __name__ == "__main__":
    sys.exit(main())
