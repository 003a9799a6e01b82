"""Imports: optional packages, where child processes look for modules, and TensorFlow in as little time as can be.

This module loads next to nothing; only a call of `load_tensorflow` loads TensorFlow.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import re
import shlex
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from aiorl.errors import ConfigError


def install_command(extra: str) -> str:
    """Return what to type to install an extra: into the clone that runs, or beside the aiorl that is installed."""
    clone = Path(__file__).parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install 'aiorl[{extra}]'"  # pip keeps the aiorl that is installed, and reads its extras


def missing(modules: Iterable[str]) -> list[str]:
    """Return those of some top-level modules that are not installed; none is imported."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def want_packages(by: str, modules: Iterable[str], extra: str, *, key: str, value: object = None) -> None:
    """Refuse what needs packages that are not installed; none is imported.

    Args:
        by: who needs them, as the message begins.
        modules: their top-level modules.
        extra: aiorl's extra that brings them.
        key: setting that asks for them.
        value: its value.

    Raises:
        ConfigError: some are missing.
    """
    if absent := missing(modules):
        said = f"{by} needs {', '.join(absent)}, not installed here."
        raise ConfigError(said, key=key, value=value, hint=f"Install it with: {install_command(extra)}")


@contextlib.contextmanager
def needed_by(by: str, what: str, extra: str, *, key: str, value: object = None) -> Iterator[None]:
    """Import in here what only some need.

    Args:
        by: who needs it, as the message begins.
        what: what the message calls the packages.
        extra: aiorl's extra that brings them.
        key: setting that asks for them.
        value: its value.

    Raises:
        ConfigError: an import failed.
    """
    try:
        yield
    except ImportError as error:
        hint = f"Install it with: {install_command(extra)}"
        raise ConfigError(f"{by} needs {what}: {error}.", key=key, value=value, hint=hint) from error


_found_last: set[str] = set()


def find_modules_here() -> None:
    """Let modules in the current directory be found after all others, so that none hides a module of Python's own."""
    with contextlib.suppress(OSError):  # the directory is gone
        here = os.getcwd()
        if here not in sys.path:
            sys.path.append(here)
            _found_last.add(here)


def child_python(module: str) -> list[str]:
    """Return the command of a child that runs a module of aiorl, which finds modules by `python_path` and as here."""
    return [sys.executable, "-P", "-m", module]


def python_path() -> dict[str, str]:
    """The environment variable by which another Python finds the modules that this one does; none if it does anyway.

    Such as those beside the script that is run, which are on no other process's path. Python's own folders and those of
    installed packages are left out: what a process starts in its turn may be a Python of another version.
    """
    standard = sysconfig.get_path("stdlib")
    installed = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    known = {*map(os.path.realpath, (*installed, os.path.join(standard, "lib-dynload")))}
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    own = [
        place
        for place in sys.path
        if place and os.path.realpath(place) not in known and os.path.basename(place) != archive
        if place not in _found_last or place != os.getcwd()  # a child finds it by itself, last as well
    ]
    said = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # also what was added to it since this Python began
    places = dict.fromkeys([*own, *filter(None, said)])
    return {"PYTHONPATH": os.pathsep.join(places)} if places else {}


NO_MEMORY = (
    "there is not enough memory to load TensorFlow, which takes about 3 GB of addresses. Raise the limit (ulimit -v), "
    "or end other programs."
)
_SIGNS = "failed to map segment|cannot allocate memory|out of memory"


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised during, came of memory that was not granted."""
    while error is not None:
        if isinstance(error, MemoryError) or re.search(_SIGNS, str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


def prepare_import() -> None:
    """Set the variable that Keras reads at import; `aiorl` itself has set TensorFlow's."""
    os.environ["KERAS_BACKEND"] = "tensorflow"


def load_tensorflow(*, threads: int | None = None) -> None:
    """Import it; no thread of its own runs afterwards.

    Args:
        threads: that its kernels may use, without GPUs unless CUDA_VISIBLE_DEVICES names some; None leaves all as it
            is, and so does a process that has it loaded.
    """
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
        # one inter-op thread can hang on nested functions (tensorflow#38969)
        tensorflow.config.threading.set_inter_op_parallelism_threads(max(2, threads))


@contextlib.contextmanager
def _quickly() -> Iterator[None]:
    """Import in here what makes much and drops little: look for no garbage, and never again in what is made.

    Imports of pyplot fail meanwhile: Keras would load it for helpers of its own, half a second.
    """
    hidden = [package for package in ("matplotlib", "cv2") if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # how the import system is told so
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]
        gc.freeze()
        if was_enabled:
            gc.enable()
