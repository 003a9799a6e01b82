"""Memory that is left: the machine's, or that of the control groups around a process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from aiorl.process.available_memory import available_bytes


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_control_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 1000


def test_a_group_or_one_around_it_limits_it(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/self/cgroup": "0::/user/job\n",
        "sys/fs/cgroup/user/job/memory.max": "max\n",
        "sys/fs/cgroup/user/job/memory.current": "100\n",
        "sys/fs/cgroup/user/memory.max": "700\n",
        "sys/fs/cgroup/user/memory.current": "500\n",
        "sys/fs/cgroup/user/memory.stat": "anon 300\ninactive_file 150\n",
    })  # fmt: skip
    assert available_bytes(tmp_path) == 700 - 500 + 150


def test_groups_of_the_first_version_limit_it_too(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/docker/b\n",
        "sys/fs/cgroup/memory/docker/b/memory.limit_in_bytes": "400\n",
        "sys/fs/cgroup/memory/docker/b/memory.usage_in_bytes": "390\n",
        "sys/fs/cgroup/memory/docker/b/memory.stat": "total_inactive_file 5\n",
    })  # fmt: skip
    assert available_bytes(tmp_path) == 15


def test_a_group_seen_from_within_its_own_namespace_is_the_root(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "600\n",
        "sys/fs/cgroup/memory.current": "900\n",
    })  # fmt: skip
    assert available_bytes(tmp_path) == 0


def test_what_makes_no_sense_limits_nothing(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/self/cgroup": "nonsense\n0::/x\n",
        "sys/fs/cgroup/x/memory.max": "many\n",
        "sys/fs/cgroup/x/memory.current": "-1\n",
    })  # fmt: skip
    assert available_bytes(tmp_path) == 1000
