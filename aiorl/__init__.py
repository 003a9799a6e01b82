"""aiorl: distributed reinforcement learning for CPUs, without a cluster framework.

Public names are imported when first used, so that ``import aiorl`` is cheap and never loads TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiorl.data.columns import DEFAULT_POLICY_ID
    from aiorl.data.fragment import Fragment
    from aiorl.data.multi_agent_batch import MultiAgentBatch
    from aiorl.data.sample_batch import SampleBatch
    from aiorl.env.registry import EnvContext, register_env
    from aiorl.policy.policy import Policy

__version__ = "0.1.0"

_HOME = {
    "DEFAULT_POLICY_ID": "aiorl.data.columns",
    "EnvContext": "aiorl.env.registry",
    "Fragment": "aiorl.data.fragment",
    "MultiAgentBatch": "aiorl.data.multi_agent_batch",
    "Policy": "aiorl.policy.policy",
    "SampleBatch": "aiorl.data.sample_batch",
    "register_env": "aiorl.env.registry",
}

__all__ = [
    "DEFAULT_POLICY_ID",
    "EnvContext",
    "Fragment",
    "MultiAgentBatch",
    "Policy",
    "SampleBatch",
    "__version__",
    "register_env",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'aiorl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
