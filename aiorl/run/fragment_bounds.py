"""How much one fragment may claim, by what its worker was asked for.

A bound is what workers send exactly where nothing but aiorl makes rows, and far above it where code of the user's own,
the length of episodes or files decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from aiorl.config.worker import WorkerPart
from aiorl.data.columns import DEFAULT_POLICY_ID
from aiorl.net.protocol.ledger import MAX_FRAGMENT_STEPS

__all__ = ["FragmentBounds"]

_MAX_AGENTS = 1024
"""Of one environment, where it has several."""
_ROOMY = 64
"""Rows that there may be for each one asked for, where callbacks and the like may add some."""
_LEAST_ROOM = 1 << 17
_UNTRAINED = 1 << 16
"""Env steps without any row, where an environment says that steps are not to be trained on."""
_LONG_EPISODE = 1 << 20
"""Steps of the longest episode, where no horizon says so; all environments at once have an eighth of it."""
_LEAST_VALUES = 1 << 20
_LEAST_OBSERVATIONS = 1 << 24
_MAX_OBSERVATIONS = 1 << 40
"""A statistic counts 2**53."""


@dataclass(frozen=True, slots=True)
class FragmentBounds:
    """What one fragment may hold at most.

    Attributes:
        rows: of one policy, padding included.
        env_steps: env steps.
        agent_steps: rows of all policies, those that send none included.
        values: of each column of episodes.
        observations: that the filter delta of one policy counts.
        has_one_row_a_step: no env step has more than one row.
    """

    rows: int = MAX_FRAGMENT_STEPS
    env_steps: int = MAX_FRAGMENT_STEPS
    agent_steps: int = MAX_FRAGMENT_STEPS
    values: int = MAX_FRAGMENT_STEPS
    observations: int = _MAX_OBSERVATIONS
    has_one_row_a_step: bool = False

    @classmethod
    def of(cls, part: WorkerPart, *, has_one_agent: bool) -> Self:
        """The bounds of a run's fragments.

        Args:
            part: what workers are told.
            has_one_agent: each environment has one agent, however many there are of the environment.
        """
        if part.input != "sampler":  # batches are as large as they were stored, and episodes are played beside
            return cls()
        num_envs = part.num_envs_per_worker
        asked = part.rollout_fragment_length * num_envs
        agents = 1 if has_one_agent else _MAX_AGENTS
        is_plain = has_one_agent and _is_plain(part)
        steps = asked if is_plain else max(_ROOMY * asked, _LEAST_ROOM)
        longest_together = max(_LONG_EPISODE, num_envs * (_LONG_EPISODE >> 3))
        if part.horizon is not None:
            longest_together = num_envs * part.horizon
        if not part.is_truncating:
            steps += asked + longest_together
        has_padding = any(policy.layout == "sequences" for policy in part.policies.values())
        rows = agents * (max(_ROOMY * steps, _LEAST_ROOM) if has_padding else steps)
        env_steps = min(steps + _UNTRAINED, MAX_FRAGMENT_STEPS)
        seen = max(num_envs * (part.horizon or _LONG_EPISODE), _LEAST_OBSERVATIONS)
        return cls(
            rows=min(rows, MAX_FRAGMENT_STEPS),
            env_steps=env_steps,
            agent_steps=env_steps if is_plain else MAX_FRAGMENT_STEPS,
            values=min(16 * asked * agents + _LEAST_VALUES, MAX_FRAGMENT_STEPS),
            observations=min(16 * asked * agents + seen, _MAX_OBSERVATIONS),
            has_one_row_a_step=is_plain,
        )


def _is_plain(part: WorkerPart) -> bool:
    """Whether rows are made by nothing but aiorl, for one policy."""
    own = part.policies.get(DEFAULT_POLICY_ID)
    return (
        own is not None
        and len(part.policies) == 1
        and own.policy_class is None
        and part.callbacks is None
        and part.multiagent.policy_mapping_fn is None
        and part.multiagent.observation_fn is None
    )
