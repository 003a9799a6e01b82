"""Fields of each message on the wire, and their permitted values.

Each message has two parts. *Scalars* go into the header and are checked here one by one. *Arrays*
go into frames, and a *tree* defines the paths at which they are permitted. ``{"*": ARRAY}`` is a
map of arrays by name. Both follow from the annotations of the message's fields.

Each string is a name, a label or a text. A *name* (visible ASCII, at most 64 characters) and a
*label* (printable, at most 256) are refused if they break these rules. A *text* is for people: it
is made printable and cut to its length (`aiorl.text`). A sender cuts texts by the same
declarations, so that they always fit.
"""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, get_args

import numpy as np

from aiorl.errors import BadFrame
from aiorl.net.wire import messages as m
from aiorl.net.wire.format import Limits
from aiorl.text import MAX_LABEL, MAX_NAME, is_label, is_name, many_lines, one_line

ArrayTree: TypeAlias = "Mapping[str, ArrayTree] | None"
ARRAY: Final = None
"""Leaf of an array tree."""

# Decoded values are Any, as msgpack returns them, until their check.
Check: TypeAlias = Callable[[str, Any, Limits], None]

MAX_TEXT: Final = 16_000
"""Characters of the longest text, a traceback; in UTF-8 at most 64,000 bytes, less than
``Limits.max_string``."""
_MAX_INT = 1 << 53
_MAX_INT32 = (1 << 31) - 1
_MAX_PERF = 64


def _whole(lowest: int, highest: int, called: str) -> Check:
    def check(field: str, value: Any, limits: Limits) -> None:
        if type(value) is not int or not lowest <= value <= highest:
            raise BadFrame(
                f"expected a whole number from {lowest} to {called}, got {_show(value)}",
                field=field,
            )

    return check


_check_version = _whole(-1, _MAX_INT, "2**53")


def _check_name(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not str or not is_name(value):
        raise BadFrame(
            f"expected a name of at most {MAX_NAME} visible ASCII characters, got {_show(value)}",
            field=field,
        )


@dataclass(slots=True, eq=False)
class _Text:
    """Check of a field with text for people, or with plain data that contains texts; `fit` makes
    them printable.
    """

    fit: Callable[[Any], Any]
    is_plain: bool = False

    def __call__(self, field: str, value: Any, limits: Limits) -> None:
        if self.is_plain:  # array references were resolved before, so all arrays are known
            _check_nested(field, value, limits.max_depth)
        elif type(value) is not str:
            raise BadFrame(f"expected a string, got {_show(value)}", field=field)


def _line(max_chars: int) -> _Text:
    return _Text(lambda text: one_line(text, max_chars))


def _fit_plain(value: Any) -> Any:
    """Return plain data with every text in it made printable; line breaks are kept."""
    if isinstance(value, str):
        return many_lines(value, MAX_TEXT)
    if isinstance(value, Mapping):
        return {
            one_line(key, MAX_LABEL) if isinstance(key, str) else key: _fit_plain(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_fit_plain(item) for item in value]
    return value


def _check_bool(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not bool:
        raise BadFrame(f"expected true or false, got {_show(value)}", field=field)


def _check_seconds(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not float and type(value) is not int:
        raise BadFrame(f"expected a number, got {_show(value)}", field=field)
    if not 0 <= value < math.inf:
        raise BadFrame(f"expected seconds, got {_show(value)}", field=field)


def _check_perf(field: str, value: Any, limits: Limits) -> None:
    if type(value) is not dict or len(value) > _MAX_PERF:
        raise BadFrame(
            f"expected a map of at most {_MAX_PERF} numbers, got {_show(value)}", field=field
        )
    for key, number in value.items():
        if (
            type(key) is not str
            or (type(number) is not float and type(number) is not int)
            or not is_label(key)
        ):
            raise BadFrame(
                f"expected a map of numbers by name, got {_show({key: number})}", field=field
            )


def _check_map(field: str, value: Any, of: str = "") -> None:
    if type(value) is not dict:
        raise BadFrame(f"expected a map{of}, got {_show(value)}", field=field)


def _check_acks(field: str, value: Any, limits: Limits) -> None:
    _check_map(field, value, " of whole numbers")
    for key, number in value.items():
        _check_name(field, key, limits)
        _check_version(field, number, limits)


def _check_plain_map(field: str, value: Any, limits: Limits) -> None:
    _check_map(field, value)
    _check_nested(field, value, limits.max_depth)


_LEAVES = frozenset({type(None), bool, int, float, str, bytes, np.ndarray})
_KEYS = frozenset({str})


def _check_nested(field: str, value: Any, depth: int) -> None:
    kind = type(value)
    if kind in _LEAVES:
        return
    if depth <= 0:
        raise BadFrame("nested too deeply", field=field)
    if kind is not dict and kind is not list:
        raise BadFrame(f"{kind.__name__} values cannot be sent", field=field)
    if not value:
        return
    items = value
    if kind is dict:
        items = value.values()
        if not _KEYS.issuperset(map(type, value)):
            key = next(key for key in value if type(key) is not str)
            raise BadFrame(f"expected names as keys, got {_show(key)}", field=field)
    if not _LEAVES.issuperset(map(type, items)):
        for item in items:
            _check_nested(field, item, depth - 1)


def _check_value(field: str, value: Any, limits: Limits) -> None:
    _check_nested(field, value, limits.max_depth)


def _check_specs(field: str, value: Any, limits: Limits) -> None:
    _check_plain_map(field, value, limits)
    for spec in value.values():
        _check_map(field, spec)


def _check_snapshot(field: str, value: Any, limits: Limits) -> None:
    _check_map(field, value)
    MESSAGE_TYPES["snapshot"].check_scalars(value, limits, prefix=f"{field}.")


def _show(value: object) -> str:
    # limited depth: a peer's lists may be nested more deeply than Python can recurse
    text = reprlib.repr(value)
    if isinstance(value, (dict, list, str, bytes)):
        text = f"{type(value).__name__} {text}"
    return text if len(text) <= 60 else text[:57] + "..."


OPTIONAL_ARRAYS: Final = frozenset({"policies"})
"""Fields with arrays that a message has only if they are not empty."""
_OPTIONAL_SCALARS: Final[Mapping[str, Any]] = {
    "since": -1,
    "env_config": {},
    "env_changes": 0,
    "actor": "",
    "credit": 0,
}
"""Fields of the header that a message has only if they differ from these values."""

_ARRAYS: ArrayTree = {"*": ARRAY}
_POLICY_ARRAYS: ArrayTree = {"*": _ARRAYS}
_SNAPSHOT_ARRAYS: ArrayTree = {
    "weights": _POLICY_ARRAYS,
    "filters": _POLICY_ARRAYS,
    "policies": _ARRAYS,
}


@dataclass(frozen=True, slots=True)
class MessageType:
    """One type of message on the wire.

    Attributes:
        name: its name in the header.
        cls: its dataclass in ``messages``.
        scalars: header field -> check of its decoded value.
        arrays: tree of the paths at which arrays are permitted; its top level consists of fields.
        texts: header field for people -> function that makes its value printable.
        defaults: header field that can be left out -> its value then.
    """

    name: str
    cls: type[m.Message]
    scalars: Mapping[str, Check]
    arrays: Mapping[str, ArrayTree]
    texts: Mapping[str, Callable[[Any], Any]] = dataclasses.field(init=False)
    defaults: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Pick the texts and the fields that can be left out."""
        texts = {
            name: check.fit for name, check in self.scalars.items() if isinstance(check, _Text)
        }
        object.__setattr__(self, "texts", texts)
        defaults = {
            name: value for name, value in _OPTIONAL_SCALARS.items() if name in self.scalars
        }
        object.__setattr__(self, "defaults", defaults)

    def check_scalars(self, values: dict[str, Any], limits: Limits, prefix: str = "") -> None:
        """Check the scalars, and make texts printable.

        Raises:
            BadFrame: when a field is missing, unknown or of the wrong type; the error names the
                field.
        """
        checks = self.scalars
        values.update(self.defaults | values)
        try:
            for field, check in checks.items():
                check(field, values[field], limits)
        except KeyError:
            raise BadFrame(f"missing in {self.name}", field=prefix + field) from None
        except BadFrame as error:
            if prefix and not error.field.startswith(prefix):
                raise BadFrame(error.message, field=prefix + error.field) from error
            raise
        if len(values) != len(checks):
            extra = next(key for key in values if key not in checks)
            raise BadFrame(f"no such field in {self.name}", field=prefix + one_line(str(extra), 60))
        for field, fit in self.texts.items():
            values[field] = fit(values[field])

    def leave_out_defaults(self, values: dict[str, Any]) -> None:
        """Remove the fields that can be left out, before sending."""
        for field, default in self.defaults.items():
            if values[field] == default:
                del values[field]

    def fit_texts(self, values: dict[str, Any]) -> None:
        """Cut texts before sending, as the receiver would do."""
        for field, fit in self.texts.items():
            values[field] = fit(values[field])


_FIELDS: Final[dict[str, tuple[Check | None, ArrayTree]]] = {
    "Count": (_whole(0, _MAX_INT, "2**53"), {}),
    "Count32": (_whole(0, _MAX_INT32, str(_MAX_INT32)), {}),
    "Version": (_check_version, {}),
    "Seconds": (_check_seconds, {}),
    "bool": (_check_bool, {}),
    "Name": (_check_name, {}),
    "Kind": (_line(64), {}),
    "State": (_line(200), {}),
    "Host": (_line(255), {}),
    "Sentence": (_line(1000), {}),
    "Paragraph": (_line(4000), {}),
    "Lines": (_Text(lambda text: many_lines(text, MAX_TEXT, keep_end=True)), {}),
    "Mapping[str, float]": (_check_perf, {}),
    "Mapping[str, int]": (_check_acks, {}),
    "Mapping[str, Any]": (_check_plain_map, {}),
    "Arrays": (None, _ARRAYS),
    "PolicyArrays": (None, _POLICY_ARRAYS),
    "Plain": (_Text(_fit_plain, is_plain=True), _ARRAYS),
    "Value": (_check_value, _ARRAYS),
    "Account": (_Text(_fit_plain, is_plain=True), {}),
    "Mapping[str, Plain]": (_check_plain_map, _ARRAYS),
    "Mapping[str, PolicyGraph]": (_check_specs, {"*": {"graph": ARRAY}}),
    "Snapshot": (_check_snapshot, _SNAPSHOT_ARRAYS),
}
"""Annotation of a field in `messages` -> check of its value in the header, None without one, and
its array tree."""


def _message_type(cls: type[m.Message]) -> MessageType:
    # a named tuple keeps the text of an annotation in a reference
    fields = {name: _FIELDS[kind.__forward_arg__] for name, kind in cls.__annotations__.items()}
    return MessageType(
        re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).lower(),
        cls,
        {name: check for name, (check, _) in fields.items() if check is not None},
        {name: tree for name, (_, tree) in fields.items() if tree},
    )


MESSAGE_TYPES: Final = {kind.name: kind for kind in map(_message_type, get_args(m.Message))}
NESTED_VALUES: Final = {
    m.Call: "args",
    m.Reply: "result",
    m.Item: "value",
    m.Payload: "value",
}
"""Message -> its field with arrays at any depth of its value."""
MESSAGE_TYPES_BY_CLASS: Final = {kind.cls: kind for kind in MESSAGE_TYPES.values()}
