"""Text of others made fit to be shown: printable, bounded, and on as many lines as it may have.

Whatever a peer says passes through here where messages are decoded (`aiorl.net.wire.schema` declares which field is
what), so that nothing it sends can move a cursor, colour a terminal, turn the direction of writing or begin a line of
its own in a log. Printable is what `str.isprintable` says: no control characters, no escape, no line or paragraph
separators, no marks that reorder text, nothing unassigned.
"""

from __future__ import annotations

import re

MAX_NAME = 64
"""Characters of a name that only programs read: of a worker, an incarnation, a run."""
MAX_LABEL = 256
"""Characters of a name that people choose: of a column, a policy, a metric."""

_NAME = re.compile(rf"[!-~]{{0,{MAX_NAME}}}")
_CUT = "..."
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def is_name(text: str) -> bool:
    """Whether a text is at most 64 visible ASCII characters."""
    return _NAME.fullmatch(text) is not None


def is_label(text: str) -> bool:
    """Whether a text is at most 256 printable characters."""
    return len(text) <= MAX_LABEL and text.isprintable()


def shortened(text: str, max_chars: int) -> str:
    """A text of bounded length; "..." stands for what is cut off."""
    return text if len(text) <= max_chars else text[: max_chars - len(_CUT)] + _CUT


def one_line(text: str, max_chars: int) -> str:
    """A text as one printable line of bounded length: white space becomes spaces, what else cannot be printed "?"."""
    text = shortened(text, max_chars)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def many_lines(text: str, max_chars: int, *, keep_end: bool = False) -> str:
    r"""As `one_line`, but lines stay lines, with "\n" between them; of a long text the end is kept if so wished.

    Empty lines at its end are left out: a text that passes through here at both ends of the wire stays as it is.
    """
    if keep_end and len(text) > max_chars:
        text = _CUT + text[-(max_chars - len(_CUT)) :]
    text = shortened(text, max_chars)
    if text.replace("\n", "").isprintable():  # at once, as reports may be long and come in numbers
        return text.rstrip("\n")
    return "\n".join(one_line(line, max_chars) for line in text.splitlines()).rstrip("\n")


def indented(text: str) -> str:
    """Lines after the first moved in, so that none of them passes for a line of its own."""
    return text.replace("\n", "\n    ")


def return_text(mean: float) -> str:
    """A mean return to one decimal; small ones to three digits, as goals such as 0.95 are given."""
    return f"{mean:,.1f}" if abs(mean) >= 10 else f"{mean:.3g}"


def without_numbers(text: str) -> str:
    """A text by which those that say the same of another worker, step or process are known for the same."""
    return _NUMBER.sub("#", text)
