"""The code that is sent to hosts: a directory without the files that belong to this machine only, or a wheel.

Left out are files that Git ignores, directories of version control and caches, virtual environments, runs, and secret
keys.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from aiorl.errors import ConfigError

_MAX_MB = 512
_NEVER = {".git", ".hg", ".svn", ".venv", ".tox", "node_modules", "__pycache__"}
_SIGNS = ("pyvenv.cfg", "run.json", "launch.json", "CACHEDIR.TAG")
"""Files of directories that are left out: virtual environments, runs, caches."""


def shipped(directory: Path) -> list[Path]:
    """Return the files of a directory that are sent, as sorted paths relative to it."""
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = [directory]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no Git, or none of its directories
        done = subprocess.run(command, capture_output=True, check=True)
        names = [directory / name for name in os.fsdecode(done.stdout).split("\0") if name]

    @functools.cache
    def is_left_out(folder: Path) -> bool:
        return folder.name in _NEVER or any((folder / sign).exists() for sign in _SIGNS)

    def is_sent(path: Path) -> bool:
        above = path.relative_to(directory).parents[:-1]
        is_secret = path.suffix == ".key_secret"
        return path.is_file() and not is_secret and not any(is_left_out(directory / folder) for folder in above)

    within = (path for name in names for path in (name.rglob("*") if name.is_dir() else [name]))
    return sorted({path.relative_to(directory) for path in within if is_sent(path)})


def code_archive(code: Path, max_mb: int = _MAX_MB) -> bytes:
    """Return a tar archive of a directory's files that are sent, or of a wheel's, below ``code/``.

    Args:
        code: the directory, or a wheel of pure Python.
        max_mb: most megabytes to send.

    Raises:
        ConfigError: it is neither, it is a home directory, or it has more; the message names the largest files.
    """
    if code.suffix == ".whl" and code.is_file():
        with zipfile.ZipFile(code) as wheel:
            return archive({f"code/{name}": wheel.read(name) for name in wheel.namelist() if name[-1] != "/"})
    if not code.is_dir():
        hint = "give the directory of your environment's modules, or a wheel."
        raise ConfigError(f"--code {code} is neither a directory nor a .whl file:", key="code", hint=hint)
    if code in (Path.home(), Path("/")):
        hint = "change to the directory of your code, or give --code DIR."
        raise ConfigError(f"{code} is a home directory, which is not sent to hosts:", key="code", hint=hint)
    sizes = {path: (code / path).stat().st_size for path in shipped(code)}
    if (total := sum(sizes.values())) > max_mb << 20:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        names = ", ".join(f"{path} ({sizes[path] >> 20} MB)" for path in largest)
        said = f"{code} has {total >> 20} MB to send to hosts, more than {max_mb} MB; the largest are {names}."
        hint = "List data in .gitignore, or give --code DIR with the code alone."
        raise ConfigError(said, key="code", value=str(code), hint=hint)
    return archive({f"code/{path.as_posix()}": code / path for path in sizes})


def archive(files: Mapping[str, Path | bytes]) -> bytes:
    """Return a tar archive of files, name -> path or content, which only the owner can read."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, source in files.items():
            content = source.read_bytes() if isinstance(source, Path) else source
            info = tarfile.TarInfo(name)
            info.size, info.mode = (
                len(content),
                0o700 if isinstance(source, Path) and os.access(source, os.X_OK) else 0o600,
            )
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()
