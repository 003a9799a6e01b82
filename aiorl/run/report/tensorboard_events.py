"""TensorBoard event files through the tensorboard package alone; TensorFlow is not needed and not loaded."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from aiorl.run.report.appended_file import AppendedFile
from aiorl.run.report.crc32c import crc32c

__all__ = ["EventFile"]

_FORMAT = "brain.Event:2"


class EventFile:
    """One event file of scalars, written in whole records.

    Args:
        directory: where it is made; its name holds time, host and process, so it is always a new one.
        resume_after_step: tells TensorBoard to forget points past this step in earlier files; None forgets nothing.
    Raises: OSError when the file can't be written; ImportError when tensorboard isn't installed.
    """

    def __init__(self, directory: Path, *, resume_after_step: int | None = None) -> None:
        # Imported here: it takes 0.1 s, and only runs that log need it.
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        self._write(self._event(wall_time=time.time(), file_version=_FORMAT))
        if resume_after_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._event(wall_time=time.time(), step=resume_after_step + 1, session_log=start))

    def append(self, values: Mapping[str, float], *, step: int, wall_time: float) -> None:
        """Records one point of each curve.

        Args:
            values: tag -> value.
            step: env steps, the horizontal axis.
            wall_time: seconds since the epoch.
        Raises: OSError when it can't be stored; the file ends as before.
        """
        summary = self._summary()
        for tag, value in values.items():
            summary.value.add(tag=tag, simple_value=value)
        self._write(self._event(wall_time=wall_time, step=step, summary=summary))

    def close(self) -> None:
        """Closes the file; more calls do nothing."""
        self._file.close()

    def _write(self, event: object) -> None:
        data: bytes = event.SerializeToString()  # type: ignore[attr-defined]
        length = struct.pack("<Q", len(data))
        self._file.append(length + _masked(length) + data + _masked(data))


def _masked(data: bytes) -> bytes:
    """The checksum of some bytes as records hold it, so that one of bytes that hold checksums is as good as any."""
    checksum = crc32c(data)
    return struct.pack("<I", (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
