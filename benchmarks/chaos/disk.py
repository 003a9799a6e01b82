"""Small disk for run directories that can be filled."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["Disk"]

_SIZE_MB = 256


class Disk:
    """Memory disk mounted below a folder, or the folder itself if mounting is impossible.

    Attributes:
        path: its root.
        why_not: reason why it cannot be filled, "" if it can.
    """

    def __init__(self, path: Path) -> None:
        """Mount the disk; ``close`` unmounts it."""
        self.path = path
        path.mkdir(parents=True)
        self.why_not = _why_no_mount()
        if not self.why_not:
            command = [
                "mount",
                "-t",
                "tmpfs",
                "-o",
                f"size={_SIZE_MB}m,mode=0700",
                "aiorl-chaos",
                str(path),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            self.why_not = done.stderr.strip()
        self._is_mounted = not self.why_not

    @property
    def _ballast(self) -> Path:
        return self.path / "ballast"

    @property
    def is_full(self) -> bool:
        """True while the disk is full."""
        return self._ballast.exists()

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        chunk = bytes(1 << 20)
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(chunk)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Free the space again."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the disk and delete its content; it must not be in use."""
        if self._is_mounted:
            self._is_mounted = False
            for options in ([], ["-l"]):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    command = ["umount", *options, str(self.path)]
                    if (
                        subprocess.run(
                            command, capture_output=True, timeout=20, check=False
                        ).returncode
                        == 0
                    ):
                        break


def _why_no_mount() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "mounting a small disk needs root on Linux"
    return "" if shutil.which("mount") and shutil.which("umount") else "there is no mount command"
