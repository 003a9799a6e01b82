"""Layers of settings, later ones on top: default < preset < file < argument; and the origin of each
value.

`load_config` merges them for a run. Printed and saved configs omit the values of environment
variables with names that look like secrets. When a saved config is loaded, these values come from
the learner's own environment.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiorl.config import Settings, deep_update, is_group, put_on_top, with_former_defaults
from aiorl.config.code import foreign_code, left_out_text, named
from aiorl.config.files import MAX_BYTES, other_users, read_config_file, read_with_owners, strangers
from aiorl.config.key import all_keys, as_written, by_group, decides_place, fact_of
from aiorl.config.presets import Preset, find_preset, named_preset
from aiorl.config.rllib_file import convert, is_rllib_file
from aiorl.config.yaml_text import dump_mapping, parse_yaml
from aiorl.errors import ConfigError
from aiorl.text import one_line

if TYPE_CHECKING:
    from aiorl.config.schema import CommonConfig

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
"""Name of the file with the effective config in a run directory."""
DEFAULT_ALGO = "ppo"
"""Algorithm of a config that names none."""
DEFAULT = "default"
"""Origin of values that no one sets."""
PRESET = "preset "
"""Prefix of the origin of a value that a preset sets; the preset's name follows."""
DERIVED = "derived"
"""Origin of sizes that follow from other values, which the user set."""
AUTO = "auto"
"""Placeholder for the preset of the algorithm and the environment, if there is one."""
WITHHELD = "<withheld>"
"""Placeholder in printed and saved configs for a value that looks like a secret."""

ConfigClassOf = Callable[[str], type["CommonConfig"]]
"""Function from the name of an algorithm to its config class; raises UnknownAlgorithmError for
unknown names."""

NOTED = re.compile(r"(?m)^#   (\S+): (.+)$")
"""Origin of a value in a saved config: the key, and the origin. Those of defaults are not noted."""
_ARGUMENT = "argument"
_SCHEDULE = "_schedule"
_SECRET = re.compile(r"token|secret|passw|credential|api_?key|access_?key|private", re.IGNORECASE)
_ENVIRONS = ("extra_python_environs_for_driver", "extra_python_environs_for_worker")
_MAX_WARNINGS = 50
"""Keys of one file that are warned of one by one."""
_OF_NEW_RUNS = ("init_from", "preset")
"""Keys that a resumed run can't have, because it continues with its own weights and settings."""


# Layers and origins
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one place.

    Attributes:
        values: settings, nested like the config.
        origin: origin of the settings, for the user.
        origins: more exact origins of single keys (dotted), such as file and line.
        is_file: True for a file; errors then name the line.
        is_record: True for the values of a whole run, to which a preset adds nothing.
        owners: users to whom the file that was read and its directory belong, as id -> path; empty
            without a file.
    """

    values: Settings
    origin: str = _ARGUMENT
    origins: Mapping[str, str] = field(default_factory=dict)
    is_file: bool = False
    is_record: bool = False
    owners: Mapping[int, Path] = field(default_factory=dict)

    def origin_of(self, key: str) -> str:
        """Return the origin of a dotted key's value."""
        return self.origins.get(key, self.origin)


def refuse_keys_of_new_runs(changes: Settings, run: str, instead: str) -> None:
    """Refuse changes of a run's config that only a new run can have.

    Args:
        changes: settings for a run that continues, nested like the config.
        run: path of the run, or of its checkpoint.
        instead: what the user can do to keep the setting.

    Raises:
        ConfigError: there is such a key; the error names it.
    """
    for name in _OF_NEW_RUNS:
        if changes.get(name) is not None:
            raise ConfigError(
                f"{name} is for new runs, and the one in {run} continues with its own weights and"
                " settings.",
                key=name,
                value=changes[name],
                hint=f"Leave it out, or {instead}.",
            )


def file_layer(path: Path) -> Layer:
    """Return the keys that a YAML file sets; an experiment file of RLlib is converted.

    Raises:
        ConfigError: the file can't be read, is not YAML, holds no mapping or sets a key twice.
    """
    content, owners = read_config_file(path)
    return replace(_layer_of(path, content), owners=owners)


def _layer_of(path: Path, content: bytes) -> Layer:
    """Return the keys that the content of a YAML file sets."""
    values, lines = parse_yaml(path, content)
    if is_rllib_file(values):
        values, lines, left_out = convert(values, lines)
        _log.warning("%s is an experiment file of rllib train, and its keys are converted", path)
        for name, reason in itertools.islice(left_out.items(), _MAX_WARNINGS):
            _log.warning("%s is left out. %s", name, reason)
        if len(left_out) > _MAX_WARNINGS:
            _log.warning("%d more keys of %s are left out", len(left_out) - _MAX_WARNINGS, path)
    origins = {key: f"{path}, line {line}" for key, line in lines.items()}
    return Layer(values, str(path), origins, is_file=True)


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the values of all layers, later ones on top."""
    return functools.reduce(put_on_top, (layer.values for layer in layers), {})


def without_overruled(layers: Sequence[Layer], keys: Set[str]) -> list[Layer]:
    """Return the layers without schedules of settings that a later layer sets; a schedule would
    override its value.

    Args:
        layers: layers of one config.
        keys: all keys of the config.
    """
    remaining: list[Layer] = []
    overruled: set[str] = set()
    for layer in reversed(layers):
        values = {name: value for name, value in layer.values.items() if name not in overruled}
        remaining.append(replace(layer, values=values))
        schedules = {f"{name}{_SCHEDULE}" for name in layer.values} & keys
        overruled |= schedules - layer.values.keys()  # a layer can set both
    return remaining[::-1]


@contextlib.contextmanager
def located(layers: Sequence[Layer]) -> Iterator[None]:
    """Prefix the message of a ConfigError with file and line if the value at fault is from a
    file.
    """
    try:
        yield
    except ConfigError as error:
        for layer in reversed(layers):
            if error.key not in dict(_items(layer.values)):
                continue
            if layer.is_file:
                error.message = f"{layer.origin_of(error.key)}: {error.message}"
            break
        raise


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins of a config's values. Any two are equal, so that configs are compared by value.

    Attributes:
        of_keys: dotted key of each value except mappings -> its origin.
    """

    of_keys: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Origins:
        """Return the origins of values merged from layers, later ones on top."""
        of_keys: dict[str, str] = {}
        groups: set[str] = set()
        for layer in layers:
            for key, value in _items(layer.values):
                if is_group(value):
                    groups.add(key)
                    of_keys.pop(key, None)
                    continue
                if key in groups:  # the value replaces a mapping
                    groups.remove(key)
                    for name in [name for name in of_keys if name.startswith(f"{key}.")]:
                        del of_keys[name]
                of_keys[key] = layer.origin_of(key)
        return cls(of_keys)

    def origin_of(self, key: str, *, has_default: bool = False) -> str:
        """Return the origin of a dotted key's value, or several if its parts come from several
        places.

        Args:
            key: dotted key.
            has_default: the value is a mapping, and parts that are not set keep their defaults.
        """
        origins = self._parts(key)
        is_mixed = has_default and key not in self.of_keys
        if is_mixed or not origins:
            origins = [DEFAULT, *origins]
        return ", ".join(dict.fromkeys(origins))

    def users_keys(self) -> set[str]:
        """Return the top-level keys that a user sets, in full or in part."""
        return {key.partition(".")[0] for key, origin in self.of_keys.items() if _is_users(origin)}

    def users_values(
        self, values: Settings, defaults: Settings, prefix: str = ""
    ) -> dict[str, Any]:
        """Return the values that a user sets, and those without an origin that differ from their
        defaults.
        """
        users_values: dict[str, Any] = {}
        for name, value in values.items():
            default = defaults.get(name)
            if is_group(value) and is_group(default):
                inner = self.users_values(value, default, f"{prefix}{name}.")
                if inner:
                    users_values[name] = inner
                continue
            origins = self._parts(f"{prefix}{name}")
            is_ours = any(origin == DERIVED or origin.startswith(PRESET) for origin in origins)
            if any(map(_is_users, origins)) or (value != default and not is_ours):
                users_values[name] = value
        return users_values

    def _parts(self, key: str) -> list[str]:
        return [
            origin
            for name, origin in self.of_keys.items()
            if name == key or name.startswith(f"{key}.")
        ]

    def as_layer(self, values: Settings) -> Layer:
        """Return all of a config's values with their origins, as a record."""
        return Layer(values, DEFAULT, self.of_keys, is_record=True)


def _items(values: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key and its value; the keys inside a mapping follow it."""
    for name, value in values.items():
        yield f"{prefix}{name}", value
        if is_group(value):
            yield from _items(value, f"{prefix}{name}.")


def _is_users(origin: str) -> bool:
    return origin not in (DEFAULT, DERIVED) and not origin.startswith(PRESET)


# Layers on top of a preset
# --------------------------------------------------------------------------------------------------


def algo_of(layers: Sequence[Layer]) -> str:
    """Return the algorithm that layers of settings name, directly or through a preset; otherwise
    the default.

    Raises:
        ConfigError: the preset doesn't exist.
    """
    values = merged(layers)
    if values.get("algo") is not None:
        return str(named(values["algo"]))
    name = _name_in(layers)
    if name in (None, AUTO):
        return DEFAULT_ALGO
    return named_preset(str(name)).algo


def with_preset(layers: Sequence[Layer], algo: str, keys: Set[str]) -> list[Layer]:
    """Return the layers on top of the preset that they name; for ``auto``, another layer names the
    preset found.

    Args:
        layers: layers of one config.
        algo: algorithm of the config.
        keys: all keys of the config; a layer that sets them all needs no preset, so the preset may
            be gone.

    Raises:
        ConfigError: there is no such preset, or it is for another algorithm.
    """
    name = _name_in(layers, keys)
    env = merged(layers).get("env")
    if name is None or (name == AUTO and env is None):
        return list(layers)
    if name == AUTO:
        return _with_best_preset(layers, algo, str(env))
    preset = named_preset(name)
    if preset.algo != algo.lower():
        raise ConfigError(
            f"preset {name} is for {preset.algo}, not for {algo}.",
            key="preset",
            value=name,
            hint=(
                f"Set algo: {preset.algo}, or choose another preset: `aiorl train --help-presets`."
            ),
        )
    if env is not None and not preset.suits(str(env)):
        _log.warning(
            "preset %s is made for %s, not for %s", preset.name, " and ".join(preset.envs), env
        )
    _warn_if_overruled(preset, layers)
    return [_layer_of_preset(preset), *layers]


def _with_best_preset(layers: Sequence[Layer], algo: str, env: str) -> list[Layer]:
    asking = next(layer for layer in reversed(layers) if "preset" in layer.values)
    origin = f"{asking.origin_of('preset')} ({AUTO})"
    preset = find_preset(algo.lower(), env)
    if preset is None:
        _log.warning(
            "there is no preset for %s in %s, so the defaults of the algorithm are used", algo, env
        )
        return [*layers, Layer({"preset": None}, origin)]
    _warn_if_overruled(preset, layers)
    return [_layer_of_preset(preset), *layers, Layer({"preset": preset.name}, origin)]


def _layer_of_preset(preset: Preset) -> Layer:
    return Layer(preset.values(), f"{PRESET}{preset.name}")


def _name_in(layers: Sequence[Layer], keys: Set[str] | None = None) -> str | None:
    """Return the preset that layers ask for; None if no preset is needed."""
    layer = next((layer for layer in reversed(layers) if "preset" in layer.values), None)
    name = None if layer is None else layer.values["preset"]
    if layer is None or not isinstance(name, str):
        return None
    is_whole = layer.is_record or (keys is not None and keys <= layer.values.keys())
    return None if is_whole and name != AUTO else name


def _warn_if_overruled(preset: Preset, layers: Sequence[Layer]) -> None:
    """Warn if a config file, such as a printed one, overrides a whole preset; configs of runs are
    exempt.
    """
    settings = {name: value for name, value in preset.settings.items() if name != "algo"}
    names = dict(_items(settings)).keys()
    for layer in layers:
        if not layer.is_file or layer.is_record:
            continue
        sets_all = names <= dict(_items(layer.values)).keys()
        if sets_all and deep_update(layer.values, settings) != layer.values:
            _log.warning(
                "preset %s has no effect, because %s sets all of its keys and takes precedence:"
                " remove the preset's keys from the file, or give env and preset without the file",
                preset.name,
                layer.origin,
            )


# Secrets
# --------------------------------------------------------------------------------------------------


def without_secrets(values: Settings) -> dict[str, Any]:
    """Return a config's values, with the values of environment variables that look like secrets
    withheld.
    """
    public = dict(values)
    for group in _ENVIRONS:
        if group in values:
            secrets = dict.fromkeys(filter(_SECRET.search, values[group]), WITHHELD)
            public[group] = {**values[group], **secrets}
    return public


def restore_withheld(values: dict[str, Any]) -> None:
    """Fill in the withheld values from the environment variables of this process.

    Raises:
        ConfigError: a variable is not set here; the error names it.
    """
    for group in _ENVIRONS:
        variables = values.get(group)
        if not isinstance(variables, dict):
            continue
        for name, text in variables.items():
            if text != WITHHELD:
                continue
            if name not in os.environ:
                raise ConfigError(
                    f"{group}.{name} was withheld when this config was saved, and {name} is not set"
                    " here.",
                    key=f"{group}.{name}",
                    hint=f"Set the environment variable {name}.",
                )
            variables[name] = os.environ[name]


# Configs of other users
# --------------------------------------------------------------------------------------------------


def without_place(
    values: Settings, config_class: type[CommonConfig]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leave out where a run listens, whom it admits, and what it opens and writes: see `place` of
    `key`.

    Args:
        values: values of another user's config, nested like the config, checked or not. Not
            modified.
        config_class: class that has the keys.

    Returns:
        The other values, and those left out that are not defaults, by dotted key.
    """
    remaining: dict[str, Any] = {}
    left_out: dict[str, Any] = {}
    fields = config_class.model_fields
    places = {name for name, field in fields.items() if decides_place(field)}
    for name, value in values.items():
        if name in places:
            if value != fields[name].get_default(call_default_factory=True):
                left_out[name] = value
            continue
        # keys that have no effect without one that is left out go with it
        if name not in fields or fact_of(fields[name], "needs") not in places:
            remaining[name] = value
    changes = remaining.get("evaluation_config")
    if isinstance(changes, Mapping):
        left_out |= {
            f"evaluation_config.{name}": changes[name] for name in changes if name in places
        }
        allowed = {name: value for name, value in changes.items() if name not in places}
        remaining["evaluation_config"] = allowed
    return remaining, left_out


def _of_this_user(
    layer: Layer, config_class: type[CommonConfig], warn: Callable[[str], None]
) -> Layer:
    """Return a layer without the values that only this user or root sets, if its file belongs to
    others.
    """
    owners = strangers(layer.owners)
    if not owners:
        return layer
    values, left_out = without_place(layer.values, config_class)
    if left_out:
        warn(left_out_text(owners, left_out))
    return replace(layer, values=values)


def own_file_layer(path: Path, config_class: type[CommonConfig]) -> Layer:
    """Return the keys that a YAML file sets; those that only this user sets are left out of another
    user's file.

    Raises:
        ConfigError: see `file_layer`.
    """
    return _of_this_user(file_layer(path), config_class, _log.warning)


# The config of a run
# --------------------------------------------------------------------------------------------------


def load_config(
    config_class_of: ConfigClassOf,
    *,
    file: Path | None = None,
    settings: Settings | None = None,
    overrides: Settings | None = None,
    warn: Callable[[str], None] = _log.warning,
    env_hint: str = "Give one: --env CartPole-v1",
) -> CommonConfig:
    """Return the effective config, an instance of its algorithm's config class; a user's own
    algorithm is imported.

    Args:
        config_class_of: function from the name of an algorithm to its config class.
        file: YAML file of keys, or None. With `resume`, the run directory's own config is read
            before it.
        settings: keys from a config in Python, nested like the config; they take precedence over
            the file.
        overrides: keys from the command line, nested like the config; they take precedence over all
            others.
        warn: function called with a warning about code that another user's config or file names
            (see `foreign_code`), before any of it is imported, and with one about values that are
            left out (see `without_place`).
        env_hint: advice if there is no environment.

    Raises:
        ConfigError: a setting is wrong; the error names file and line if a file is at fault.
    """
    on_top = [Layer(settings or {}), Layer(overrides or {})]
    changes = merged(on_top)
    layers: list[Layer] = []
    resume = None if changes.get("resume") is None else str(changes["resume"])
    algo = ""
    if resume is not None:
        refuse_keys_of_new_runs(changes, resume, "leave out --resume")
        layers.append(_resumed(Path(resume)))
        algo = algo_of(layers)
    if file is not None:
        layers.append(file_layer(file))
    if resume is not None:  # over the file, which can name another one
        layers.append(Layer({"run_dir": resume}))
    layers += on_top
    values = merged(layers)
    owners: dict[int, Path] = {}
    for layer in reversed(layers):
        owners.update(layer.owners)
    with located(layers):
        if resume is not None:
            _check_fixed(values, "run_dir", resume, resume)
            _check_fixed(values, "algo", algo, resume)
        warning = foreign_code(other_users(owners), values)
        if warning:
            warn(warning)
        config_class = config_class_of(algo_of(layers))
    layers = [_of_this_user(layer, config_class, warn) for layer in layers]
    config = config_class.from_layers(layers)
    with located(layers):
        if config.env is None:
            raise ConfigError("There is no environment to train in.", key="env", hint=env_hint)
    return config


def _check_fixed(values: Settings, name: str, fixed: str, resume: str) -> None:
    """Refuse another value for a key that a resumed run keeps.

    Args:
        values: merged settings, nested like the config.
        name: name of the key.
        fixed: value that the run has.
        resume: directory of the run.

    Raises:
        ConfigError: the settings have another one.
    """
    value = values.get(name)
    if value is None or os.path.normpath(str(value)) == os.path.normpath(fixed):
        return
    option = f"--{name.replace('_', '-')}"
    raise ConfigError(
        f"{name} can't be {value} here: the run in {resume} continues with {name} {fixed}.",
        key=name,
        value=value,
        hint=(
            f"Leave {option} out, or begin a new run like it: --config"
            f" {Path(resume) / CONFIG_FILE} {option} {value}"
        ),
    )


def dump_yaml(config: CommonConfig) -> str:
    """Return all keys of the effective config as YAML that loads back equal; secrets are
    withheld.
    """
    plain = without_secrets(config.to_dict())
    values = {name: plain[name] for name, _ in by_group(type(config).model_fields.items())}
    return dump_mapping(values)


def render_effective(config: CommonConfig) -> str:
    """Return a line for each key with its name, the origin of its value, and the value; secrets are
    withheld.
    """
    rows = _effective(config)
    names, origins, _ = zip(*rows, strict=True)
    name_width = max(map(len, names))
    origin_width = max(map(len, origins))
    lines = [f"{name:{name_width}}  {origin:{origin_width}}  {text}" for name, origin, text in rows]
    return "\n".join(lines) + "\n"


def _effective(config: CommonConfig) -> list[tuple[str, str, str]]:
    """Return name, origin and value of each key; secrets are withheld."""
    values = without_secrets(config.to_dict())
    names = [name for name, _ in by_group(all_keys(type(config)).items())]
    for group in ("model", "multiagent"):  # they can have more keys, which only the user knows
        names += [f"{group}.{name}" for name in values[group]]
    rows = []
    for name in dict.fromkeys(names):
        value = functools.reduce(dict.__getitem__, name.split("."), values)
        rows.append((name, config.origin_of(name), as_written(value)))
    return rows


def save_config(config: CommonConfig, run_dir: Path) -> Path:
    """Write the effective config to the run directory, for users and for `--resume`, with the
    origins as comments.

    Raises:
        ConfigError: the file can't be written.
    """
    path = run_dir / CONFIG_FILE
    temporary = run_dir / f"{CONFIG_FILE}.tmp"
    text = dump_yaml(config.model_copy(update={"resume": None}))
    try:
        notes = [
            f"#   {name}: {one_line(origin, 300)}\n"
            for name, origin in _origins_to_save(config, path).items()
            if origin != DEFAULT and name != "resume"
        ]
        notes.insert(0, "\n# Origins of values that are not defaults:\n")
        temporary.write_text("".join([text, *notes]), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror}.", key="run_dir", value=str(run_dir)
        ) from error
    return path


def _origins_to_save(config: CommonConfig, path: Path) -> dict[str, str]:
    """Return key -> origin, as it is written to the file at `path`.

    Values that a resumed run has from this file keep the origins that are noted in it, because its
    lines are overwritten.
    """
    origins = {name: origin for name, origin, _ in _effective(config)}
    if not config.resume or not path.exists():
        return origins
    noted = dict(NOTED.findall(path.read_text("utf-8")))
    if not noted:
        return origins
    line_of_run = f"{Path(config.resume) / CONFIG_FILE}, line "
    return {
        name: noted.get(name, DEFAULT) if line_of_run in origin else origin
        for name, origin in origins.items()
    }


def _resumed(run_dir: Path) -> Layer:
    """Return the config of the run to resume."""
    path = run_dir / CONFIG_FILE
    try:
        content, owners = read_with_owners(path, max_bytes=MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        fault = f"it holds no {CONFIG_FILE}" if run_dir.is_dir() else "there is no such directory"
        raise ConfigError(
            f"{run_dir} is not a run directory: {fault}.",
            key="resume",
            value=str(run_dir),
            hint="Give the directory that the run named at its end.",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}.", key="resume", value=str(run_dir)
        ) from error
    layer = _layer_of(path, content)
    return replace(layer, values=with_former_defaults(layer.values), is_record=True, owners=owners)
