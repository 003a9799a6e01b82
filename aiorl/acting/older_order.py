"""Spaces of checkpoints and exports from before the order of a Dict's parts was kept everywhere.

Samplers then acted by spaces that had been rebuilt from their descriptions, with parts in
alphabetical order, while the stored descriptions list them as the environment does. The networks
were trained on what the samplers saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiorl.data.obs_layout import ACTION_MASK
from aiorl.data.spaces import with_sorted_keys

Described = Mapping[str, Any]

KEEPS_ORDER = "keeps_order"
"""Key that is true in checkpoints and exports whose policies act on the parts of Dicts in the
stored order."""


def sampled_action_space(described: Described) -> dict[str, Any]:
    """Return the description of an action space with parts in the order in which samplers had
    them.
    """
    return with_sorted_keys(described)


def sampled_observation_space(described: Described, *, was_rebuilt: bool) -> dict[str, Any]:
    """Return the description of an observation space with parts in the order in which samplers had
    them.

    Args:
        described: the stored description, in the environment's order.
        was_rebuilt: True if samplers had the space from its description: that of an environment in
            a process of its own, or of a policy with spaces of its own.
    """
    if was_rebuilt:
        return with_sorted_keys(described)
    if described.get("kind") == "Dict" and any(
        name == ACTION_MASK for name, _ in described["spaces"]
    ):
        # the rest of a masked observation was rebuilt, but not the parts within its parts
        return {**described, "spaces": sorted(described["spaces"], key=lambda pair: str(pair[0]))}
    return dict(described)
