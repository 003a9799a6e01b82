"""Totals of a run, which checkpoints hold and a resume continues."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals of the run, which a resume preserves.

    Attributes:
        env_steps_sampled: env steps received.
        agent_steps_sampled: rows received.
        env_steps_trained: env steps trained on.
        updates: updates made, including skipped ones.
        updates_skipped: updates skipped because they were not finite.
    """

    env_steps_sampled: int = 0
    agent_steps_sampled: int = 0
    env_steps_trained: int = 0
    updates: int = 0
    updates_skipped: int = 0
