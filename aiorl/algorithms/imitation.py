"""Base class of algorithms that imitate stored experience, whichever policy made it."""

from __future__ import annotations

from typing import Any, TypeVar

from aiorl.algorithms.algorithm import LeasePlan
from aiorl.algorithms.compiled_algorithm import CompiledAlgorithm
from aiorl.algorithms.imitation_config import ImitationConfig
from aiorl.config.schema import CommonConfig
from aiorl.errors import ConfigError

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
        if own.input == "sampler":
            raise ConfigError(
                f"{cls.__name__} imitates stored experience, and none is named.", key="input", value=own.input,
                hint='Give files, such as --input "data/*.json"; --output DIR of another run writes some.',
            )  # fmt: skip
        return LeasePlan("streaming", own.fragments_per_batch(), own.outstanding_fragments_per_worker)

    def _optimizer(self) -> Any:  # Any: a Keras optimiser
        return self._adam(self._config.adam_epsilon)
