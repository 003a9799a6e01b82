"""Standard output and error that no full disk, closed terminal or ended reader turns into an exception."""

from __future__ import annotations

import io
import sys

_without_reader: set[int] = set()


def keep_output_from_failing() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that drop what can't be written, and pass on each line at once.

    Without this a ``print`` of an environment or a callback fails when the log it goes to has no room, and ends what
    called it.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None:  # else it was closed from the start
            raw = _Lossy(descriptor, "wb", closefd=False)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
            )
            setattr(sys, name, text)


def has_reader() -> bool:
    """Return whether anybody reads standard output, as far as what was written to it has shown."""
    return 1 not in _without_reader


class _Lossy(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]  # whatever has bytes
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                _without_reader.add(self.fileno())
            return memoryview(data).nbytes  # type: ignore[arg-type]
