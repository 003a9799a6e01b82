"""Acting graphs and sample plans: a handshake brings a worker both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from aiorl.data.columns import BOOTSTRAP_VALUES, is_of_sequences

__all__ = ["PolicyGraph", "SamplePlan"]


class PolicyGraph(TypedDict):
    """An exported acting graph and its description, see `aiorl.acting.acting_graph.ActingSpec.to_dict`."""

    graph: bytes
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Columns and postprocessing that a worker applies to each fragment.

    Attributes:
        postprocess: name in aiorl.acting.postprocess.POSTPROCESSORS.
        postprocess_params: its keyword arguments.
        columns: names of what is to be sent, of `aiorl.data.columns`: columns [T, N, ...], and arrays [N, ...] with
            one entry for each environment or sequence, such as last_obs and state_in_0. VALID goes with them wherever
            a row is no transition. What new_obs can be made of may be sent in its place, see `aiorl.data.fragment`.
        state_every: recurrent states are sent of every so many rows, from a sequence's first one on: ``state_in_i`` is
            [N, C, H], C = T / state_every rounded up. 0 = of the first row alone, [N, H]. Of complete episodes in
            lockstep only that is known.
        raw_obs: rows hold observations as they are before the filter, whose statistics travel beside them: the policy
            filters them when it acts, and the learner when it trains.
        return_discount: rewards are learned from over the running deviation of the return discounted so; None = as
            they are.
    """

    postprocess: str = "none"
    postprocess_params: Mapping[str, float] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    state_every: int = 0
    raw_obs: bool = False
    return_discount: float | None = None

    @property
    def of_rows(self) -> tuple[str, ...]:
        """The columns with an entry for each row."""
        return tuple(name for name in self.columns if not is_of_sequences(name))

    @property
    def of_sequences(self) -> tuple[str, ...]:
        """Those with an entry for each environment or sequence."""
        return tuple(filter(is_of_sequences, self.columns))

    def policy_settings(self) -> dict[str, Any]:
        """What the policy that acts is told of it, see `GraphPolicy`."""
        return {
            "postprocess": self.postprocess,
            "postprocess_params": dict(self.postprocess_params),
            "bootstrap_values": BOOTSTRAP_VALUES in self.columns,
            "raw_obs": self.raw_obs,
            "return_discount": self.return_discount,
        }
