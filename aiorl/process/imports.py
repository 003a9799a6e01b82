"""Imports: optional packages, module paths of child processes, and fast loading of TensorFlow.

This module loads almost nothing; only `load_tensorflow` loads TensorFlow.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import resource
import shlex
import site
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from aiorl.errors import ConfigError
from aiorl.process.collector import collector_off


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for the clone in use or for the installed
    aiorl.
    """
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install 'aiorl[{extra}]'"  # pip keeps the installed aiorl and reads its extras


def extra_with(requirement: str) -> str:
    """Return the smallest extra of aiorl that installs another package's extra, "" if none does.

    The package's metadata, which repeats pyproject.toml, has the extras.

    Args:
        requirement: a package with its extra, such as ``gymnasium[box2d]``.
    """
    from importlib import metadata  # takes long to load

    try:
        lines = metadata.requires("aiorl") or []
    except metadata.PackageNotFoundError:  # a clone that is only on the path
        return ""
    pairs = [
        re.fullmatch(r"([^\s;<>=!~]+)[^;]*;.*extra == ['\"]([\w-]+)['\"].*", line) for line in lines
    ]
    extras = [(pair[1], pair[2]) for pair in pairs if pair is not None]
    sizes = Counter(extra for _, extra in extras)
    wanted = requirement.replace("_", "-")
    return min(
        (extra for name, extra in extras if name == wanted), key=sizes.__getitem__, default=""
    )


def missing(modules: Iterable[str]) -> list[str]:
    """Return the top-level modules that are not installed, without importing any."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def require_packages(
    by: str, modules: Iterable[str], extra: str, *, key: str, value: object = None
) -> None:
    """Check that packages are installed, without importing any.

    Args:
        by: the feature that needs them; the message begins with it.
        modules: top-level modules of the packages.
        extra: aiorl's extra that installs them.
        key: setting that needs them.
        value: value of the setting.

    Raises:
        ConfigError: packages are missing.
    """
    absent = missing(modules)
    if absent:
        raise ConfigError(
            f"{by} needs {', '.join(absent)}, which this Python lacks.",
            key=key,
            value=value,
            hint=f"Install it with: {install_command(extra)}",
        )


@contextlib.contextmanager
def needed_by(by: str, what: str, extra: str, *, key: str, value: object = None) -> Iterator[None]:
    """Convert a failed import of optional packages in the block into a ConfigError.

    Args:
        by: the feature that needs them; the message begins with it.
        what: name of the packages in the message.
        extra: aiorl's extra that installs them.
        key: setting that needs them.
        value: value of the setting.

    Raises:
        ConfigError: an import failed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{by} needs {what}: {error}.",
            key=key,
            value=value,
            hint=f"Install it with: {install_command(extra)}",
        ) from error


_found_last: set[str] = set()
"""Directories that `find_modules_here` has added to the path."""


def find_modules_here() -> None:
    """Find modules in the current directory after all others, so that none hides a module of
    Python's own.
    """
    with contextlib.suppress(OSError):  # the directory is gone
        directory = os.getcwd()
        if directory not in sys.path:
            sys.path.append(directory)
            _found_last.add(directory)


def child_python(module: str) -> list[str]:
    """Return the command of a child that runs a module of aiorl; pass it `python_path` in its
    environment.
    """
    return [sys.executable, "-P", "-m", module]


def python_path() -> dict[str, str]:
    """Return the environment variable with which another Python finds the same modules; empty if it
    needs none.

    It names, for example, the script's folder, which is on no other process's path. It omits
    Python's own folders and those of installed packages, since that process may in turn start a
    Python of another version.
    """
    of_python = [
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.join(sysconfig.get_path("stdlib"), "lib-dynload"),
    ]
    left_out = set(map(os.path.realpath, of_python))
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    places = [
        place
        for place in sys.path
        if place and os.path.realpath(place) not in left_out and os.path.basename(place) != archive
    ]
    # A child adds the current directory by itself, in last place, too.
    places = [place for place in places if place not in _found_last or place != os.getcwd()]
    # The variable may have changed since this Python was started.
    places += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if not places:
        return {}
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}


NO_MEMORY = (
    "there is not enough memory to load TensorFlow, which needs about 3 GB of address space. Raise"
    " the limit (ulimit -v), or end other programs."
)
_LEAST_BYTES = 2_400_000_000
"""Address space below which the smallest run was seen to abort: with 2.36 GB it does, with 2.66 GB
it does not."""
_SIGNS = "failed to map segment|cannot allocate memory|out of memory"


def lacks_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one in its context, was caused by a lack of memory."""
    while error is not None:
        if isinstance(error, MemoryError) or re.search(_SIGNS, str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


def check_address_space() -> None:
    """Refuse to load TensorFlow into an address space in which its allocator would abort this
    process.

    Raises:
        ConfigError: the limit of the address space (ulimit -v) is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_BYTES:
        raise ConfigError(f"The limit is {limit:,} bytes: {NO_MEMORY}", key="memory", value=limit)


def prepare_import() -> None:
    """Set the variable that Keras reads at import; `aiorl` itself has set TensorFlow's."""
    os.environ["KERAS_BACKEND"] = "tensorflow"


def load_tensorflow(*, threads: int | None = None) -> None:
    """Import TensorFlow; no thread of the import remains afterwards.

    Args:
        threads: number of threads for its kernels; GPUs are then hidden unless CUDA_VISIBLE_DEVICES
            names some. None changes nothing. It has no effect if TensorFlow is already loaded.
    """
    if "tensorflow" not in sys.modules:
        check_address_space()
    if threads is not None and "tensorflow" not in sys.modules:
        prepare_import()
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    else:
        threads = None
    with _quickly():
        try:
            tensorflow = importlib.import_module("tensorflow")
        except (ImportError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            raise ConfigError(NO_MEMORY, key="memory") from error
    if threads is not None:
        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        # One inter-op thread can hang on nested functions (tensorflow#38969).
        tensorflow.config.threading.set_inter_op_parallelism_threads(max(2, threads))


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """Speed up large imports in the block: disable garbage collection, and exclude the new objects
    from it forever.

    Imports of matplotlib, cv2 and IPython fail meanwhile: Keras would load them for its helpers,
    which takes half a second.
    """
    hidden = [package for package in ("matplotlib", "cv2", "IPython") if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes the import system raise ImportError
    with collector_off():
        try:
            yield
        finally:
            for package in hidden:
                del sys.modules[package]
            gc.freeze()
