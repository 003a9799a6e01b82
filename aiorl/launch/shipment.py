"""The code that is sent to hosts: a directory without the files that belong to this machine only,
or a wheel.

Left out are files that Git ignores, directories of version control and caches, virtual
environments, and runs. Left out and named are files that may hold secrets, by their names or
because they begin like a private key, whether Git has them or not; and links that lead out of the
directory. The user can include them one by one. Names of Python's modules and packages hold nothing
back, and all of a wheel is sent, because its files have been chosen.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from aiorl.errors import ConfigError
from aiorl.text import one_line

_MAX_MB = 512
_NEVER = {".git", ".hg", ".svn", ".venv", ".tox", "node_modules", "__pycache__"}
_SIGNS = ("pyvenv.cfg", "run.json", "launch.json", "CACHEDIR.TAG")
"""Files of directories that are left out: virtual environments, runs, caches."""
_SECRET_DIRECTORIES = {
    ".aws",
    ".azure",
    ".config",
    ".databricks",
    ".docker",
    ".gcloud",
    ".gnupg",
    ".huggingface",
    ".kaggle",
    ".kube",
    ".oci",
    ".password-store",
    ".ssh",
    ".terraform",
    "gcloud",
}
"""Directories in which programs keep credentials."""
_SECRET_FILES = re.compile(
    r"\.env.*|.*\.env|[._]netrc|\.git-credentials|\.npmrc|\.yarnrc.*|\.pypirc|\.pgpass|\.my\.cnf|\.boto|\.s3cfg"
    r"|\.htpasswd|\.vault-token|\.dockercfg|\.condarc|\.?credentials(\..*)?|.*[-_.]credentials\.json"
    r"|client[-_]secrets?.*\.json|service[-_]?account.*\.json|\.?kubeconfig(\..*)?|.*\.kubeconfig"
    r"|(.*[-_.])?token(\.(txt|json|pickle))?|stored_tokens|kaggle\.json|rclone\.conf|\.databrickscfg"
    r"|\.?secrets?(\.(ya?ml|json|toml|ini|txt|cfg))?|id_[^.]*|id_(rsa|dsa|ecdsa|ed25519).*|.*\.tfstate(\..*)?"
    r"|.*\.(pem|key|key_secret|p8|p12|pfx|jks|keystore|ppk|kdbx|ovpn|gpg|age|secret)",
    re.IGNORECASE,
)
"""Names of files that usually hold credentials or private keys."""
_CODE = {".py", ".pyi"}
"""Suffixes of files that are code, whatever their names are."""
_HARMLESS = re.compile(r"\.env[.-](example|sample|template|dist)", re.IGNORECASE)
_PRIVATE_KEY = re.compile(rb"\s*-----BEGIN [A-Z ]*PRIVATE KEY")
_HEAD_BYTES = 256
_MAX_NAMED = 5


class Shipment(NamedTuple):
    """Files of a directory.

    Attributes:
        files: those that are sent, as sorted paths relative to the directory.
        left_out: those that may hold secrets, or lie outside of the directory; sorted.
    """

    files: list[Path]
    left_out: list[Path]

    def about_left_out(self) -> str:
        """Return a sentence about the files that are left out; "" if there are none."""
        if not self.left_out:
            return ""
        names = ", ".join(one_line(str(path), 200) for path in self.left_out[:_MAX_NAMED])
        if len(self.left_out) > _MAX_NAMED:
            names += ", ..."
        return (
            f"{len(self.left_out)} files are not sent, because they may hold secrets or lie"
            f" elsewhere: {names} (--include FILE sends one)"
        )


def look_through(directory: Path, include: Sequence[str] = ()) -> Shipment:
    """Return the files of a directory that are sent to hosts, and those that are left out for
    safety.

    Args:
        directory: the directory.
        include: files to send in any case: paths relative to the directory, or patterns such as
            ``certs/*.pem``.

    Raises:
        ConfigError: a path in `include` matches no file.
    """
    command = ["git", "-C", str(directory), "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    tops = [directory]
    # no Git, or none of its directories
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        listing = subprocess.run(command, capture_output=True, check=True).stdout
        tops = [directory / name for name in os.fsdecode(listing).split("\0") if name]
    root = directory.resolve()

    @functools.cache
    def is_left_out(folder: Path) -> bool:
        return folder.name in _NEVER or any((folder / sign).exists() for sign in _SIGNS)

    files: set[Path] = set()
    unsafe: set[Path] = set()
    for top in tops:
        for path in top.rglob("*") if top.is_dir() else [top]:
            at = path.relative_to(directory)
            folders = [directory / folder for folder in at.parents[:-1]]
            if not path.is_file() or any(map(is_left_out, folders)):
                continue
            if _is_safe(path, at, root):
                files.add(at)
            else:
                unsafe.add(at)
    for pattern in include:
        matches = {*_matching(directory, pattern)}
        if not matches:
            raise ConfigError(
                f"--include {pattern!r:.200} matches no file:",
                key="include",
                value=pattern,
                hint=f"Give a path relative to {directory}, or a pattern such as 'certs/*.pem'.",
            )
        files |= matches
    return Shipment(sorted(files), sorted(unsafe - files))


def _matching(directory: Path, pattern: str) -> Iterator[Path]:
    at = PurePosixPath(pattern)
    if at.is_absolute() or ".." in at.parts:
        return
    if (directory / pattern).is_file():
        yield Path(pattern)
        return
    for path in directory.rglob("*"):
        if path.is_file() and fnmatchcase(path.relative_to(directory).as_posix(), pattern):
            yield path.relative_to(directory)


def _is_safe(path: Path, at: Path, root: Path) -> bool:
    """Return whether a file, under its name and that of its target, holds no secret and lies in the
    directory.
    """
    try:
        target = path.resolve().relative_to(root)
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError, RuntimeError):  # elsewhere, unreadable, or links in a circle
        return False
    has_secret_name = _is_secret(at, root) or _is_secret(target, root)
    return not has_secret_name and not _PRIVATE_KEY.match(head)


def _is_secret(at: Path, root: Path) -> bool:
    """Return whether a file is no code, and its name, or that of a directory above it, is one of
    secrets.
    """
    if at.suffix in _CODE:
        return False
    for folder in at.parents:
        if folder.name.lower() in _SECRET_DIRECTORIES and not _is_package(root / folder):
            return True
    return bool(_SECRET_FILES.fullmatch(at.name)) and not _HARMLESS.fullmatch(at.name)


def _is_package(folder: Path) -> bool:
    """Return whether Python can import a directory."""
    return folder.name.isidentifier() and (folder / "__init__.py").is_file()


def code_archive(code: Path, max_mb: int = _MAX_MB, include: Sequence[str] = ()) -> bytes:
    """Return a tar archive of a directory's files that are sent, or of a wheel's, below ``code/``.

    Args:
        code: the directory, or a wheel of pure Python.
        max_mb: most megabytes to send.
        include: files to send in any case, see `look_through`.

    Raises:
        ConfigError: it is neither, it is a home directory, or it has more; the message names the
            largest files.
    """
    if code.suffix == ".whl" and code.is_file():
        with zipfile.ZipFile(code) as wheel:
            inside = [name for name in wheel.namelist() if name[-1] != "/"]
            return archive({f"code/{name}": wheel.read(name) for name in inside})
    if not code.is_dir():
        raise ConfigError(
            f"--code {code} is neither a directory nor a .whl file:",
            key="code",
            hint="give the directory of your environment's modules, or a wheel.",
        )
    if code in (Path.home(), Path("/")):
        raise ConfigError(
            f"{code} is a home directory, which is not sent to hosts:",
            key="code",
            hint="change to the directory of your code, or give --code DIR.",
        )
    files = look_through(code, include).files
    sizes = {path: (code / path).stat().st_size for path in files}
    total = sum(sizes.values())
    if total > max_mb << 20:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        names = ", ".join(f"{path} ({sizes[path] >> 20} MB)" for path in largest)
        raise ConfigError(
            f"{code} has {total >> 20} MB to send to hosts, more than {max_mb} MB; the largest are"
            f" {names}.",
            key="code",
            value=str(code),
            hint="List data in .gitignore, or give --code DIR with the code alone.",
        )
    return archive({f"code/{path.as_posix()}": code / path for path in sizes})


def archive(files: Mapping[str, Path | bytes]) -> bytes:
    """Return a tar archive of files, name -> path or content, which only the owner can read."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, source in files.items():
            mode = 0o600
            if isinstance(source, bytes):
                content = source
            else:
                content = source.read_bytes()
                if os.access(source, os.X_OK):
                    mode = 0o700
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = mode
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()
