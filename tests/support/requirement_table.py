"""Table of requirements with their tests and results. `make requirements` writes
docs/requirements.md.

    python tests/support/requirement_table.py RESULTS.xml...           # write the page python
    tests/support/requirement_table.py --check RESULTS.xml...   # check that a test shows each
    requirement

The page is generated and not committed. Requirements and titles are in
`tests/support/requirements.yaml`. A test cites a requirement in its name (`test_r12_...`),
docstring, comments or parameters (`R12`, `R10-R19`). Rules and invariants of a state machine count
for the machine's test case. Results are read from the files of `pytest --junitxml=RESULTS.xml`.
"""

from __future__ import annotations

import ast
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "requirements.md"
OWN_TESTS = "test_requirements.py"
NOT_RUN = "not run"

REQUIREMENTS = ROOT / "tests" / "support" / "requirements.yaml"

_WORDS = re.compile(r"\bR(\d{1,3})(?:(?:-|\N{EN DASH}| to )R?(\d{1,3}))?\b")
_NAME = re.compile(r"(?<![a-z0-9])r(\d{1,3})(?=_|$)")

_HEAD = """# Requirements

The requirements of the evaluation layer (RolloutWorker, samplers, environments, filters), and the tests that show them.
`make requirements` runs the tests and writes this page. A slow test is listed as *{not_run}*; `make test-all` runs it.
"""


def numbers_in(text: str, name: str = "") -> set[int]:
    """Return the requirements named in a piece of source, and in a test's name."""
    found = {int(number) for number in _NAME.findall(name)}
    for first, last in _WORDS.findall(text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _source_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]
) -> str:
    """Return decorators and body of a definition, and the comment right above it."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _machines(tree: ast.Module) -> dict[str, list[str]]:
    """Return names of test cases by state machine class (`TestX = Machine.TestCase`)."""
    machines: dict[str, list[str]] = {}
    for node in tree.body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Attribute(value=ast.Name(id=machine), attr="TestCase"),
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
                        yield (
                            f"{node.name}::{method.name}",
                            numbers_in(_source_of(method, lines), method.name),
                        )
            case ast.ClassDef():
                for name in machines.get(node.name, []):
                    yield f"{name}::runTest", numbers_in(_source_of(node, lines))


def cited_requirements(folder: Path) -> dict[int, list[str]]:
    """Return, by requirement, the sorted ids of the tests below a folder that name it."""
    cited: dict[int, set[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        if path.name == OWN_TESTS:
            continue  # full of invented citations
        source = path.read_text(encoding="utf-8")
        for name, numbers in _tests_of(ast.parse(source), source.splitlines()):
            for number in numbers:
                cited.setdefault(number, set()).add(
                    f"{path.relative_to(folder.parent).as_posix()}::{name}"
                )
    return {number: sorted(tests) for number, tests in sorted(cited.items())}


def read_states(results: Iterable[Path]) -> dict[str, str]:
    """Return "passed", "failed" or "skipped" by test id, over all its parameters; the last of
    several files counts.
    """
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
        state = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        ended.setdefault(test_id, set()).add(state)
    # a parameter skipped on this machine does not hide the others
    worst_first = (
        "failed",
        "passed",
        "skipped",
    )
    return {
        test_id: next(state for state in worst_first if state in found)
        for test_id, found in ended.items()
    }


def read_titles() -> dict[str, dict[int, str]]:
    """Return section -> requirement -> title."""
    sections: dict[str, dict[int, str]] = yaml.safe_load(REQUIREMENTS.read_text(encoding="utf-8"))
    return sections


def render(
    sections: Mapping[str, Mapping[int, str]],
    cited: Mapping[int, list[str]],
    states: Mapping[str, str],
) -> str:
    """Return the page as Markdown."""
    parts = [_HEAD.format(not_run=NOT_RUN)]
    for section, titles in sections.items():
        rows = [f"\n## {section}\n\n| | requirement | test | state |\n|---|---|---|---|\n"]
        for number, title in titles.items():
            label = f"R{number}"
            for test_id in cited.get(number, ["none"]):
                rows.append(
                    f"| {label} | {title} | `{test_id}` | {states.get(test_id, NOT_RUN)} |\n"
                )
                label = title = ""
        parts += rows
    return "".join(parts)


def not_shown(
    sections: Mapping[str, Mapping[int, str]],
    cited: Mapping[int, list[str]],
    states: Mapping[str, str],
) -> list[str]:
    """Return a sentence for each requirement without a test, or with failed or skipped tests
    only.
    """
    problems = []
    for number in sorted(number for titles in sections.values() for number in titles):
        tests = cited.get(number, [])
        if not tests:
            problems.append(f"R{number} is cited by no test")
        elif not {"passed", NOT_RUN} & {states.get(test, NOT_RUN) for test in tests}:
            problems.append(
                f"R{number} is shown by failed or skipped tests only: {', '.join(tests)}"
            )
    return problems


def main(arguments: list[str]) -> int:
    """Write the page, or check a run; return 1 if a requirement is not shown."""
    checks = arguments[:1] == ["--check"]
    states = read_states(map(Path, arguments[checks:]))
    sections, cited = read_titles(), cited_requirements(ROOT / "tests")
    if not checks:
        PAGE.write_text(render(sections, cited, states), encoding="utf-8")
    problems = not_shown(sections, cited, states)
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
