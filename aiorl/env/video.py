"""Film: pictures of an environment as a video file, written while they are taken."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from aiorl.errors import ConfigError
from aiorl.process.imports import install_command

__all__ = ["Film"]

_FPS = 30
_KINDS = (".mp4", ".mkv", ".mov")


class Film:
    """A video file; what was filmed until an error is kept out of the way of an older one."""

    def __init__(self, path: Path) -> None:
        """Get ready; the file is made when it is finished.

        Raises:
            ConfigError: what films need is not installed, or the file can't be one.
        """
        if path.suffix.lower() not in _KINDS:
            raise ConfigError(
                f"video is {str(path)!r}, expected a file name that ends in {', '.join(_KINDS)}.",
                key="video",
                value=str(path),
            )
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"video is {str(path)!r}, whose directory isn't there.", key="video", value=str(path))
        try:
            from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter
        except ImportError as error:
            raise ConfigError(
                f"a video needs moviepy: {error}.",
                key="video",
                value=str(path),
                hint=f"Install it with: {install_command('video')}",
            ) from error
        self._path = path
        self._partial = path.with_name(f".{path.stem}.partial{path.suffix}")
        self._writer_class = FFMPEG_VideoWriter
        self._writer: Any = None
        self._size = (0, 0)

    def take(self, env: Any) -> None:
        """Add a picture of an environment.

        Raises:
            ConfigError: it makes none.
        """
        frame = self._rendered(env)
        height, width = (side - side % 2 for side in frame.shape[:2])  # what players read
        if self._writer is None:
            self._size = (height, width)
            fps = getattr(env, "metadata", {}).get("render_fps") or _FPS
            self._writer = self._writer_class(str(self._partial), (width, height), fps, logfile=None)
        if (height, width) != self._size:
            raise ConfigError(
                f"the environment's pictures have changed from {self._size} to {(height, width)} pixels.", key="video"
            )
        self._writer.write_frame(np.ascontiguousarray(frame[:height, :width]))

    def _rendered(self, env: Any) -> NDArray[np.uint8]:
        try:
            frame = np.asarray(env.render())
        except Exception as error:
            # whatever an environment raises that can't
            raise _no_picture(env, repr(error)) from error
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise _no_picture(env, f"render() gave {frame.dtype} of shape {frame.shape}, not uint8 [height, width, 3]")
        return frame

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()
        if error is None and self._writer is not None:
            os.replace(self._partial, self._path)
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)


def _no_picture(env: Any, reason: str) -> ConfigError:
    inner = getattr(env, "unwrapped", env)
    name = getattr(getattr(inner, "spec", None), "id", type(inner).__name__)
    return ConfigError(
        f"{name} can't be filmed: {reason:.300}.",
        key="video",
        hint='It has to take render_mode="rgb_array" and give images by render().',
    )
