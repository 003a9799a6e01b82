"""Code that settings name: classes and functions of the user as texts, the objects of these texts,
and calls of them.

A config is plain text. An object in it becomes a text, and the text becomes the object again:

* ``package.module:Name`` for a class or function at the top level of a module. The main script
  counts as the module of its name: this process uses the loaded script, and other processes import
  it, without the code below ``if __name__ == "__main__":``.
* ``this-program:Name`` for anything else, such as a lambda or a class of a notebook. Only this
  process knows it, for as long as something holds it, for example the config that it was given to.

Arguments of environments and wrappers can be any object, such as a table. A config holds the object
itself; where it is written, every object that is not plain data is ``this-program:Name``. Import
paths in them are just texts. Tuples of any kind, and kinds of texts and numbers, are plain data; so
are members of enumerations that are texts or numbers, but only for other processes, since code of
the same process can compare a member with ``is``.

Reading a config runs no code; a run imports the code that its config names.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import pwd
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import Any

from aiorl.config import has_plain_keys, is_group
from aiorl.errors import AiorlError, ConfigError, nearest

_log = logging.getLogger(__name__)

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_LOCAL = "this-program:"
_PLAIN = (str, bytes, int, float, complex, list, tuple, set, frozenset, Mapping)

_SCALARS = (str, int, float, bytes, bytearray)
_NO_CODE = {"advertise", "bind", "client_port", "init_from", "resume", "run_dir", "web"}
_OF_ENVIRONMENTS = re.compile(r"(evaluation_config\.)?(env_config\.|wrappers\[\d+\]\.kwargs\.).*")
_VARIABLES = ("extra_python_environs_for_driver", "extra_python_environs_for_worker")

_local: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_for_good: dict[str, Any] = {}  # objects without weak references, which are never forgotten
_importing: ContextVar[str] = ContextVar("_importing", default="")


def is_import_path(text: str) -> bool:
    """Return whether a text has the form of an import path, ``package.module:Name``; minari:NAME is
    none.
    """
    return is_local(text) or (
        _FORM.fullmatch(text) is not None and text.partition(":")[0] != "minari"
    )


def is_local(text: str) -> bool:
    """Return whether a text names an object that only one process knows."""
    return text.startswith(_LOCAL)


def named(thing: Any) -> Any:
    """Return the text that names an object; texts, numbers and containers are returned
    unchanged.
    """
    if isinstance(thing, os.PathLike):
        return os.fspath(thing)
    if isinstance(thing, str) and thing.startswith("__main__:"):
        with contextlib.suppress(ConfigError):  # the importing process refuses it
            return named(import_object(thing, key=""))
    if thing is None or isinstance(thing, _PLAIN):
        return thing
    return import_path_of(thing) or _local_name(thing)


def plain_code(value: Any) -> Any:
    """Return settings with all classes, functions and spaces in them as plain data, at any
    depth.
    """
    if _is_space(value):  # before mappings and sequences, as a Dict or Tuple space is one
        # loads Gymnasium, which the space has loaded already
        from aiorl.data.spaces import space_to_dict

        return space_to_dict(value)
    if isinstance(value, Mapping):
        return {name: plain_code(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_code(inner) for inner in value]
    if callable(value) or isinstance(value, str):
        return named(value)
    return value


def plain_wrapper(value: Any) -> Any:
    """Return the settings of a wrapper with its class as a text; its arguments stay as they are."""
    if not is_group(value):
        return plain_code(value)
    return {
        name: with_objects(inner) if name == "kwargs" else plain_code(inner)
        for name, inner in value.items()
    }


def without_objects(value: Any, *, has_members: bool = True) -> Any:
    """Return arguments of an environment or a wrapper as plain data, with texts that name the
    objects in them.

    Args:
        value: the arguments.
        has_members: True for this process, which finds the members of enumerations by their names
            again; False for other processes, which get their texts and numbers.
    """
    if has_plain_keys(value):
        return {
            _plain(name): without_objects(inner, has_members=has_members)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple) and not _is_space(value):
        return _sequence_like(
            value, [without_objects(inner, has_members=has_members) for inner in value]
        )
    is_member = has_members and isinstance(value, enum.Enum)
    if value is None or (isinstance(value, _SCALARS) and not is_member):
        return _plain(value)
    is_numpy_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    if is_numpy_scalar and value.dtype.kind in "biuf":
        return value.item()
    name = _local_name(value)
    return _named_for_good(value) if name is value else name


def with_objects(value: Any) -> Any:
    """Return arguments of an environment or a wrapper with the objects that texts in them name, if
    they still exist.
    """
    if has_plain_keys(value):
        return {name: with_objects(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(with_objects, value))
    if isinstance(value, str) and is_local(value):
        return _local.get(value, _for_good.get(value, value))
    return value


def with_values_of_members(value: Any) -> Any:
    """Return arguments with the texts and numbers of members of enumerations, for other processes.

    All other objects are returned as they are.
    """
    if has_plain_keys(value):
        return {name: with_values_of_members(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple) and not _is_space(value):
        return _sequence_like(value, [with_values_of_members(inner) for inner in value])
    return _plain(value) if isinstance(value, enum.Enum) else value


def _sequence_like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Return the items as a tuple if `value` is one; named tuples become lists."""
    return tuple(items) if type(value) is tuple else items


def _plain(value: Any) -> Any:
    """Return a text, number or bytes as the built-in type; anything else is returned unchanged."""
    if isinstance(value, str):
        return str.__str__(value)  # str(value) of another class can be any text
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    return value


def _is_space(value: Any) -> bool:
    return hasattr(value, "contains") and hasattr(value, "sample") and not isinstance(value, type)


def refuse_objects(arguments: Any, key: str) -> None:
    """Refuse arguments of an environment that are not plain data, since another process needs them.

    Args:
        arguments: arguments with the objects themselves.
        key: dotted name of their setting.

    Raises:
        ConfigError: one is an object; the error names its key.
    """
    for name, text in _texts(without_objects(arguments, has_members=False), key):
        if is_local(text):
            raise not_importable(name, text)


def check_objects(arguments: Any, key: str) -> None:
    """Refuse arguments of an environment or a wrapper with the name of an object that is gone.

    Args:
        arguments: arguments, as the environment or the wrapper gets them.
        key: dotted name of their setting.

    Raises:
        ConfigError: there is one; the error names its key.
    """
    for name, text in _texts(arguments, key):
        if is_local(text):
            _local_object(text, name)


def import_path_of(thing: object) -> str | None:
    """Return the import path of a class or function; None if other processes can't import it."""
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    importable: Any = sys.modules.get(module)
    for part in name.split("."):
        importable = getattr(importable, part, None)
    # each access to a class method makes another, equal object
    is_importable = importable is thing or (inspect.ismethod(thing) and importable == thing)
    place = main_module_name() if module == "__main__" else module
    return f"{place}:{name}" if place and is_importable else None


def main_module_name() -> str | None:
    """Return the name by which other processes import the main script; None in a notebook or at a
    prompt.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    if spec is not None:  # python -m NAME
        return None if spec.name.rpartition(".")[2] == "__main__" else str(spec.name)
    name = os.path.splitext(os.path.basename(file or ""))[0]
    if not name.isidentifier():
        return None
    with contextlib.suppress(ImportError, ValueError, OSError):
        importable = importlib.util.find_spec(name)
        if importable is None or importable.origin is None:
            return None
        if os.path.samefile(importable.origin, str(file)):
            return name
    return None


def importable_place() -> str:
    """Return where other processes can import code from, after the words "at the top level"."""
    if main_module_name():
        return "of a module, or of the script that you run"
    return "of a module: a .py file that you import, or a script with a name such as my_script.py"


def is_below_guard() -> bool:
    """Return True if the main script runs its part below ``if __name__ == "__main__":``, which other
    processes leave out when they import it.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        is_of_script = frame.f_globals.get("__name__") == "__main__"
        if is_of_script and frame.f_code.co_name == "<module>":
            return any(
                frame.f_lineno in lines for lines in _guarded_lines(frame.f_code.co_filename)
            )
    return False


def _guarded_lines(file: str) -> list[range]:
    """Return the lines of a script that only the main script runs; none if it can't be read."""
    try:
        with open(file, encoding="utf-8") as script:
            tree = ast.parse(script.read())
    except (OSError, SyntaxError, ValueError):  # a notebook's cell, for example
        return []
    guards = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    return [range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1) for node in guards]


def import_module(name: str) -> ModuleType:
    """Return a module, imported if necessary; the main script is never run a second time.

    Raises:
        Exception: its code raised it.
    """
    if name in ("__main__", main_module_name()):
        return sys.modules["__main__"]
    outer = _importing.set(name)
    try:
        return importlib.import_module(name)
    finally:
        _importing.reset(outer)


def import_for(what: str, name: str, *, key: str, value: str) -> ModuleType:
    """Return a module that a setting needs.

    Args:
        what: beginning of the error message.
        name: name of the module.
        key: dotted name of the setting.
        value: value of the setting.

    Raises:
        ConfigError: the module is missing, or its code fails.
    """
    try:
        return import_module(name)
    except Exception as error:
        # a user's module can raise anything
        reason = f"{error!r:.500}"
        hint = ""
        if isinstance(error, ConfigError):
            reason = error.message.removesuffix(".")
            hint = error.hint
        elif isinstance(error, ImportError):
            hint = "Is it installed, or its folder on PYTHONPATH?"
        raise ConfigError(
            f"{what} importing {name!r} failed: {reason}.", key=key, value=value, hint=hint
        ) from error


def refuse_in_import(what: str) -> None:
    """Raise if the caller runs during an import for a setting, for example of a user's script in a
    worker.

    Raises:
        ConfigError: such an import is running.
    """
    module = _importing.get()
    if module:
        raise ConfigError(
            f"{module!r} {what} while it is imported for its definitions.",
            hint=(
                "Put code that only the script itself should run below: if __name__ == '__main__':"
            ),
        )


def not_importable(key: str, value: str) -> ConfigError:
    """Return the error for an object that other processes need but only this one knows."""
    name = value.removeprefix(_LOCAL).partition("#")[0]
    if _OF_ENVIRONMENTS.fullmatch(key):
        message = f"{key} is {name!r}, an object that other processes can't get."
        purpose = "makes the environment (env: module:make)"
        if "wrappers[" in key:
            purpose = "adds the wrapper (wrappers: [module:add])"
        hint = (
            f"Name a file, or a function that has the object and {purpose}; or keep everything in"
            " this process (num_workers: 0)."
        )
    else:
        message = (
            f"{key} is {name!r}, which only this process knows: other processes can't import it."
        )
        hint = (
            f"Define it by def or class at the top level {importable_place()}; or sample in this"
            " process with num_workers: 0."
        )
    return ConfigError(message, key=key, value=value, hint=hint)


def import_object(path: str, *, key: str) -> Any:
    """Return the object that a text names.

    Args:
        path: ``package.module:Name`` (the name can have dots) or ``this-program:Name``.
        key: dotted name of the setting, for errors.

    Raises:
        ConfigError: the path has another form, the module can't be imported, or it has no such
            name.
    """
    if is_local(path):
        return _local_object(path, key)
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(
            f"{key} is {path!r}, expected 'package.module:Name'.", key=key, value=path
        )
    owner: Any = import_for(f"{key} is {path!r}, but", module_name, key=key, value=path)
    for part in name.split("."):
        if not hasattr(owner, part):
            public_names = [attribute for attribute in vars(owner) if not attribute.startswith("_")]
            raise ConfigError(
                f"{key} is {path!r}, but {module_name!r} has no {name!r}.",
                key=key,
                value=path,
                hint=nearest(part, public_names).strip(),
            )
        owner = getattr(owner, part)
    return owner


def _local_name(thing: Any) -> Any:
    """Name an object that only this process knows; without a weak reference, return the object
    itself.
    """
    qualified = getattr(thing, "__qualname__", None)
    if not isinstance(qualified, str):  # an object can have any attributes
        qualified = type(thing).__qualname__
    with contextlib.suppress(TypeError):  # not every object allows weak references
        for name in _numbered(_LOCAL + qualified.rpartition(".")[2].strip("<>")):
            if name not in _for_good and _local.setdefault(name, thing) is thing:
                return name
    return thing


def _named_for_good(thing: Any) -> str:
    """Name an object without weak references, which is held from then on."""
    for name, named_thing in _for_good.items():
        if named_thing is thing:
            return name
    names = _numbered(_LOCAL + type(thing).__qualname__.rpartition(".")[2])
    name = next(name for name in names if name not in _local and name not in _for_good)
    _for_good[name] = thing
    return name


def _numbered(text: str) -> Iterator[str]:
    return chain([text], (f"{text}#{number}" for number in count(2)))


def _local_object(path: str, key: str) -> Any:
    thing = _local.get(path, _for_good.get(path))
    if thing is not None:
        return thing
    group = key.partition(".")[0]
    hint = f"Set {group} again, or use 'module:name' for something that can be imported."
    if _OF_ENVIRONMENTS.fullmatch(key):
        group = group.partition("[")[0]
        hint = f"Set {key} again, for example with Trainer.restore(path, {group}=...)."
    raise ConfigError(
        f"{key} is {path!r}, an object that existed only in the program that set it.",
        key=key,
        value=path,
        hint=hint,
    )


# Code of other users
# --------------------------------------------------------------------------------------------------


def code_named_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> text for all texts with a colon, at any depth: all import paths are
    among them.
    """
    values = {name: value for name, value in config.items() if name not in {*_NO_CODE, *_VARIABLES}}
    return {name: text for name, text in _texts(values, "") if ":" in text}


def foreign_code(owners: Mapping[int, Path], *configs: Mapping[str, Any]) -> str:
    """Return a warning about a config that another user wrote, to show before anything in it is
    imported.

    Args:
        owners: other users to whom its files and directories belong, as
            `aiorl.config.files.other_users` returns them.
        configs: its values, checked or not; a text in several of them is shown once.

    Returns:
        Lines of printable text; "" if there are no others, or if no code is named.
    """
    if not owners:
        return ""
    lines: dict[str, str] = {}
    for values in configs:
        for name, text in code_named_in(values).items():
            lines.setdefault(text, f"  {_printable(name)}: {text!r}")
    if not lines:
        return ""
    title = f"warning: {_whose(owners)}. Its config names code that takes effect with your rights:"
    return "\n".join([title, *lines.values()])


def left_out_text(owners: Mapping[int, Path], left_out: Mapping[str, Any]) -> str:
    """Return a warning that says which values of another user's config do not take effect.

    Args:
        owners: owners of its files and directories, as `aiorl.config.files.strangers` returns them.
        left_out: dotted key -> value.

    Returns:
        Lines of printable text; "" if no value is left out.
    """
    if not left_out:
        return ""
    title = (
        f"warning: {_whose(owners)}. These values are left out; set those that you want yourself:"
    )
    lines = [f"  {_printable(name)}: {value!r:.300}" for name, value in left_out.items()]
    return "\n".join([title, *lines])


def _whose(owners: Mapping[int, Path]) -> str:
    parts = " and ".join(
        f"{_printable(str(path))} belongs to {_user(uid)}" for uid, path in owners.items()
    )
    return f"{parts}, not to you"


def _texts(value: object, dotted: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield dotted, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{dotted}.{name}" if dotted else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{dotted}[{number}]")


def _printable(name: str) -> str:
    return name if name.isprintable() else repr(name)


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name!r}"
    except KeyError:
        return f"the user with id {uid}"


# Calls of the user's functions
# --------------------------------------------------------------------------------------------------


def check_takes(
    function: Callable[..., Any], what: str, key: str, /, *args: Any, **kwargs: Any
) -> None:
    """Check that a function accepts these arguments, without calling it.

    Args:
        function: function to be called later.
        what: its name in messages.
        key: setting that names it.
        *args: positional arguments, of which only the number counts.
        **kwargs: keyword arguments, of which only the names count.

    Raises:
        ConfigError: it does not accept them.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        arguments = list(kwargs)
        if args:
            arguments.insert(0, f"{len(args)} positional")
        raise ConfigError(
            f"{what} can't be called with {', '.join(arguments)}: {error}.",
            key=key,
            hint=f"Its signature is {signature}.",
        ) from error


def named_failures(
    function: Callable[..., Any], what: str, key: str, *, hint: str = ""
) -> Callable[..., Any]:
    """Wrap a user's function or class so that its errors become a ConfigError; the traceback is
    logged.

    Errors of aiorl, for example those of an environment that the function called, are not changed.

    Args:
        function: function or class of the user.
        what: its name in messages.
        key: setting that names it.
        hint: advice for the user.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AiorlError:
            raise
        except Exception as error:
            # a user's function can raise anything
            _log.exception("%s failed", what)
            raise ConfigError(f"{what} failed: {error!r:.500}", key=key, hint=hint) from error

    return call
