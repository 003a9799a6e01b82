"""Base class of algorithms that imitate stored experience, whichever policy made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from aiorl.acting.observation.filters import MeanStdFilter, Normalisation
from aiorl.config.schema import CommonConfig
from aiorl.data import columns as c
from aiorl.learning.algorithms.algorithm import Array, Batch, LeasePlan
from aiorl.learning.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.learning.algorithms.imitation_config import ImitationConfig
from aiorl.learning.algorithms.stored_experience import want_stored_experience

__all__ = ["Imitation"]

ImitationT = TypeVar("ImitationT", bound=ImitationConfig)


class Imitation(CompiledAlgorithm[ImitationT]):
    """Trains on experience as it comes."""

    @classmethod
    def lease_plan(cls, config: CommonConfig) -> LeasePlan:
        """Leases that are kept topped up; no experience is too old.

        Raises: ConfigError if there is no stored experience.
        """
        own = cls._own(config)
        want_stored_experience(own)
        return LeasePlan("streaming", own.fragments_per_batch(), own.outstanding_fragments_per_worker)

    def _rows_of(self, fragments: Sequence[Mapping[str, Array]]) -> Batch:
        """See the base class; stored observations are raw, and filtered here if there is a filter."""
        own = self.merged_filter
        if isinstance(own, MeanStdFilter):
            now = Normalisation.of(own)
            fragments = [{**fragment, c.OBS: now(fragment[c.OBS])} for fragment in fragments]
        return super()._rows_of(fragments)

    def _optimizer(self) -> Any:  # Any: a Keras optimiser
        return self._adam(self._config.adam_epsilon)
