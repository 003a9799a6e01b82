"""Files by path or URI, plain or compressed: finding the files of a source, and opening them."""

from __future__ import annotations

import contextlib
import glob
import gzip
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import lz4.frame

from aiorl.config.files import open_regular
from aiorl.errors import AiorlError, ConfigError, DataError
from aiorl.process.imports import needed_by
from aiorl.text import one_line

EXTRA = "offline"
"""Extra that installs the packages for formats and URIs."""

COMPRESSIONS = (".gz", ".lz4")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_MAGIC = re.compile(r"[*?\[]")
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, RuntimeError)


def is_uri(path: str) -> bool:
    """Return whether a path begins with a protocol, such as ``s3://``."""
    return _URI.match(path) is not None


def without_compression(path: str) -> str:
    """Return a path without the suffix of a compression."""
    if not path.lower().endswith(COMPRESSIONS):
        return path
    return path.removesuffix(".gz").removesuffix(".lz4")


def suffix_of(path: str) -> str:
    """Return the suffix of the format, in lower case: ".json" for "a.json.gz"."""
    return os.path.splitext(without_compression(path.lower()))[1]


def file_name(path: str) -> str:
    """Return the last part of a path or URI."""
    return path.rstrip("/").rpartition("/")[2]


def in_directory(directory: str, name: str) -> str:
    """Return the path of a name in a directory, which can be a URI."""
    if is_uri(directory):
        return f"{directory.rstrip('/')}/{name}"
    return os.path.join(directory, name)


def find_files(source: str, suffixes: Collection[str]) -> list[str]:
    """Return the files that a path, directory, pattern or URI names, sorted by name.

    Args:
        source: path, directory, pattern or URI; a directory means all files in it with a known
            suffix, except hidden ones.
        suffixes: suffixes of files in a directory.

    Raises:
        ConfigError: the protocol of a URI is unknown.
    """
    if is_uri(source):
        return _find_remote(source, suffixes)
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return _of_formats([entry.path for entry in os.scandir(path) if entry.is_file()], suffixes)
    if os.path.exists(path):
        return [path]
    if not _MAGIC.search(path):
        return []
    return sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))


def _find_remote(source: str, suffixes: Collection[str]) -> list[str]:
    try:
        fs, path = _filesystem(source)
        with _its_own_errors(source):
            if fs.isdir(path):
                entries = fs.ls(path, detail=True)
                names = [entry["name"] for entry in entries if entry["type"] == "file"]
                names = _of_formats(names, suffixes)
            elif _MAGIC.search(path):
                names = sorted(fs.glob(path))
            else:
                names = [path] if fs.exists(path) else []
            return [str(fs.unstrip_protocol(name)) for name in names]
    except (DataError, OSError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        if isinstance(error, DataError):
            reason = error.reason
        raise ConfigError(
            f"{source!r} can't be opened: {reason}.",
            key="input",
            value=source,
        ) from error


def _of_formats(paths: Sequence[str], suffixes: Collection[str]) -> list[str]:
    return sorted(
        path
        for path in paths
        if suffix_of(path) in suffixes and not file_name(path).startswith(".")
    )


def _filesystem(uri: str) -> tuple[Any, str]:
    protocol = uri.partition("://")[0]
    with needed_by(f"A URI such as {protocol}://", "fsspec", EXTRA, key="input"):
        import fsspec

        with _its_own_errors(uri):
            fs, path = fsspec.core.url_to_fs(uri)
    return fs, str(path)


@contextlib.contextmanager
def _its_own_errors(path: str) -> Iterator[None]:
    """Raise DataError naming the URI for any error of its protocol's package, which can raise
    anything.
    """
    try:
        yield
    except (AiorlError, OSError, ImportError):
        raise
    except Exception as error:
        if not is_uri(path):
            raise
        raise DataError(one_line(f"{type(error).__name__}: {error}", 300), path=path) from error


def exists(path: str) -> bool:
    """Return whether a file exists."""
    if is_uri(path):
        fs, name = _filesystem(path)
        return bool(fs.exists(name))
    return os.path.lexists(path)


def make_directory(path: str) -> None:
    """Create a directory and its missing parents."""
    if is_uri(path):
        fs, name = _filesystem(path)
        fs.makedirs(name, exist_ok=True)
    else:
        Path(path).expanduser().mkdir(parents=True, exist_ok=True)


def open_plain(path: str) -> IO[bytes]:
    """Open a file for reading, without decompressing it.

    Raises:
        DataError: the package of a URI's protocol can't open it.
        OSError: it cannot be read, or is not a regular file.
    """
    if not is_uri(path):
        return open_regular(path, follow=True)
    fs, name = _filesystem(path)
    protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
    if "file" in protocols:
        return open_regular(name, follow=True)
    with _its_own_errors(path):
        opened: IO[bytes] = fs.open(name, "rb")
    return opened


@contextlib.contextmanager
def open_unpacked(path: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, and decompress it if it has the suffix of a compression.

    Raises:
        DataError: the compressed file is damaged.
        OSError: it cannot be read.
    """
    with open_plain(path) as plain, readable(path):
        if path.lower().endswith(".gz"):
            with gzip.GzipFile(fileobj=plain, mode="rb") as unpacked:
                yield unpacked  # type: ignore[misc]  # it reads like any file
        elif path.lower().endswith(".lz4"):
            with lz4.frame.open(plain, "rb") as unpacked:
                yield unpacked
        else:
            yield plain


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Raise DataError naming the file for any error of reading or decompressing it."""
    with _its_own_errors(path):
        try:
            yield
        except _DAMAGE as error:
            raise DataError(f"the file is damaged or cut short ({error})", path=path) from error


def create(path: str) -> IO[bytes]:
    """Create a file, unbuffered if it is local.

    Raises:
        FileExistsError: the file exists already.
        OSError: it cannot be written.
    """
    if not is_uri(path):
        return open(path, "xb", buffering=0)
    if exists(path):
        raise FileExistsError(f"{path} exists already")
    fs, name = _filesystem(path)
    plain: IO[bytes] = fs.open(name, "wb")
    return plain


def packed(path: str, plain: IO[bytes]) -> Any:
    """Return a file that compresses into a plain one if the path says so; closing it does not close
    the plain one.
    """
    if path.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=plain, mode="wb", compresslevel=1)
    if path.lower().endswith(".lz4"):
        return lz4.frame.open(plain, "wb")
    return plain
