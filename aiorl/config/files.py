"""Files of settings and of runs: JSON, and safe reading of files that someone else may have made or
damaged.

`read_regular` or `open_regular` reads everything in a run directory: a pipe would block, a link
leads elsewhere, holes or a few kilobytes of empty lists fill the memory, and a thousand brackets
exhaust the stack. A file that is acted on (run, submitted, or believed about processes and jobs)
passes `read_own`: what someone else wrote is only a claim.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import json
import math
import os
import pwd
import shlex
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from aiorl.errors import ConfigError
from aiorl.process.machine import available_bytes

MAX_BYTES = 1 << 20
"""Size limit of a config file."""

MAX_DEPTH = 32
"""Nesting of lists and mappings in a file."""
_MAX_PARSED_BYTES = 1 << 30
_SMALL_BYTES = 64 << 20
"""Size up to which a file is read without checking the free memory."""
_MAX_HOLES = 16
"""Largest ratio of holes to written bytes in a file: some file systems turn zeros into holes."""


def read_config_file(path: Path) -> tuple[bytes, dict[int, Path]]:
    """Return the content of a file that the user names, which can be a pipe, and to whom it
    belongs: id -> path.
    """
    try:
        with path.open("rb") as file:
            owners = {os.fstat(file.fileno()).st_uid: path}
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"Config file {path} can't be read: {error.strerror}.", value=str(path)
        ) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"Config file {path} can't be read: it has more than {MAX_BYTES:,} bytes.",
            value=str(path),
        )
    return content, owners


# Files of other users
# --------------------------------------------------------------------------------------------------


def whose_else(status: os.stat_result) -> str:
    """Return why a file or directory is not private to this user, in plain words; "" if it is."""
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    mode = stat.S_IMODE(status.st_mode)
    return f"can be read or written by others (mode {mode:04o})" if mode & 0o077 else ""


def others_may_write(status: os.stat_result) -> bool:
    """Return whether users other than the owner can change a file, or replace files in a
    directory.
    """
    mode = status.st_mode
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:  # only a file's owner can replace it
        return False
    by_group = mode & 0o020 and not _is_group_of_one(status.st_gid, status.st_uid)
    return bool(mode & 0o002 or by_group)


def _is_group_of_one(group: int, user: int) -> bool:
    """Return whether a group is a user's private one; some systems make files writable by that
    group by default.
    """
    try:
        account = pwd.getpwuid(user)
        entry = grp.getgrgid(group)
    except KeyError:
        return False
    is_namesake = account.pw_gid == group and entry.gr_name == account.pw_name
    return is_namesake and set(entry.gr_mem) <= {account.pw_name}


def user_name(user: int) -> str:
    """Return the name of a user, or the id of one without a name."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def other_users(owners: Mapping[int, Path]) -> dict[int, Path]:
    """Return the owners, id -> path, other than this user."""
    return {user: path for user, path in owners.items() if user != os.getuid()}


def strangers(owners: Mapping[int, Path]) -> dict[int, Path]:
    """Return the owners, id -> path, other than this user and root, whose files are the
    administrator's words.
    """
    return {user: path for user, path in other_users(owners).items() if user != 0}


def read_with_owners(path: Path, *, max_bytes: int) -> tuple[bytes, dict[int, Path]]:
    """Return the content of a regular file, and to whom it and its directory belong.

    Both are opened once, and their owners are those of the descriptors: the owner of a directory
    above can put another user's file at the same path at any time.

    Args:
        path: path of the file, which can't be a link; its parents can be links.
        max_bytes: limit of the size, checked before anything is read.

    Returns:
        The content, and id of a user -> the directory or file of theirs.

    Raises:
        OSError: see `read_regular`; or the directory is missing, or no directory.
    """
    directory = os.open(path.parent, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
    try:
        owners = {os.fstat(directory).st_uid: path.parent}
        with open_regular(path.name, directory=directory) as file:
            owners.setdefault(os.fstat(file.fileno()).st_uid, path)
            return _content(file, path, max_bytes), owners
    finally:
        os.close(directory)


def check_own(path: Path, status: os.stat_result) -> None:
    """Refuse a file or directory that someone other than this user and root can have written or put
    there.

    Args:
        path: its path, for the message.
        status: its facts, best those of an open descriptor.

    Raises:
        OSError: it belongs to someone else, others can write to it, or a file has a second name (a
            hard link).
    """
    reason = ""
    if status.st_uid not in (0, os.geteuid()):
        owner = user_name(status.st_uid)
        reason = f"it belongs to user {owner}, not to you, so nothing in it is acted on"
    elif others_may_write(status):
        mode = stat.S_IMODE(status.st_mode)
        reason = (
            f"others can write to it (mode {mode:04o}): check its contents, then run "
            f"`chmod go-w {shlex.quote(str(path))}`"
        )
    elif stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        reason = "it has a second name (a hard link), so it may belong elsewhere"
    if reason:
        raise OSError(errno.EPERM, reason, str(path))


def check_own_directory(path: Path) -> None:
    """Refuse a directory, or a link to one, in which someone other than this user and root can put
    files.

    Raises:
        OSError: see `check_own`; or it is missing, or no directory.
    """
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, "it is not a directory", str(path))
    check_own(path, status)


def read_own(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file that only this user or root can have written, to act on
    it.

    Args:
        path: path of the file in a directory of this user's.
        max_bytes: limit of the size, checked before anything is read.

    Raises:
        OSError: see `read_regular` and `check_own`, which also applies to the file's directory.
    """
    with open_regular(path) as file:
        check_own_directory(path.parent)
        check_own(path, os.fstat(file.fileno()))
        return _content(file, path, max_bytes)


def read_regular(path: Path, *, max_bytes: int, follow: bool = False) -> bytes:
    """Return the content of a regular file.

    Args:
        path: path of the file; its parents can be links.
        max_bytes: limit of the size, checked before anything is read.
        follow: True if the file itself can be a symbolic link.

    Raises:
        OSError: the file is missing, unreadable, not regular, too large, mostly holes, or too large
            for the memory left (reading it takes twice its size); the reason is in plain words.
    """
    with open_regular(path, follow=follow) as file:
        return _content(file, path, max_bytes)


def _content(file: BufferedReader, path: Path, max_bytes: int) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise OSError(
            errno.EFBIG, f"it has {size:,} bytes, more than the limit of {max_bytes:,}", str(path)
        )
    check_written(file.fileno(), path)
    if size > _SMALL_BYTES:  # finding out how much memory there is takes time
        free = available_bytes()
        if 2 * size > free:
            reason = f"it has {size:,} bytes, and {free:,} bytes of memory are left"
            raise OSError(errno.ENOMEM, reason, str(path))
    return file.read(size)


def open_regular(
    path: str | Path, *, follow: bool = False, directory: int | None = None
) -> BufferedReader:
    """Open a regular file for reading in parts.

    Args:
        path: path of the file.
        follow: True if it can be a symbolic link.
        directory: descriptor of the directory to which the path is relative; None for the working
            directory.

    Raises:
        OSError: it is missing, unreadable or not regular; the reason is in plain words.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from error
        raise
    return _reader_of(descriptor, path)


def _reader_of(descriptor: int, path: str | Path) -> BufferedReader:
    """Return a reader of an open file, or close it and raise OSError if it is not regular."""
    try:
        check_regular(descriptor, path)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_inside(directory: Path, name: str) -> BufferedReader:
    """Open a regular file inside a directory for reading, without following links out of it.

    Args:
        directory: the directory, which can be a link itself.
        name: path of the file, relative to it.

    Raises:
        OSError: it is missing, unreadable or not regular, or a part of `name` is a symbolic link or
            leads upwards; the reason is in plain words.
    """
    *folders, last = Path(name).parts
    if ".." in (*folders, last) or Path(name).is_absolute():
        raise OSError(errno.EPERM, "it leads out of the directory", name)
    path = directory / name
    outer = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
            os.close(outer)
            outer = inner
        descriptor = os.open(last, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=outer)
    except OSError as error:
        # a link in place of a directory is ENOTDIR
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            reason = "a part of its path is a symbolic link"
            raise OSError(errno.ELOOP, reason, str(path)) from error
        raise
    finally:
        os.close(outer)
    return _reader_of(descriptor, path)


def names_inside(directory: Path, folder: str = ".") -> list[str]:
    """Return the names of files in a directory, or in a folder of it, that are no links; [] if it
    can't be read.
    """
    place = directory / folder
    if folder != "." and place.is_symlink():
        return []
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return []


def folders_inside(directory: Path) -> list[str]:
    """Return the names of the folders of a directory that are no links; [] if it can't be read."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def check_regular(descriptor: int, path: str | Path) -> None:
    """Raise OSError unless an open file is regular."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def check_written(descriptor: int, path: str | Path) -> None:
    """Raise OSError if a file consists mostly of holes, which take no disk space but fill a
    reader's memory.
    """
    size = os.fstat(descriptor).st_size
    holes = 0
    hole = 0  # where the next one begins; it can be empty
    with contextlib.suppress(OSError):  # the file system doesn't report holes
        while hole < size:
            try:
                data = os.lseek(descriptor, hole, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                holes += size - hole  # up to the end
                break
            holes += data - hole
            hole = os.lseek(descriptor, data, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    if holes > _SMALL_BYTES + _MAX_HOLES * (size - holes):
        reason = f"{holes:,} of its {size:,} bytes are holes that were never written"
        raise OSError(errno.EFBIG, reason, str(path))


def parse_json(content: bytes, *, is_strict: bool = True) -> Any:  # Any: JSON can hold any value
    """Return the value of JSON in UTF-8 with limited depth and size.

    Args:
        content: the JSON.
        is_strict: refuse infinite numbers, NaN, and repeated names in an object.

    Raises:
        ValueError: it is not JSON, or a limit or rule is broken.
    """
    if parsed_bytes(content) > _MAX_PARSED_BYTES:
        raise ValueError("it holds too many values")
    strict_hooks: dict[str, Any] = {
        "parse_constant": _refuse,
        "parse_float": _finite,
        "object_pairs_hook": _unique,
    }
    try:
        value = json.loads(content.decode("utf-8"), **(strict_hooks if is_strict else {}))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value, MAX_DEPTH)
    return value


def parsed_bytes(content: bytes) -> int:
    """Return an upper bound of the memory for the values of JSON:

    `[[],[]]` takes 20 times its length.
    """
    costs = {b",": 32, b'"': 24, b":": 100, b"[": 72, b"{": 72}
    return len(content) + sum(cost * content.count(sign) for sign, cost in costs.items())


def num_containers(content: bytes) -> int:
    """Return an upper bound of the number of lists and objects in JSON.

    An empty one is two bytes of it, and takes its reader about a microsecond.
    """
    return content.count(b"[") + content.count(b"{")


def check_depth(value: object, most: int) -> None:
    """Raise ValueError if dicts, lists and tuples are nested too deeply."""
    level = [value]
    for _ in range(most):
        inner_level: list[object] = []
        for outer in level:
            if isinstance(outer, dict):
                inner_level += outer.values()
            elif isinstance(outer, list | tuple):
                inner_level += outer
        if not inner_level:
            return
        level = inner_level
    raise ValueError("it is nested too deeply")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is not a finite number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return values
