"""Check of prose: `python tests/support/prose.py [PATH ...]` lists clumsy sentences, and facts that docstrings lack.

A docstring begins with a verb (functions) or a noun (values). A message, or a sentence of the README, has at most 35
words. Each word in `WORDS` has a plainer form, which the finding names. ``--limit N`` allows N findings.

Docstrings of public names have facts. Public names are those on the pages of docs/api/, those in each module's
`__all__`, and the public methods of these classes and of their base classes. A docstring that refers to another one
(See `Class.method`) needs no facts of its own. Each other one has

- each parameter, in ``Args:`` or in backticks; a plain word is enough for a single parameter;
- the result, in ``Returns:`` or ``Yields:``, or as the object of a verb such as Return or Build;
- each exception of aiorl that the function's own code raises, or a base class of it, in ``Raises:``;
- each public attribute of a class, in ``Attributes:`` or below the attribute;
- the shape of each array, and the unit of each time and size.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
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
_API = re.compile(r"<!-- api ([\w.]+): ([\w\s]+) -->")
_HEAD = re.compile(r"(Args|Attributes|Raises|Returns|Yields):(.*)")
_ENTRY = re.compile(r" {4}\*{0,2}(\w+): (.*)")
_REFERENCE = re.compile(r"\b[Ss]ee `[A-Z]\w*\.\w+`")
_RESULT = re.compile(
    r"(Build|Compute|Concatenate|Convert|Create|Load|Make|Read|Return|Yield)\b|.*\breturns?\b", re.DOTALL
)
_ARRAY = re.compile(r"\b(NDArray|ndarray|ArrayLike|Arrays?|F32|F64|I64|Batch|Tensors?)\b")
_SHAPE = re.compile(r"\[[\w. *+,]+\]|\((\w+|\.\.\.),[^)]*\)|\bshapes?\b|\bscalars?\b")
_UNITS = {
    re.compile(r".*_s|(.*_)?(timeout|interval|seconds)"): re.compile(r"\bseconds?\b"),
    re.compile(r"(.*_)?(bytes|size)"): re.compile(r"\b(bytes?|rows?|steps?|fragments?|number of|episodes?)\b"),
}
"""Names of numbers -> the units that their descriptions have to name."""
Finding = tuple[int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


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
        yield from (f"{name}:{line}: {finding}" for line, finding in found)
    for path, _, node in sorted(_public_definitions(), key=lambda found: found[:2]):
        name = str(path.relative_to(ROOT))
        if name.startswith(tuple(prefixes)):
            found = _of_function(node) if isinstance(node, Function) else _of_body(_module(path), node)
            yield from (f"{name}:{line}: {finding}" for line, finding in found)


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


def _public_definitions() -> set[tuple[Path, int, ast.AST]]:
    """Return the definitions of all public names, each with its file and line."""
    pages = [page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md")]
    named = {(module, name) for text in pages for module, names in _API.findall(text) for name in names.split()}
    named |= {("aiorl", name) for text in pages for name in re.findall(r"^\| `(\w+)`", text, re.MULTILINE)}
    for path in (ROOT / "aiorl").rglob("*.py"):
        for node in _tree(path).body if "__all__" in path.read_text("utf-8") else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                named |= {(_module(path), name) for name in re.findall(r"'(\w+)'", ast.unparse(node.value))}
    found = [_definition(*name) for name in named]
    for home, item in found:  # their base classes are appended
        bases = [ast.unparse(base).partition("[")[0] for base in getattr(item, "bases", ())]
        found += [_definition(_module(home), base) for base in bases]
    return {(home, getattr(item, "lineno", 1), item) for home, item in found if home is not None}


def _definition(module: str, name: str) -> tuple[Path | None, ast.AST]:
    """Return the file and the node that define a name, which other modules may import; no file if none does."""
    if path := _path(f"{module}.{name}"):
        return path, _tree(path)
    home = _path(module)
    for node in ast.walk(_tree(home)) if home else ():
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _definition(node.module, alias.name)
        elif isinstance(node, ast.ClassDef | Function) and node.name == name:
            return home, node
    return None, ast.Pass()


def _path(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _module(path: Path | None) -> str:
    assert path is not None
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _of_body(module: str, node: ast.AST) -> Iterator[Finding]:
    """Check the attributes and public methods of a class, or the constants of a module."""
    described = _described(module, node)
    for item in getattr(node, "body", ()):
        if isinstance(item, Function) and isinstance(node, ast.ClassDef):
            if item.name == "__init__":
                yield from _of_function(item, _doc(node))
            elif not item.name.startswith("_"):
                yield from _of_function(item)
    for name, line in _attributes(node):
        if name not in described and not name.startswith("_"):
            yield line, f"{name}: an attribute without a description"


def _attributes(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names and lines of the attributes set in a class or module, and of those that `__init__` sets."""
    for item in getattr(node, "body", ()):
        for target in getattr(item, "targets", [getattr(item, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id, item.lineno
        for part in ast.walk(item) if getattr(item, "name", "") == "__init__" else ():
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and ast.unparse(part) == f"self.{part.attr}"
            ):
                yield part.attr, part.lineno


def _described(module: str, node: ast.AST) -> set[str]:
    """Return the names of the attributes that a class or its base classes describe, in one of the ways there are."""
    body = getattr(node, "body", [])
    names = {"model_config", *_sections(_doc(node)).get("Attributes", {})}
    for item, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(item, Function):
            names |= {item.name, *(_sections(_doc(item)).get("Attributes", {}))}
        is_key = isinstance(value := getattr(item, "value", None), ast.Call) and len(value.args) > 1
        if is_key or (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            names |= {name for name, _ in _attributes(ast.Module([item], []))}
    for base in getattr(node, "bases", ()):
        path, definition = _definition(module, ast.unparse(base).partition("[")[0])
        names |= _described(_module(path), definition) if path else set()
    return names


def _of_function(node: Function, of_class: str = "") -> Iterator[Finding]:
    doc = f"{of_class}\n\n{_doc(node)}".strip()
    kinds = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    if _REFERENCE.search(doc) or kinds & {"overload", "setter"}:
        return
    for line in re.findall(r"(?<!\n)\n(?:Args|Attributes|Raises|Returns|Yields):.*|\n(?:Args|Raises|Returns):.+", doc):
        yield node.lineno, f"{node.name}: {line.strip()[:20]!r} is not alone on its line below an empty one"
    parts = _sections(doc)
    own = {**parts.get("Attributes", {}), **parts.get("Args", {})}
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    parameters = [arg for arg in given if arg and arg.arg not in ("self", "cls") and not arg.arg.startswith("_")]
    for arg in parameters:
        quote = r"\b" if len(parameters) == 1 else "`"
        text = own.get(arg.arg, doc if re.search(quote + arg.arg + quote, doc, re.IGNORECASE) else "")
        if not text:
            yield node.lineno, f"{node.name}: parameter {arg.arg!r} is not described"
            continue
        kind = ast.unparse(arg.annotation) if arg.annotation else ""
        if _ARRAY.search(kind) and not _SHAPE.search(text):
            yield node.lineno, f"{node.name}: parameter {arg.arg!r} has no shape"
        for names, units in _UNITS.items():
            if re.search("int|float", kind) and names.fullmatch(arg.arg) and not units.search(text):
                yield node.lineno, f"{node.name}: parameter {arg.arg!r} has no unit"
    result = ast.unparse(node.returns) if node.returns else "None"
    text = str(parts.get("Returns", parts.get("Yields", ""))) or doc
    if result not in ("None", "NoReturn") and not kinds & {"property", "cached_property"}:
        if text is doc and not _RESULT.match(doc):
            yield node.lineno, f"{node.name}: the result is not described"
        elif _ARRAY.search(result) and not _SHAPE.search(text):
            yield node.lineno, f"{node.name}: the result has no shape"
    for item in ast.walk(node):
        name = ast.unparse(item.exc).partition("(")[0] if isinstance(item, ast.Raise) and item.exc else ""
        is_own = name != "InternalError" and "AiorlError" in _bases(name)
        if is_own and _bases(name).isdisjoint(parts.get("Raises", {})):
            yield node.lineno, f"{node.name}: {name} is not in Raises"


def _bases(name: str) -> set[str]:
    """Return a class of aiorl.errors and its base classes, by name."""
    bases = getattr(_definition("aiorl.errors", name)[1], "bases", ())
    return {name}.union(*(_bases(ast.unparse(base)) for base in bases))


def _doc(node: ast.AST) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")  # type: ignore[arg-type]


def _sections(doc: str) -> dict[str, dict[str, str]]:
    """Return the sections of a docstring: the text by name; a result has no name."""
    found: dict[str, dict[str, str]] = {}
    part: dict[str, str] = {}
    name = ""
    for line in doc.splitlines():
        if head := _HEAD.fullmatch(line):
            part, name = found.setdefault(head[1], {}), ""
        elif line and not line.startswith(" "):
            part = {}
        elif entry := _ENTRY.match(line):
            name, part[entry[1]] = entry[1], entry[2]
        else:
            part[name] = part.get(name, "") + line
    return found


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
