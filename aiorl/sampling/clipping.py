"""Warning about actions that are mostly clipped."""

from __future__ import annotations

import logging
from typing import Any

from numpy.typing import NDArray

from aiorl.acting.distributions import make_distribution
from aiorl.acting.graph_policy import GraphPolicy
from aiorl.acting.policy import Policy
from aiorl.data.actions import ActionLayout
from aiorl.process.log_once import log_once

_log = logging.getLogger(__name__)

_LEAST = 200
"""Numbers to judge by: a standard normal policy over [-1, 1] almost never has half of these
clipped."""


class ClipWatch:
    """Counts the numbers in a policy's actions that are clipped, and warns once if most of them
    are.

    It looks at whole fragments, after they are complete.
    """

    @classmethod
    def of(
        cls, policy_id: str, policy: Policy, layout: ActionLayout, *, clips: bool
    ) -> ClipWatch | None:
        """Return a watch of a policy's actions; None if none can be clipped.

        Args:
            policy_id: the policy's name.
            policy: the policy. Its most likely actions need no watch: nothing is learnt from them.
            layout: column form of its actions.
            clips: True if its actions are clipped for the environment.
        """
        explores = getattr(policy, "config", {}).get("explore", True)
        if not (clips and layout.is_bounded and explores):
            return None
        return cls(policy_id, policy, layout)

    def __init__(self, policy_id: str, policy: Policy, layout: ActionLayout) -> None:
        """Begin to watch; see `of`."""
        self._policy_id = policy_id
        self._policy = policy
        self._layout = layout
        self._is_over = False
        self._numbers = 0
        self._clipped = 0

    def look(self, actions: NDArray[Any]) -> None:
        """Count the actions [..., *shape] of a fragment, before they are clipped."""
        if self._is_over:
            return
        clipped, numbers = self._layout.count_clipped(actions)
        self._clipped += clipped
        self._numbers += numbers
        if self._numbers < _LEAST:
            return
        if 2 * self._clipped > self._numbers:
            self._is_over = True
            self._warn(100 * self._clipped // self._numbers)
        self._numbers = 0
        self._clipped = 0

    def _warn(self, percent: int) -> None:
        if not log_once(f"clipped actions of {self._policy_id}"):
            return
        advice = "Lower lr, or start with smaller deviations"
        if isinstance(self._policy, GraphPolicy):
            kind = self._policy.distribution
            plain = make_distribution(kind.action_space)
            scaled = make_distribution(kind.action_space, scale=True)
            if kind.name == plain.name != scaled.name:
                advice = "Learn with normalize_actions: true"
        _log.warning(
            "%d %% of the numbers in the actions of policy %r lie outside of their bounds (%s) and"
            " are clipped, so their size makes no difference to the environment. %s, unless the"
            " policy is meant to choose the bounds.",
            percent,
            self._policy_id,
            self._layout.space,
            advice,
        )
