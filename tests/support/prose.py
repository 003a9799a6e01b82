"""Check of prose: `python tests/support/prose.py [PATH ...]` lists clumsy sentences in code and pages.

A docstring begins with a verb (functions) or a noun (values). A message, or a sentence of the README, has at most 35
words. Each word in `WORDS` has a plainer form, which the finding names. ``--limit N`` allows N findings.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_WORDS = frozenset(
    "How If Nobody Nothing Of So That What Whatever When Where Whether Which Who Whose Why".split()  # noqa: SIM905
)
"""First words that no docstring has."""
WORDS = {
    "anew": "again",
    "anybody": "anyone",
    "beside": "next to, along with, besides",
    "by turns": "alternately",
    "dear": "expensive",
    "for ever": "forever",
    "for want of": "for lack of",
    "go on": "continue",
    "goes on": "continues",
    "heed": "respect, notice",
    "is no good": "is invalid",
    "mend": "repair",
    "nobody": "no one",
    "of no use": "useless",
    "so many": "the number itself",
    "somebody": "someone",
    "tells": "reports, says",
    "told": "reported, given",
    "went on": "continued",
    "what is": "the thing itself: 'the data sent' for 'what is sent'",
    "what was": "the thing itself",
    "whoever": "the user who",
}
"""Clumsy words and their plainer forms."""
MAX_WORDS = 35
_WORD = re.compile(r"(?<![\w'])(" + "|".join(WORDS) + r")(?![\w'])", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*|#]")
_CODE = re.compile(r"```.*?```|``[^`]*``|`[^`\n]*`", re.DOTALL)


def findings(prefixes: Sequence[str] = ("",)) -> Iterator[str]:
    """Yield ``file:line: finding`` for code and pages whose path begins with one of the prefixes."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    modules = [sorted((ROOT / folder).rglob("*.py")) for folder in ("aiorl", "benchmarks", "examples", "tests")]
    for path in (*(path for found in modules for path in found), *pages):
        name = str(path.relative_to(ROOT))
        if path == Path(__file__) or not name.startswith(tuple(prefixes)):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            found = _of_code(text, is_public=not name.startswith("tests"))
        else:
            found = _of_page(text, is_short=name == "README.md")
        for line, finding in found:
            yield f"{name}:{line}: {finding}"


def _of_code(source: str, *, is_public: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(node.value)
            first = re.match(r"\w*", node.value.value.strip())
            if is_public and first and first.group() in FIRST_WORDS:
                yield node.lineno, f"a docstring begins with {first.group()!r}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _of_words(node.lineno, _CODE.sub("", node.value))
            if is_public and node not in docstrings:
                yield from _of_length(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _of_words(token.start[0], _CODE.sub("", token.string))


def _of_page(text: str, *, is_short: bool) -> Iterator[tuple[int, str]]:
    prose = _CODE.sub(lambda found: "\n" * found.group().count("\n"), text)
    yield from _of_words(1, prose)
    if is_short:
        yield from _of_length(1, prose)


def _of_words(line: int, text: str) -> Iterator[tuple[int, str]]:
    for found in _WORD.finditer(text):
        word = found.group().lower()
        yield line + text.count("\n", 0, found.start()), f"{word!r}: write {WORDS[word]}"


def _of_length(line: int, text: str) -> Iterator[tuple[int, str]]:
    for sentence in _SENTENCE_END.split(text):
        if len(words := sentence.split()) > MAX_WORDS:
            at = line + text.count("\n", 0, text.find(sentence))
            yield at, f"a sentence of {len(words)} words: {' '.join(words[:6])} ..."


def main() -> int:
    """Print the findings; the exit status is 1 if there are more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=0, help="number of findings allowed; default: 0")
    parser.add_argument("path", nargs="*", metavar="PATH", help="check only files with this prefix")
    args = parser.parse_args()
    found = list(findings(args.path or [""]))
    if len(found) > args.limit or args.path:
        print("\n".join(found))
    print(f"prose: {len(found)} findings (limit {args.limit})")
    return int(len(found) > args.limit)


if __name__ == "__main__":
    sys.exit(main())
