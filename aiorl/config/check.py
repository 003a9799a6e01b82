"""Refusing unknown keys and wrong values, in one plain sentence that names the key, with hints for other libraries.

`other_names.yaml` lists the names that other libraries use, and the names here.
"""

from __future__ import annotations

import functools
import importlib.resources
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from aiorl.config.files import parse_yaml
from aiorl.config.key import all_keys, expected, sub_model, unit_of
from aiorl.errors import ConfigError, nearest
from aiorl.text import shortened

_log = logging.getLogger(__name__)

FREE_SUB_DICTS = ("tf_session_args", "env_config", "model", "optimizer", "multiagent", "evaluation_config")
"""Below these, unknown keys are allowed at any depth."""

_OPEN = (
    *FREE_SUB_DICTS, "extra_python_environs_for_driver", "extra_python_environs_for_worker", "input", "callbacks",
    "exploration",
)  # fmt: skip
"""Those, and the ones with keys that only the user can know."""

_TYPE_FAULTS = ("_type", "_parsing", "_from_float", "literal_error")
"""Ends of pydantic's codes for values of a wrong kind; for these we say what kind was wanted."""

_MAX_BITS = 4096
"""Python refuses to make text of numbers of more than 4,300 digits."""

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

_ALL_KEYS = "`python -m aiorl.learner --help-config` lists all keys."


class Rule(NamedTuple):
    """A rule on keys that must go together.

    Attributes:
        key: the key that should change; dotted.
        is_broken: returns whether a config breaks the rule.
        message: says so; a format with the config as 0 and the key's value as 1.
        hint: what to do instead; likewise.
    """

    key: str
    is_broken: Callable[[Any], object]
    message: str
    hint: str = ""


COMMON_RULES = (
    Rule(
        "exploration", lambda config: config.exploration is not None and config.state_dependent_noise is not None,
        "exploration takes the place of use_sde, which is another way to explore.", "Leave out one of the two.",
    ),
    Rule(
        "num_gpus", lambda config: config.num_gpus > 1 and config.num_gpus % 1,
        "num_gpus is {1:g}, expected a whole number of GPUs, or a fraction of one.",
    ),
    Rule(
        "observation_filter", lambda config: config.sample_async and config.observation_filter == "MeanStdFilter",
        "sample_async needs a filter that several threads may use, not MeanStdFilter.",
        "Set observation_filter: ConcurrentMeanStdFilter.",
    ),
    Rule(
        "transport.heartbeat_timeout_s",
        lambda config: config.transport.heartbeat_timeout_s <= 2 * config.transport.heartbeat_interval_s,
        "transport.heartbeat_timeout_s is {1:g}, which one late beat would pass.",
        "Set more than twice heartbeat_interval_s, which is {0.transport.heartbeat_interval_s:g}.",
    ),
    Rule(
        "input_epochs",
        lambda config: config.input_epochs is not None
        and (config.input == "sampler" or isinstance(config.input, dict)),
        "input_epochs is for stored experience alone: samples and mixtures have no end.",
        "Leave it out, or let input name files.",
    ),
    Rule(
        "num_workers",
        lambda config: config.input_epochs is not None and not config.num_workers and not config.is_alone,
        "input_epochs needs a number of workers, who share the stored experience between them.",
        "Set num_workers, or leave bind out to read it in this process.",
    ),
    Rule(
        "evaluation_config",
        lambda config: config.evaluation_interval
        and config.evaluation_config.get("explore") and len(config.evaluation_config) == 1,
        "An evaluation that draws actions, and has no settings of its own, tells what training tells.",
        "Leave out explore, or give it settings of its own, such as env_config.",
    ),
    Rule(
        "stop_evaluation_return",
        lambda config: config.stop_evaluation_return is not None and not config.evaluation_interval,
        "stop_evaluation_return needs evaluations.", "Set evaluation_interval: 10, say.",
    ),
)  # fmt: skip
"""Rules of every config, whatever its algorithm."""

MODEL_RULES = (
    Rule(
        "use_gru", lambda model: model.use_lstm and model.use_gru,
        "model.use_lstm and model.use_gru can't both be true.",
    ),
    Rule(
        "lstm_use_prev_action_reward", lambda model: model.lstm_use_prev_action_reward and not model.is_recurrent,
        "model.lstm_use_prev_action_reward needs a recurrent cell.", "Set model.use_lstm or model.use_gru.",
    ),
    Rule(
        "initial_log_std", lambda model: model.initial_log_std and not model.free_log_std,
        "model.initial_log_std is for deviations that are free weights.", "Set model.free_log_std.",
    ),
)  # fmt: skip
"""Rules of the settings of a network."""


def check_rules(config: BaseModel, rules: Iterable[Rule], prefix: str = "") -> None:
    """Refuse values that don't go together; `prefix` leads to the config, such as "model.".

    Raises: ConfigError naming the key that should change.
    """
    for rule in rules:
        if rule.is_broken(config):
            value = attrgetter(rule.key)(config)
            message, hint = (text.format(config, value) for text in (rule.message, rule.hint))
            raise ConfigError(message, key=f"{prefix}{rule.key}", value=value, hint=hint)


def check_known(model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse keys that the config doesn't have, except below the free sub-dicts (R167).

    Raises: ConfigError with a hint that offers the nearest names.
    """
    for name, value in values.items():
        field = model.model_fields.get(name)
        if field is None:
            raise _unknown(f"{prefix}{name}", tuple(model.model_fields), _other_name(f"{prefix}{name}", model))
        if (not prefix and name in _OPEN) or not isinstance(value, Mapping):
            continue
        if (inner := sub_model(field)) is not None:
            check_known(inner, value, f"{prefix}{name}.")
            continue
        known = field.get_default(call_default_factory=True)
        if isinstance(known, Mapping) and (others := [sub for sub in value if sub not in known]):
            raise _unknown(f"{prefix}{name}.{others[0]}", tuple(known))


def check_values(values: object, name: str = "") -> None:
    """Refuse RLlib's `{grid_search: [...]}` and whole numbers that Python can't write down, at any depth.

    Raises: ConfigError naming the key.
    """
    if isinstance(values, int) and values.bit_length() > _MAX_BITS:
        raise ConfigError(
            f"{name} is a whole number of {values.bit_length():,} bits, expected one of at most {_MAX_BITS:,}.",
            key=name,
        )
    if isinstance(values, Mapping) and name and set(values) == {"grid_search"}:
        raise ConfigError(
            f"{name} is a grid search, expected one value: a run has one set of settings.", key=name, value=values,
            hint="examples/optuna_sweep.py searches with Optuna, and a shell loop over --set does for a grid.",
        )  # fmt: skip
    if isinstance(values, list | tuple):
        values = dict(enumerate(values))
    for key, value in values.items() if isinstance(values, Mapping) else ():
        check_values(value, f"{name}.{key}" if name else str(key))


def check_extras(config: Any) -> None:
    """Refuse keys of `model` that built-in networks don't have, and warn of keys of `multiagent` that nothing reads.

    Raises: ConfigError with a hint that offers the nearest names.
    """
    for extra in config.model.model_extra if config.model.custom_model is None else ():
        hint = _other_name(f"model.{extra}", type(config)) or nearest(extra, type(config.model).model_fields, count=2)
        raise ConfigError(
            f"There is no key model.{extra}.", key=f"model.{extra}",
            hint=hint.strip() or "Only a model of your own (model.custom_model) may have keys of its own.",
        )  # fmt: skip
    for extra in config.multiagent.model_extra:
        dotted, known = f"multiagent.{extra}", type(config.multiagent).model_fields
        hint = _other_name(dotted, type(config)) or nearest(extra, known, count=1).strip()
        _log.warning("%s", f"aiorl has no key {dotted} and ignores it. {hint}".rstrip())


def plain_error(model: type[BaseModel], error: ValidationError, prefix: str = "") -> ConfigError:
    """Return the first fault that pydantic found, in one sentence; `prefix` leads to the model, such as "model."."""
    first = error.errors(include_url=False)[0]
    names, annotation = _locate(model, first["loc"])
    dotted, value = prefix + ".".join(names), first["input"]
    if str(first["type"]).endswith(_TYPE_FAULTS):
        wanted = expected(annotation)
        return ConfigError(
            f"{dotted} must be {wanted}, not {shortened(repr(value), 80)}.",
            key=dotted,
            value=value,
            hint=_as_meant(value, wanted) or nearest(str(value), re.split(" or | of |, ", wanted)).strip(),
        )
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    separator = " " if message.startswith("must") else ": "
    return ConfigError(f"{dotted}{separator}{message}, not {shortened(repr(value), 80)}.", key=dotted, value=value)


def _as_meant(value: object, wanted: str) -> str:
    """Return how to write a list, or a time in seconds, that was written otherwise; "" for anything else."""
    if not isinstance(value, str):
        return ""
    if "list of" in wanted and "," in value:
        return f"Write it as [{', '.join(part.strip() for part in value.strip('()').split(',') if part.strip())}]."
    time = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d)", value)
    if time is not None and "number" in wanted:
        return f"In seconds it is {float(time[1]) * _SECONDS[time[2]]:g}."
    return ""


def _unknown(dotted: str, known: tuple[str, ...], other: str = "") -> ConfigError:
    hint = other or nearest(dotted.rpartition(".")[2], known, count=2).strip() or _ALL_KEYS
    return ConfigError(f"There is no key {dotted}.", key=dotted, hint=hint)


def _other_name(dotted: str, config: type[BaseModel]) -> str:
    """Return the hint for a key of another library, or ""."""
    return key_hint(dotted, {**config.model_fields, **dict(all_keys(config))})


def _locate(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """Return the names of the keys on the way to a fault, and the declared type of the last one.

    The parts of `loc` behind the last key (indices, pydantic's tags for the branches of a union) are left out.
    """
    names: list[str] = []
    annotation: Any = None
    inner: type[BaseModel] | None = model
    for part in loc:
        field = inner.model_fields.get(str(part)) if inner is not None else None
        if field is None:
            break
        names.append(str(part))
        annotation, inner = field.annotation, sub_model(field)
    return names or [str(part) for part in loc], annotation


# Names of other libraries ---------------------------------------------------------------------------------------

CALLED = "Here it is called "
"""Begins a hint that names a key, which follows."""

_FILE = "other_names.yaml"
NONE = "none"
"""Stands in the table for the answer of algorithms that have none of the keys."""


def key_hint(name: str, keys: Mapping[str, FieldInfo]) -> str:
    """Return what a key of another library is called here, or "" if no library is known to have it.

    Args:
        name: dotted name of the key. If the table does not have it, the part behind the last dot is looked up.
        keys: all keys of the algorithm by dotted name, groups included.
    """
    texts: list[str] = []
    for answers in _answers(name) or _answers(name.rpartition(".")[2]):
        ours = next((key for key in answers if key in keys), None)
        if ours is not None:
            unit = unit_of(keys[ours])
            return f"{CALLED}{ours}{f' ({unit})' if unit else ''}. {answers[ours] or ''}".strip()
        others = " and ".join(key for key in answers if key != NONE)
        texts.append(answers.get(NONE) or f"It is {others} in other algorithms.")
    return next(iter(texts), "")


def attribute_hint(of: str, name: str) -> str:
    """Return what to write instead of an attribute that another library has, or "".

    Args:
        of: aiorl, config or trainer.
        name: of the attribute.
    """
    if name.startswith("_"):
        return ""
    found = (names[of].get(name, "") for names in other_names()["python"].values())
    return next(filter(None, found), "")


def no_attribute(of: str, owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that an object does not have, with a hint if another library has it."""
    said, hint = f"{type(owner).__name__!r} object has no attribute {name!r}", attribute_hint(of, name)
    return AttributeError(f"{said}. {hint}" if hint else said, name=name, obj=owner)


def from_rllib(name: str) -> tuple[str | None, str]:
    """Return aiorl's key for a key of RLlib if both mean exactly the same, else None, and how they differ."""
    is_ours = name.partition(".")[0] in ("model", "multiagent", name)
    entry = other_names()["rllib"].get(name, {name: ""} if is_ours else "It has no counterpart.")
    if isinstance(entry, str):
        return None, entry.removesuffix(" Leave it out.")
    ours = next(iter(entry))
    return (None, f"The key here is {ours}. {entry[ours]}") if entry[ours] else (ours, "")


def _answers(name: str) -> list[dict[str, str | None]]:
    sections = (other_names()[section].get(name) for section in ("rllib", "sb3", "others"))
    return [{NONE: entry} if isinstance(entry, str) else entry for entry in sections if entry is not None]


@functools.cache
def other_names() -> dict[str, Any]:
    """Return the table of `other_names.yaml`."""
    content = importlib.resources.files("aiorl.config").joinpath(_FILE).read_bytes()
    return parse_yaml(Path(_FILE), content)[0]
