"""A plugin for pytest that changes the English words of aiorl's messages, to find tests that depend
on wording.

`python -m pytest -p tests.support.reworded tests/config` rotates the letters of each ordinary word
in messages: "must be" becomes "ustm eb". Values, keys, options, paths, commands and quoted names
stay, so that tests can match these. Messages are the texts in `raise`, in calls of errors and of
the log, in `__str__`, and all that look like sentences. Processes that tests start as new programs
keep the usual words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

_PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")
_NAMES = set(re.findall(r"\w+", " ".join(re.findall(r"`(.*?)`", _PAGE)))) - {"is"}
"""Names and values of keys, which can be English words."""
# quoted text, commands and words; a word that touches other characters is part of a name
_WORD = re.compile(
    r"`[^`]*`|(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"|(?:python -m|pip install|aiorl) \S+"
    r"|(?<![^\s(])(?P<word>[A-Za-z][a-z]+(?:['-][a-z]+)*)(?=[.,;:!?)]*(?:\s|$))"
)
_SENTENCE_START = re.compile(r"(^|[.!?:]\s+)$")
_NO_PROSE = re.compile(r"[<>{}\\=^$|\n]")
_SETTING = re.compile(r"(\w+): $")
_LEAST_WORDS = 4
"""Words that make a text a sentence, wherever it is."""
_MESSAGE_NAMES = {"message", "hint", "reason", "refusal", "text", "warning", "what", "why"}
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "warn", "log"}
_COMPARISONS = {
    "compile",
    "match",
    "search",
    "sub",
    "split",
    "startswith",
    "endswith",
    "removeprefix",
    "replace",
}


def _rotated(text: str) -> tuple[str, int]:
    """Return the text with other words, and their number."""
    count = 0

    def other(found: re.Match[str]) -> str:
        nonlocal count
        word = found["word"]
        before = text[: found.start()]
        setting = _SETTING.search(before)
        is_value = setting is not None and (setting[1] in _NAMES or "_" in setting[1])
        if (
            word is None
            or word in _NAMES
            or is_value
            or (word[0].isupper() and not _SENTENCE_START.search(before))
        ):
            return found.group()
        count += 1
        return re.sub(r"[A-Za-z]+", lambda part: part.group()[1:] + part.group()[0], word)

    return _WORD.sub(other, text), count


class _Reworder(ast.NodeVisitor):
    """Changes the texts of a module in place."""

    def __init__(self) -> None:
        self._in_message = False

    def _visit(self, nodes: Iterable[ast.AST], *, in_message: bool) -> None:
        before, self._in_message = self._in_message, in_message
        for node in nodes:
            self.visit(node)
        self._in_message = before

    def _reword(self, parts: Sequence[ast.expr]) -> None:
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts
        )
        changed, count = _rotated(text)
        if self._in_message or (count >= _LEAST_WORDS and not _NO_PROSE.search(text)):
            pieces = iter(changed.split("\0"))
            piece = next(pieces)
            for part in parts:
                if isinstance(part, ast.Constant):
                    part.value = piece
                else:
                    piece = next(pieces)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and " " in node.value and "\0" not in node.value:
            self._reword([node])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._reword(node.values)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._visit([node.exc] if node.exc else [], in_message=True)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        self._visit([node.value], in_message=not names.isdisjoint(_MESSAGE_NAMES))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit(ast.iter_child_nodes(node), in_message=node.name == "__str__")

    def visit_Call(self, node: ast.Call) -> None:
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        is_message = self._in_message or name in _LOG_METHODS or name.endswith(("Error", "Warning"))
        self.visit(node.func)
        if name not in _COMPARISONS:
            self._visit(node.args, in_message=is_message)
        for keyword in node.keywords:
            self._visit([keyword.value], in_message=keyword.arg in _MESSAGE_NAMES)

    def visit_Compare(self, node: ast.Compare) -> None:
        parts = (
            part for part in (node.left, *node.comparators) if not isinstance(part, ast.Constant)
        )
        self._visit(parts, in_message=False)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._visit(node.values, in_message=self._in_message)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # no docstring
            self.visit(node.value)


def reworded(source: str | bytes) -> ast.Module:
    """Return the module with other words in its messages."""
    tree = ast.parse(source)
    _Reworder().visit(tree)
    return tree


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile each time, without files of bytecode."""
        path = self.get_filename(fullname)
        return compile(reworded(self.get_data(path)), path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Find a module of aiorl."""
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] == "aiorl" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Change modules of aiorl from their first import on."""
    assert "aiorl" not in sys.modules, "a plugin has imported aiorl"
    sys.meta_path.insert(0, _Finder())
