"""How much memory a process can still take."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["available_bytes"]


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can take: what the machine has left, or its control groups.

    Args:
        root: of the file system; tests have one of their own.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(root)])


def _left_in_groups(root: Path) -> list[int]:
    """Bytes left in this process's control groups and those around them, as far as they have limits."""
    left: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            base, limit, usage, inactive = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            inactive = "total_inactive_file"
        else:
            continue
        top = root / "sys/fs/cgroup" / base
        group = top / path.strip("/")
        for place in (group, *group.parents):
            most, used = _text(place / limit).strip(), _text(place / usage).strip()
            if most.isdecimal() and used.isdecimal():
                left.append(max(0, int(most) - int(used) + _reclaimable(place / "memory.stat", inactive)))
            if place == top:
                break
    return left


def _reclaimable(stat: Path, name: str) -> int:
    """Bytes of files that the system keeps in memory only while nobody wants it."""
    for line in _text(stat).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0


def _text(path: Path) -> str:
    """What is in a file; nothing where it can't be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
