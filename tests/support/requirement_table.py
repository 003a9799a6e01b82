"""docs/requirements.md: which tests show which requirement, and how they ended. `make requirements` writes it.

    python tests/support/requirement_table.py RESULTS.xml...           # write the page
    python tests/support/requirement_table.py --check RESULTS.xml...   # does the page say what happened?

A test names a requirement in its name (`test_r12_...`), in its docstring, in a comment or in its parameters (`R12`,
`R10-R19`); rules and invariants of a state machine speak for the machine's test case. How tests ended is read from
the files that `pytest --junitxml=RESULTS.xml` writes. Sections and titles are kept as they stand on the page.
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "requirements.md"
OWN_TESTS = "test_requirements.py"
NOT_RUN = "not run"

Table = dict[int, dict[str, str]]
"""Requirement -> test id (`tests/x/test_y.py::test_z`, parameters left out) -> state."""

_WORDS = re.compile(r"\bR(\d{1,3})(?:(?:-|\N{EN DASH}| to )R?(\d{1,3}))?\b")
_NAME = re.compile(r"(?<![a-z0-9])r(\d{1,3})(?=_|$)")
_TITLE = re.compile(r"^\| R(\d+) \| ([^|]+) \|")
_ROW = re.compile(r"^\| (?:R(\d+))? *\|[^|]*\| `([^`]+)` \| ([a-z ]+) \|$")

_HEAD = """# Requirements

What the evaluation layer (RolloutWorker, samplers, environments, filters) has to do, and the tests that show it.
This page is generated from the tests: `make requirements` runs them and writes it. A test that takes long says
*{not_run}* here; `make test-all` runs it as well.
"""


def numbers_in(text: str, name: str = "") -> set[int]:
    """Requirements named in a piece of source, and in a test's name."""
    found = {int(number) for number in _NAME.findall(name)}
    for first, last in _WORDS.findall(text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _source_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """Decorators and body of a definition, and the comment right above it."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _machines(tree: ast.Module) -> dict[str, list[str]]:
    """State machine class -> names of its test cases (`TestX = Machine.TestCase`)."""
    machines: dict[str, list[str]] = {}
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Attribute(value=ast.Name(id=machine), attr="TestCase")
            ):
                machines.setdefault(machine, []).append(name)
    return machines


def _tests_of(tree: ast.Module, lines: list[str]) -> Iterator[tuple[str, set[int]]]:
    machines = _machines(tree)
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test"):
                yield node.name, numbers_in(_source_of(node, lines), node.name)
            case ast.ClassDef() if node.name.startswith("Test"):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name.startswith("test"):
                        yield f"{node.name}::{method.name}", numbers_in(_source_of(method, lines), method.name)
            case ast.ClassDef():
                for name in machines.get(node.name, []):
                    yield f"{name}::runTest", numbers_in(_source_of(node, lines))


def cited_requirements(folder: Path) -> dict[int, list[str]]:
    """Requirement -> ids of the tests below a folder that name it, sorted."""
    cited: dict[int, set[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        if path.name == OWN_TESTS:
            continue  # full of made-up citations
        source = path.read_text(encoding="utf-8")
        for name, numbers in _tests_of(ast.parse(source), source.splitlines()):
            for number in numbers:
                cited.setdefault(number, set()).add(f"{path.relative_to(folder.parent).as_posix()}::{name}")
    return {number: sorted(tests) for number, tests in sorted(cited.items())}


def read_states(results: Iterable[Path]) -> dict[str, str]:
    """Test id -> "passed", "failed" or "skipped", of all its parameters together; of several files the last counts."""
    states: dict[str, str] = {}
    for path in results:
        states |= _states_of(path)
    return states


def _states_of(path: Path) -> dict[str, str]:
    ended: dict[str, set[str]] = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        module, *classes = re.split(r"\.(?=Test)", case.get("classname", ""))
        name = case.get("name", "").partition("[")[0]
        test_id = "::".join([module.replace(".", "/") + ".py", *classes, name])
        kinds = {child.tag for child in case}
        state = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        ended.setdefault(test_id, set()).add(state)
    worst_first = ("failed", "passed", "skipped")  # a parameter that does not suit this machine hides nothing
    return {test_id: next(state for state in worst_first if state in found) for test_id, found in ended.items()}


def read_titles(page: str) -> dict[str, dict[int, str]]:
    """Section -> the requirements in it -> what each asks for, in a few words."""
    sections: dict[str, dict[int, str]] = {}
    for line in page.splitlines():
        if line.startswith("## "):
            section = sections.setdefault(line[3:], {})
        elif row := _TITLE.match(line):
            section[int(row[1])] = row[2]
    return sections


def render(sections: Mapping[str, Mapping[int, str]], cited: Mapping[int, list[str]], states: Mapping[str, str]) -> str:
    """The page, as Markdown."""
    parts = [_HEAD.format(not_run=NOT_RUN)]
    for section, titles in sections.items():
        rows = [f"\n## {section}\n\n| | requirement | test | state |\n|---|---|---|---|\n"]
        for number, title in titles.items():
            label = f"R{number}"
            for test_id in cited.get(number, ["none"]):
                rows.append(f"| {label} | {title} | `{test_id}` | {states.get(test_id, NOT_RUN)} |\n")
                label = title = ""
        parts += rows
    return "".join(parts)


def read_table(page: str) -> Table:
    """What a page that `render` made says."""
    table: Table = {}
    number = 0
    for line in page.splitlines():
        row = _ROW.match(line)
        if row:
            number = int(row[1]) if row[1] else number
            table.setdefault(number, {})[row[2]] = row[3]
    return table


def disagreements(table: Table, states: Mapping[str, str]) -> list[str]:
    """Where a page claims what a run does not bear out; a test skipped on this machine is no contradiction."""
    return [
        f"R{number}: the page says that {test} passed, but it {found}"
        for number, tests in table.items()
        for test, state in tests.items()
        if state == "passed" and (found := states.get(test, "was not run")) not in ("passed", "skipped")
    ]


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with a run; 1 if something is amiss."""
    checks = arguments[:1] == ["--check"]
    states, page = read_states(map(Path, arguments[checks:])), PAGE.read_text(encoding="utf-8")
    if checks:
        problems = disagreements(read_table(page), states)
    else:
        sections, cited = read_titles(page), cited_requirements(ROOT / "tests")
        PAGE.write_text(render(sections, cited, states), encoding="utf-8")
        known = {number for titles in sections.values() for number in titles}
        problems = [f"R{number} is named by no test" for number in sorted(known - cited.keys())]
        problems += sorted({f"{test} failed" for test, state in states.items() if state == "failed"})
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
