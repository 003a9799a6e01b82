"""SamplePlan: what a worker computes and sends of each fragment; an algorithm says it, a handshake carries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["SamplePlan"]


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Columns and postprocessing that a worker applies to each fragment.

    Attributes:
        postprocess: name in aiorl.policy.postprocess.POSTPROCESSORS.
        postprocess_params: its keyword arguments.
        columns: [T, N, ...] columns to send; VALID goes with them wherever a row is no transition.
        extras: arrays of other shapes to send, such as last_obs and state_in_0.
    """

    postprocess: str = "none"
    postprocess_params: Mapping[str, float] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
