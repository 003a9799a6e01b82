"""Environments by name: registered names, Gymnasium ids, import paths and old ``gym:ID``
environments.

A name can be, in this order:

* a name given to ``register_env`` in this process;
* ``gym:ID`` or ``gym:module:ID``, an environment of the old ``gym`` package (extra ``gym``);
* ``pettingzoo:MODULE``, a multi-agent environment (extra ``pettingzoo``);
* ``envpool:TASK``, an environment whose copies step together in C++ (extra ``envpool``);
* ``package.module:Name``, a class or function. A subclass of ``gymnasium.Env`` gets the environment
  config as keyword arguments, or as one mapping if its first parameter is named ``config``,
  ``env_config``, ``context`` or ``env_context``. A function gets the ``EnvContext``;
* ``module:name``, a name given to ``register_env``, or a Gymnasium id, that exists once ``module``
  is imported;
* a Gymnasium id; Atari games (``ALE/Pong-v5``) need the extra ``atari``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from aiorl.config import copied
from aiorl.config.code import (
    import_for,
    import_object,
    import_path_of,
    is_below_guard,
    is_local,
    main_module_name,
    named,
    not_importable,
)
from aiorl.env.checks import raise_env_fault
from aiorl.env.old_gym import adopted
from aiorl.errors import AiorlError, ConfigError, UnknownEnvError, nearest
from aiorl.process.imports import extra_with, install_command, needed_by, python_path

_CONTEXT_PARAMETERS = frozenset({"config", "env_config", "context", "env_context", "ctx"})
CLIENT_ENV = "external"
"""Name of the environment that clients play."""
_SOURCES = {
    "gym": "aiorl.env.old_gym:old_gym_creator",
    "pettingzoo": "aiorl.env.pettingzoo:pettingzoo_creator",
    "envpool": "aiorl.env.envpool:envpool_creator",
    CLIENT_ENV: "aiorl.serving.external:client_env",
}
"""Prefix of a name -> import path of a function that maps a whole name to the function that makes
the environments."""

_FOUND = 10
"""Exit status of the process in `_who_registers` if Gymnasium has the id, one more if the module
has; Python's own statuses are lower."""
registered_creators: dict[str, Callable[[EnvContext], Any]] = {}
_only_here: set[str] = set()
"""Names that the main script has registered in a part that other processes leave out."""


class EnvContext(dict[str, Any]):
    """Config of an environment, and the place where it is made.

    Attributes:
        worker_index: slot of the worker, 0 = local.
        vector_index: index of the copy in that worker, from 0.
        remote: True if the copy lives in its own process.
        num_envs: number of copies that the worker needs, for objects that hold all copies.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        worker_index: int = 0,
        vector_index: int = 0,
        remote: bool = False,
        num_envs: int = 1,
    ) -> None:
        """Copy the config, including nested dicts and lists, and store the place.

        Args:
            env_config: the environment's config; None is an empty one.
            worker_index: slot of the worker, 0 = local.
            vector_index: index of the copy in that worker, from 0.
            remote: True if the copy lives in its own process.
            num_envs: number of copies that the worker needs.
        """
        super().__init__(copied(env_config or {}))
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.remote = remote
        self.num_envs = num_envs

    def copy_with_overrides(
        self, env_config: Mapping[str, Any] | None = None, **place: Any
    ) -> EnvContext:
        """Return a copy with another config or place; omitted and None values are inherited.

        Args:
            env_config: config of the copy.
            **place: attributes of the copy, such as ``vector_index=1``.
        """
        changes = {name: value for name, value in place.items() if value is not None}
        return EnvContext(self if env_config is None else env_config, **{**vars(self), **changes})


EnvSource = str | type[Any] | Callable[[EnvContext], Any]
"""Name of an environment, or a class or function that makes it."""


class EnvCreator:
    """Function that makes copies of one environment.

    Attributes:
        env_id: its name, for messages.
        gym_id: its Gymnasium id, or None.
    """

    def __init__(
        self,
        env_id: str,
        create: Callable[[EnvContext], Any],
        *,
        gym_id: str | None = None,
    ) -> None:
        """Store the name and the function that makes the environment."""
        self.env_id = env_id
        self.gym_id = gym_id
        self._create = create

    def __call__(self, context: EnvContext) -> Any:
        """Make a new environment.

        Raises:
            EnvError: the environment's own code raised.
            AiorlError: the environment cannot be made; the message gives the reason.
        """
        try:
            return adopted(self._create(context))
        except AiorlError:
            raise
        except Exception as error:
            raise_env_fault(
                self.env_id,
                "its constructor",
                error,
                index=context.vector_index,
                step=-1,
            )

    @property
    def gym_spec(self) -> EnvSpec | None:
        """Gymnasium's registry entry; None if the environment has no Gymnasium id."""
        return None if self.gym_id is None else gymnasium.spec(self.gym_id)


def register_env(name: str, creator: Callable[[EnvContext], Any]) -> None:
    """Make ``name`` an environment of this process; a later registration replaces an earlier one.

    Other processes, such as the workers of a training run, find the creator by its import path.
    They can also use the name as ``module:name`` if the module calls this function when it is
    imported.

    Args:
        name: name for use in configs.
        creator: function that takes an EnvContext and returns a new environment.

    Raises:
        ConfigError: the name is not a string or is empty, or the creator cannot be called.
    """
    if not name or not isinstance(name, str) or not callable(creator):
        raise ConfigError(
            f"environment {name!r} by {creator!r}: expected a name, which is a string, and a"
            " function.",
            key="env",
            value=name,
        )
    registered_creators[name] = creator
    _only_here.discard(name)
    if is_below_guard():
        _only_here.add(name)


def name_elsewhere(env: EnvSource) -> str:
    """Return the name by which other processes make the same environment.

    A name registered in this process becomes the import path of its creator, or ``module:name``
    with the creator's module. An id that is not one of Gymnasium's own becomes ``module:id``, with
    the environment's module if that one registers the id, and else with the script being run.

    Raises:
        ConfigError: there is no such name.
    """
    name = str(named(env.env_id if isinstance(env, EnvCreator) else env))
    module = ""
    if name in registered_creators:
        creator = registered_creators[name]
        path = import_path_of(creator)
        if path is not None:
            return path
        if name in _only_here:
            raise ConfigError(
                f"environment {name!r} is registered below if __name__ == '__main__':, which other"
                " processes, such as workers, leave out when they import this script.",
                key="env",
                value=name,
                hint=(
                    "Register it above that line, or name a function that is defined above it:"
                    " env=make_env."
                ),
            )
        if "<locals>" not in getattr(creator, "__qualname__", "<locals>"):
            module = creator.__module__
    elif name in gymnasium.registry and not is_atari_id(name):
        entry = gymnasium.registry[name].entry_point
        module = getattr(entry, "__module__", "")
        if isinstance(entry, str):
            module = entry.partition(":")[0]
        script = main_module_name()
        registrar = "" if module in ("__main__", script) else _who_registers(name, module)
        if registrar == "gymnasium":
            return name
        module = registrar or script or module
    elif not is_local(name):
        return name
    if module == "__main__":
        module = main_module_name() or ""
    if not module:
        raise not_importable("env", name)
    return f"{module}:{name}"


@functools.cache
def _who_registers(gym_id: str, module: str) -> str:
    """Return the module whose import registers an id with Gymnasium in another process:
    "gymnasium", this one or "".

    Packages of environments register theirs when Gymnasium is imported, or only when they are
    imported themselves.
    """
    if f'"{gym_id}"' in inspect.getsource(gymnasium.envs):  # one of Gymnasium's own
        return "gymnasium"
    code = f"""
import sys
from aiorl.config.code import import_module
from aiorl.process.imports import find_modules_here
find_modules_here()
for status, module in enumerate(["gymnasium", {module!r}]):
    import_module(module)
    if {gym_id!r} in sys.modules["gymnasium"].registry:
        sys.exit(status + {_FOUND})
"""
    process = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **python_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    return {_FOUND: "gymnasium", _FOUND + 1: module}.get(process.returncode, "")


def resolve_env(env: EnvSource) -> EnvCreator:
    """Return the function that makes copies of the named environment.

    Args:
        env: a name (see the module's docstring), a class, or a function that makes environments.

    Raises:
        UnknownEnvError: the name is unknown; the message suggests similar names.
        ConfigError: the name is valid, but a package is missing or an import fails.
    """
    if isinstance(env, EnvCreator):
        return env
    if not isinstance(env, str):
        if not callable(env):
            raise UnknownEnvError(
                f"env is {env!r}, expected a name, a class or a function.", key="env"
            )
        return EnvCreator(named(env), _caller_of(env))
    if is_local(env):
        return EnvCreator(env, _caller_of(import_object(env, key="env")))
    if env in registered_creators:
        return EnvCreator(env, registered_creators[env])
    source = _SOURCES.get(env.partition(":")[0])
    if source is not None:
        module_name, _, function = source.partition(":")
        # those of other sources are imported later, by their functions
        with needed_by(f"environment {env!r}", "the packages of clients", "serve", key="env"):
            module = importlib.import_module(module_name)
        return EnvCreator(env, getattr(module, function)(env))
    if ":" in env:
        return _by_path(env)
    return _gymnasium_id(env, env)


def unknown_env(
    name: str,
    what: str = "",
    *,
    part: str,
    valid: Iterable[str],
    otherwise: str = "",
) -> UnknownEnvError:
    """Return the error for an unknown name.

    Args:
        name: the name given.
        what: the fault, as text to follow the name.
        part: the part of the name that was looked up.
        valid: the valid names; the hint suggests the most similar ones.
        otherwise: hint if no valid name is similar.
    """
    return UnknownEnvError(
        f"unknown environment {name!r}{what}.",
        key="env",
        value=name,
        hint=nearest(part, valid).strip() or otherwise,
    )


def loaded_entry(entry: object) -> Callable[..., Any]:
    """Return the function of an entry point in Gymnasium's registry; a name is imported.

    Raises:
        ImportError: a required package is not installed.
    """
    if callable(entry):
        return entry
    return load_env_creator(str(entry))


def _gymnasium_id(name: str, gym_id: str) -> EnvCreator:
    if is_atari_id(gym_id) and (gym_id not in gymnasium.registry or "ale_py" in sys.modules):
        _import_atari(name)
    elif gym_id not in gymnasium.registry and importlib.util.find_spec("ale_py") is not None:
        with contextlib.suppress(ConfigError):  # the id of a game need not look like one
            _import_atari(name)
    try:
        with warnings.catch_warnings():
            # Gymnasium warns about newer versions, but the config names this one.
            warnings.simplefilter("ignore")
            spec = gymnasium.spec(gym_id)
    except gymnasium.error.Error as error:
        raise unknown_env(
            name,
            part=gym_id,
            valid=[*registered_creators, *gymnasium.registry],
            otherwise=(
                "Use a Gymnasium id, 'package.module:Name', or 'module:name' for a name that the"
                " module passes to register_env."
            ),
        ) from error

    _check_version(name, spec)

    def create(context: EnvContext) -> Any:
        try:
            return gymnasium.make(spec, disable_env_checker=True, **context)
        except gymnasium.error.DependencyNotInstalled as error:
            raise _lacks_packages(name, error) from error
        except TypeError as error:
            if re.search("unexpected keyword argument|missing .* required", str(error)):
                # Arguments of gymnasium.make itself are not settings of the environment's
                # constructor.
                make_parameters = inspect.signature(gymnasium.make).parameters
                settings = {
                    key: value
                    for key, value in {**spec.kwargs, **context}.items()
                    if key not in make_parameters
                }
                _check_settings(loaded_entry(spec.entry_point), EnvContext(settings))
            raise

    return EnvCreator(name, create, gym_id=gym_id)


def _lacks_packages(name: str, error: gymnasium.error.DependencyNotInstalled) -> ConfigError:
    """Return the error for an environment whose packages are not installed.

    Gymnasium names an extra of its own, which can build packages from source and changes versions.
    If aiorl has an extra with the same packages, that one is named instead.
    """
    extra_of_gymnasium = re.search(r"gymnasium\[[\w-]+\]", str(error))
    extra = extra_with(extra_of_gymnasium[0]) if extra_of_gymnasium else ""
    if not extra:
        return ConfigError(
            f"environment {name!r} needs more packages: {error}", key="env", value=name
        )
    cause, _, _ = str(error).partition(",")
    return ConfigError(
        f"environment {name!r} needs more packages: {cause}.",
        key="env",
        value=name,
        hint=f"Install them with: {install_command(extra)}",
    )


def _check_version(name: str, spec: EnvSpec) -> None:
    """Refuse an old version that Gymnasium lists but no longer has.

    Raises:
        UnknownEnvError: the version is old; the hint names the newest one.
    """
    entry_name = getattr(spec.entry_point, "__name__", "")
    # Gymnasium has a placeholder in place of an old version, which raises when it is called.
    if not entry_name.startswith("_raise"):
        return
    full_name = (spec.namespace, spec.name)
    versions = [
        other for other in gymnasium.registry.values() if (other.namespace, other.name) == full_name
    ]
    newest = max(versions, key=lambda version: version.version or 0)
    raise UnknownEnvError(
        f"environment {name!r} is an old version that Gymnasium no longer has.",
        key="env",
        value=name,
        hint=f"Use {newest.id!r}.",
    )


def is_atari_id(gym_id: str) -> bool:
    """Return True if a Gymnasium id is that of an Atari game."""
    if gym_id.startswith("ALE/") or "NoFrameskip-v" in gym_id:
        return True
    spec = gymnasium.registry.get(gym_id)
    return spec is not None and str(spec.entry_point).startswith("ale_py.")


def _import_atari(name: str) -> None:
    with needed_by(f"environment {name!r}", "the Atari emulator", "atari", key="env", value=name):
        ale_py = importlib.import_module("ale_py")
    gymnasium.register_envs(ale_py)
    # Otherwise it prints a banner for each environment.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def _by_path(name: str) -> EnvCreator:
    module_name, _, attribute = name.partition(":")
    is_module_name = all(part.isidentifier() for part in module_name.split("."))
    if not is_module_name or module_name.endswith(".py"):
        raise UnknownEnvError(
            f"environment {name!r}: {module_name!r} is not a module name; expected the form"
            " 'package.module:Name'.",
            key="env",
            value=name,
            hint=(
                "Leave out folders and '.py', as in 'my_envs:MyEnv'. Folders on PYTHONPATH are"
                " searched."
            ),
        )
    try:
        module = import_for(f"environment {name!r}:", module_name, key="env", value=name)
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
            raise
        if not f"{module_name}.".startswith(f"{cause.name}."):
            raise  # a module that this one imports is missing
        raise UnknownEnvError(
            f"environment {name!r}: there is no module {cause.name!r} to import.",
            key="env",
            value=name,
            hint=error.hint,
        ) from cause
    creator: Any = module
    for part in attribute.split("."):
        creator = getattr(creator, part, None)
        if creator is None:
            break
    if callable(creator):
        return EnvCreator(name, _caller_of(creator))
    if attribute in registered_creators:
        return EnvCreator(name, registered_creators[attribute])
    if attribute in gymnasium.registry:
        return _gymnasium_id(name, attribute)
    public_names = [key for key in vars(module) if not key.startswith("_")]
    raise unknown_env(
        name,
        f": module {module_name!r} has no {attribute!r}, which is also neither a name given to"
        " register_env nor a Gymnasium id",
        part=attribute,
        valid=[*registered_creators, *public_names],
    )


def _caller_of(creator: Callable[..., Any]) -> Callable[[EnvContext], Any]:
    """Return a function that takes an EnvContext and calls a class or function with its proper
    arguments.
    """
    try:
        parameters = list(inspect.signature(creator).parameters.values())
    except (TypeError, ValueError):
        return creator
    if parameters and (not inspect.isclass(creator) or parameters[0].name in _CONTEXT_PARAMETERS):
        return creator

    def create(context: EnvContext) -> Any:
        _check_settings(creator, context)
        return creator(**context)

    return create


def _check_settings(made_by: Callable[..., Any], context: EnvContext) -> None:
    """Refuse settings for which a class or function has no parameters, and require those without
    defaults.

    Raises:
        ConfigError: a setting is unknown or missing; the message names it and the valid ones.
    """
    try:
        parameters = inspect.signature(made_by).parameters.values()
    except (TypeError, ValueError):  # some classes written in C have no signature
        return
    name = getattr(made_by, "__name__", repr(made_by))
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    is_required = {
        parameter.name: parameter.default is parameter.empty
        for parameter in parameters
        if parameter.kind in by_name
    }
    lacking = [key for key in is_required if is_required[key] and key not in context]
    if lacking:
        raise ConfigError(
            f"{name} needs {', '.join(lacking)}, which env_config lacks.",
            key=f"env_config.{lacking[0]}",
            hint=f"Set it: --env-config.{lacking[0].replace('_', '-')} VALUE",
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    unknown = [key for key in context if key not in is_required]
    if unknown:
        hint = nearest(unknown[0], is_required).strip()
        if unknown[0] == "render_mode":
            hint = "To be filmed or shown, it has to take render_mode and to have a method render."
        raise ConfigError(
            f"{name} has no setting {unknown[0]!r}; its constructor takes:"
            f" {', '.join(is_required) or 'none'}.",
            key=f"env_config.{unknown[0]}",
            value=context[unknown[0]],
            hint=hint,
        )
