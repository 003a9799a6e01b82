"""Settings that change with the env steps trained on; exploration has them too, so they are made in `aiorl.policy`."""

from __future__ import annotations

from aiorl.policy.schedules import Schedule

__all__ = ["Schedule"]
