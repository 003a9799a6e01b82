"""Sanitising of text from peers: printable, of bounded length, and on one line unless lines are
allowed.

Text from peers passes through here when messages are decoded (`aiorl.net.wire.schema` declares the
kind of each field). So it cannot move the cursor, colour a terminal, change the direction of
writing or fake a line in a log. Printable characters are those of `str.isprintable`: no control
characters, escapes, line or paragraph separators, marks that reorder text, or unassigned
characters.
"""

from __future__ import annotations

import re

MAX_NAME = 64
"""Maximum length of a name that only programs read: of a worker, an incarnation, a run."""
MAX_LABEL = 256
"""Maximum length of a name that people choose: of a column, a policy, a metric."""

_CUT = "..."
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def is_name(text: str) -> bool:
    """Return True if a text is at most 64 visible ASCII characters."""
    return len(text) <= MAX_NAME and text.isascii() and text.isprintable() and " " not in text


def is_label(text: str) -> bool:
    """Return True if a text is at most 256 printable characters."""
    return len(text) <= MAX_LABEL and text.isprintable()


def is_utf8(text: str) -> bool:
    """Return False if a text has half of a character, as paths have for bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shortened(text: str, max_chars: int) -> str:
    """Return a text of bounded length; "..." replaces the part cut off."""
    if len(text) <= max_chars:
        return text
    return text[: max_chars - len(_CUT)] + _CUT


def one_line(text: str, max_chars: int) -> str:
    """Return a text as one printable line of bounded length.

    White space becomes spaces, any other unprintable character "?".
    """
    text = shortened(text, max_chars)
    if text.isprintable():
        return text
    return "".join(map(_printable, text))


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    if char.isspace():
        return " "
    return "?"


def many_lines(text: str, max_chars: int, *, keep_end: bool = False) -> str:
    r"""Return a text as `one_line` does, but with its line breaks, each as "\n".

    Empty lines at the end are dropped. So a second call on the other side of the wire changes
    nothing.

    Args:
        text: the text.
        max_chars: maximum length.
        keep_end: keep the end of a text that is too long, instead of its beginning.

    Returns:
        The text, printable except for "\n".
    """
    if keep_end and len(text) > max_chars:
        text = _CUT + text[-(max_chars - len(_CUT)) :]
    text = shortened(text, max_chars)
    # The whole text in one call, because reports can be long and many.
    if text.replace("\n", "").isprintable():
        return text.rstrip("\n")
    return "\n".join(one_line(line, max_chars) for line in text.splitlines()).rstrip("\n")


def indented(text: str) -> str:
    """Return a text with the lines after the first indented, so that none of them looks like a new
    entry.
    """
    return text.replace("\n", "\n    ")


def return_text(mean: float) -> str:
    """Return a mean return with one decimal, or with three digits if it is small, like goals such
    as 0.95.
    """
    if abs(mean) >= 10:
        return f"{mean:,.1f}"
    return f"{mean:.3g}"


def without_numbers(text: str) -> str:
    """Return a text with "#" for its numbers, so that messages equal but for a worker, step or
    process match.
    """
    return _NUMBER.sub("#", text)


def agent_text(agent_id: object) -> str:
    """Return the text by which settings name an agent: ``"0"`` for 0, ``"(0, 1)"`` for a tuple of
    numbers.

    Numbers of NumPy are written like Python's.
    """
    return str(_without_numpy(agent_id))


def _without_numpy(agent_id: object) -> object:
    if type(agent_id) is tuple:
        return tuple(map(_without_numpy, agent_id))
    # By the module's name, because nothing here imports NumPy.
    if type(agent_id).__module__ == "numpy" and hasattr(agent_id, "item"):
        return agent_id.item()
    return agent_id
