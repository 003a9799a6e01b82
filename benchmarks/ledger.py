"""The equation that holds in every result: sampled = trained + queued + in flight + discarded +
lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ledger_gap"]


def ledger_gap(ledger: Mapping[str, Any]) -> str:
    """Return the problem with a result's ledger, "" if it balances.

    Args:
        ledger: ledger as in ``result.jsonl``; ``discarded`` and ``lost`` are mappings by reason.
    """
    parts = {name: part for name, part in ledger.items() if name != "sampled"}
    flat = {
        name: sum(part.values()) if isinstance(part, Mapping) else part
        for name, part in parts.items()
    }
    gap = ledger["sampled"] - sum(flat.values())
    if gap:
        return f"{gap:+,} env steps are missing: {dict(ledger)}"
    negative = [name for name, steps in flat.items() if steps < 0]
    return f"{', '.join(negative)} negative: {dict(ledger)}" if negative else ""
