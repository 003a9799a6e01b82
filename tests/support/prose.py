"""Check of prose: `python tests/support/prose.py [PATH ...]` lists clumsy sentences, and facts that
docstrings lack.

A docstring begins with a verb (functions) or a noun (values). A message, or a sentence of the
README, has at most 35 words. Each word in `WORDS` has a plainer form, which the finding names.
``--limit N`` allows N findings.

Docstrings of public names have facts. Public names are those on the pages of docs/api/, those in
each module's `__all__`, and the public methods of these classes and of their base classes. A
docstring that refers to another one (See `Class.method`) needs no facts of its own. Each other one
has

- each parameter, in ``Args:`` or in backticks; a plain word is enough for a single parameter;
- the result, in ``Returns:`` or ``Yields:``, or as the object of a verb such as Return or Build;
- each exception of aiorl that the function's own code raises, or a base class of it, in
  ``Raises:``;
- each public attribute of a class, in ``Attributes:`` or below the attribute;
- the shape of each array, and the unit of each time and size.
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

import griffe

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
_SECTIONS = ("attributes", "parameters", "raises", "returns", "yields")
_REFERENCE = re.compile(r"\b[Ss]ee `[A-Z]\w*\.\w+`")
_RESULT = re.compile(
    r"(Build|Compute|Concatenate|Convert|Create|Load|Make|Read|Return|Yield)\b|.*\breturns?\b",
    re.DOTALL,
)
_ARRAY = re.compile(r"\b(NDArray|ndarray|ArrayLike|Arrays?|F32|F64|I64|Batch|Tensors?)\b")
_SHAPE = re.compile(r"\[[\w. *+,]+\]|\((\w+|\.\.\.),[^)]*\)|\bshapes?\b|\bscalars?\b")
_UNITS = {
    re.compile(r".*_s|(.*_)?(timeout|interval|seconds)"): re.compile(r"\bseconds?\b"),
    re.compile(r"(.*_)?(bytes|size)"): re.compile(
        r"\b(bytes?|rows?|steps?|fragments?|number of|episodes?)\b"
    ),
}
"""Names of numbers -> the units that their descriptions have to name."""
Finding = tuple[int | None, str]


def findings(prefixes: Sequence[str] = ("",)) -> Iterator[str]:
    """Yield ``file:line: finding`` for code and pages whose path begins with one of the
    prefixes.
    """
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    folders = ("aiorl", "benchmarks", "examples", "tests")
    modules = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    for path in [*modules, *pages]:
        name = str(path.relative_to(ROOT))
        if path == Path(__file__) or not name.startswith(tuple(prefixes)):
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            found = _of_code(text, is_public=not name.startswith("tests"))
        else:
            found = _of_page(text, is_short=name == "README.md")
        yield from (f"{name}:{line}: {finding}" for line, finding in found)
    for item in sorted(_public_objects(), key=lambda item: item.path):
        name = str(item.filepath.relative_to(ROOT))
        if name.startswith(tuple(prefixes)):
            yield from (f"{name}:{line}: {finding}" for line, finding in _of_object(item))


def _of_code(source: str, *, is_public: bool) -> Iterator[tuple[int, str]]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
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


def _public_objects() -> set[griffe.Object]:
    """Return the objects that have the public names, and the base classes of public classes."""
    package = griffe.load(
        "aiorl", search_paths=[ROOT], try_relative_path=False, extensions=griffe.Extensions()
    )
    pages = [page.read_text("utf-8") for page in (ROOT / "docs/api").glob("*.md")]
    names = {
        f"{module}.{name}"
        for text in pages
        for module, part in _API.findall(text)
        for name in part.split()
    }
    names |= {
        f"aiorl.{name}" for text in pages for name in re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    }
    modules = [package]
    for module in modules:  # its submodules are appended
        modules += [inner for inner in module.modules.values() if isinstance(inner, griffe.Module)]
        names |= {f"{module.path}.{name}" for name in module.exports or ()}
    found = set()
    for name in names - {"aiorl.learning.lazy.tf"}:  # it belongs to TensorFlow
        item = package.modules_collection[name]
        found |= set(_with_bases(item.final_target if isinstance(item, griffe.Alias) else item))
    return found


def _with_bases(item: griffe.Object) -> list[griffe.Object]:
    """Return an object and, if it is a class, its base classes in aiorl."""
    return [item, *item.mro()] if isinstance(item, griffe.Class) else [item]


def _of_object(item: griffe.Object) -> Iterator[Finding]:
    """Check a function, the attributes and public methods of a class, or the constants of a
    module.
    """
    if item.is_function:
        yield from _of_function(item)
    described = {"model_config"}.union(*map(_described, _with_bases(item)))
    for name, member in item.members.items():
        if isinstance(member, griffe.Alias) or (name.startswith("_") and name != "__init__"):
            continue
        if name == "__init__":
            yield from _of_function(member, _doc(item))
            # griffe leaves these out
            tuples = re.findall(r"^ +(self\.\w+, .*?) = ", member.source, re.MULTILINE)
            for inner in set(re.findall(r"self\.([a-z]\w*)", " ".join(tuples))) - described:
                yield member.lineno, f"{inner}: an attribute without a description"
        elif item.is_class and (member.is_function or "property" in member.labels):
            yield from _of_function(member)
        elif member.is_attribute and name not in described:
            yield member.lineno, f"{name}: an attribute without a description"


def _described(item: griffe.Object) -> set[str]:
    """Return the names of the attributes that a class or module describes, in one of the ways there
    are.
    """
    names = set(_sections(_doc(item))["attributes"])
    for member in (
        member for member in item.members.values() if not isinstance(member, griffe.Alias)
    ):
        names |= set(_sections(_doc(member))["attributes"])
        arguments = getattr(getattr(member, "value", None), "arguments", ())
        positional = [
            argument for argument in arguments if not isinstance(argument, griffe.ExprKeyword)
        ]
        # the second one describes the key
        is_key = "class-attribute" in member.labels and len(positional) > 1
        if is_key or member.is_function or member.has_docstring:
            names.add(member.name)
    return names


def _of_function(item: griffe.Object, of_class: str = "") -> Iterator[Finding]:
    """Check a function or a property; the docstring of a class adds to that of its constructor."""
    doc = f"{of_class}\n\n{_doc(item)}".strip()
    if _REFERENCE.search(doc):
        return
    for line in re.findall(
        r"(?<!\n)\n(?:Args|Attributes|Raises|Returns|Yields):.*|\n(?:Args|Raises|Returns):.+", doc
    ):
        yield (
            item.lineno,
            f"{item.name}: {line.strip()[:20]!r} is not alone on its line below an empty one",
        )
    parts = _sections(doc)
    own = {**parts["attributes"], **parts["parameters"]}
    given = [(arg.name, str(arg.annotation)) for arg in getattr(item, "parameters", ())]
    parameters = {
        name: kind
        for name, kind in given
        if name not in ("self", "cls") and not name.startswith("_")
    }
    for name, kind in parameters.items():
        quote = r"\b" if len(parameters) == 1 else "`"
        text = own.get(name, doc if re.search(quote + name + quote, doc, re.IGNORECASE) else "")
        if not text:
            yield item.lineno, f"{item.name}: parameter {name!r} is not described"
            continue
        if _ARRAY.search(kind) and not _SHAPE.search(text):
            yield item.lineno, f"{item.name}: parameter {name!r} has no shape"
        for names, units in _UNITS.items():
            if re.search("int|float", kind) and names.fullmatch(name) and not units.search(text):
                yield item.lineno, f"{item.name}: parameter {name!r} has no unit"
    result = str(item.returns) if isinstance(item, griffe.Function) else "None"
    text = " ".join((parts["returns"] or parts["yields"]).values()) or doc
    if result not in ("None", "NoReturn"):
        if text is doc and not _RESULT.match(doc):
            yield item.lineno, f"{item.name}: the result is not described"
        elif _ARRAY.search(result) and not _SHAPE.search(text):
            yield item.lineno, f"{item.name}: the result has no shape"
    errors = item.modules_collection["aiorl.errors"].classes
    for name in re.findall(r"^ +raise (\w+)", item.source, re.MULTILINE):
        if name in errors and name != "InternalError":
            bases = {
                str(base) for error in (errors[name], *errors[name].mro()) for base in error.bases
            }
            if {name, *bases}.isdisjoint(parts["raises"]):
                yield item.lineno, f"{item.name}: {name} is not in Raises"


def _doc(item: griffe.Object) -> str:
    return item.docstring.value if item.docstring else ""


def _sections(doc: str) -> dict[str, dict[str, str]]:
    """Return the sections of a docstring: the text by name; a result has no name."""
    found: dict[str, dict[str, str]] = {kind: {} for kind in _SECTIONS}
    for section in griffe.Docstring(doc).parse(
        "google", warnings=False, returns_multiple_items=False
    ):
        for item in section.value if section.kind.value in _SECTIONS else ():
            name = item.annotation if section.kind.value == "raises" else item.name
            found[section.kind.value][name.lstrip("*")] = item.description
    return found


def main() -> int:
    """Print the findings; the exit status is 1 if there are more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--limit", type=int, default=0, help="number of findings allowed; default: 0"
    )
    parser.add_argument("path", nargs="*", metavar="PATH", help="check only files with this prefix")
    args = parser.parse_args()
    found = list(findings(args.path or [""]))
    if len(found) > args.limit or args.path:
        print("\n".join(found))
    print(f"prose: {len(found)} findings (limit {args.limit})")
    return int(len(found) > args.limit)


if __name__ == "__main__":
    sys.exit(main())
