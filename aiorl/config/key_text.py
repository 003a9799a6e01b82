"""The keys of a run as one line of text, for a cloud that gives its hosts secrets as variables.

The line is in AIORL_KEYS, or in the file that AIORL_KEYS_FILE names. Who has it can join the run,
and pose as its learner.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aiorl.config.files import parse_json, read_regular
from aiorl.errors import SecurityError

VARIABLE: Final = "AIORL_KEYS"
FILE_VARIABLE: Final = "AIORL_KEYS_FILE"
_BEGINNING: Final = "aiorl-keys-1:"
_FILES: Final = {
    "learner.key_secret": 0o600,
    "learner.key": 0o644,
    "worker.key_secret": 0o600,
    "admitted/worker.key": 0o644,
}
"""File of a directory of keys -> its mode."""
_MAX_BYTES: Final = 16 << 10


def keys_as_text(directory: Path) -> str:
    """Return the learner's keys, and those that all workers share, as one line.

    Args:
        directory: directory of keys.

    Raises:
        SecurityError: a file is missing or can't be read.
    """
    contents = {}
    for name in _FILES:
        try:
            content = read_regular(directory / name, max_bytes=_MAX_BYTES, follow=True)
        except OSError as error:
            raise _unusable(f"{directory / name} can't be read: {error.strerror}") from error
        contents[name] = content.decode("ascii", errors="replace")
    packed = base64.urlsafe_b64encode(json.dumps(contents).encode())
    return f"{_BEGINNING}{packed.decode()}"


def text_of_keys(environment: Mapping[str, str]) -> str:
    """Return the line of keys that the environment has; "" if it has none.

    Args:
        environment: environment variables.

    Raises:
        SecurityError: the file that it names can't be read.
    """
    text = environment.get(VARIABLE, "")
    file = environment.get(FILE_VARIABLE, "")
    if text or not file:
        return text
    try:
        return read_regular(Path(file), max_bytes=_MAX_BYTES, follow=True).decode().strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise _unusable(
            f"{FILE_VARIABLE} is {file!r:.200}, which can't be read: {reason}"
        ) from error


def write_keys(text: str, directory: Path) -> None:
    """Write the files of a directory of keys, in place of those that are there.

    Args:
        text: a line of `keys_as_text`.
        directory: the directory; made if it is missing.

    Raises:
        SecurityError: the text is no such line, or the files can't be written.
    """
    contents = _parsed(text)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / "admitted").mkdir(mode=0o755, exist_ok=True)
        for name, mode in _FILES.items():
            path = directory / name
            # processes of several hosts can share a disk
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            try:
                write_new(temporary, contents[name], mode).replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(f"keys can't be written to {directory}: {error.strerror}") from error


def write_new(path: Path, text: str, mode: int) -> Path:
    """Write a file that must not exist yet, and return its path.

    Args:
        path: the file.
        text: its content, ASCII.
        mode: its exact permissions, which it has from the beginning.

    Raises:
        OSError: it exists already, or can't be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, mode)
        file.write(text)
    return path


def _parsed(text: str) -> dict[str, str]:
    """Return name -> content of each file."""
    if not text.startswith(_BEGINNING) or len(text) > _MAX_BYTES:
        raise _unusable("it is no line of keys")
    try:
        packed = text.removeprefix(_BEGINNING)
        contents = parse_json(base64.b64decode(packed, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error) as error:
        raise _unusable("it is damaged") from error
    if not isinstance(contents, dict) or contents.keys() != _FILES.keys():
        raise _unusable("it has other files than keys")
    for content in contents.values():
        if not isinstance(content, str) or not content.isascii():
            raise _unusable("a file in it is no text")
    return contents


def _unusable(reason: str) -> SecurityError:
    return SecurityError(
        f"the keys in {VARIABLE} or {FILE_VARIABLE} can't be used: {reason}.",
        key=VARIABLE,
        hint="Print them with: aiorl keys DIR --print",
    )
