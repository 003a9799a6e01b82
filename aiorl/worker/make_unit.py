"""Which kind of sampler unit a worker runs; only that kind is imported."""

from __future__ import annotations

from collections.abc import Mapping

from aiorl.config.worker import WorkerPart
from aiorl.wire.messages import PolicyGraph, Snapshot
from aiorl.worker.unit import SamplerUnit, UnitPlace

__all__ = ["make_unit"]


def make_unit(part: WorkerPart, graphs: Mapping[str, PolicyGraph], snapshot: Snapshot, place: UnitPlace) -> SamplerUnit:
    """The unit that the learner has decided on; may take as long as the environments do.

    Args:
        part: the worker's part of the configuration.
        graphs: policy id -> acting graph.
        snapshot: weights and filter states to begin with.
        place: which sampler of the run it is.

    Raises:
        ConfigError: a setting that cannot be honoured here, such as an environment not installed.
        EnvError: the environment's constructor failed.
        PolicyError: a graph that cannot be used.
    """
    # most workers need one of them, and the general one brings a good deal along
    if part.sampling == "columnar":
        from aiorl.worker.columnar_unit import ColumnarUnit

        return ColumnarUnit(part, graphs, snapshot, place)
    from aiorl.worker.general_unit import GeneralUnit

    return GeneralUnit(part, graphs, snapshot, place)
