"""Every requirement of the evaluation layer has tests, and `make requirements` lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
from requirement_table import (
    NOT_RUN,
    cited_requirements,
    not_shown,
    numbers_in,
    read_titles,
    render,
)

TESTS = Path(__file__).parent
SECTIONS = read_titles()
REQUIREMENTS = [number for titles in SECTIONS.values() for number in titles]


def test_every_requirement_is_cited_by_a_test():
    cited = cited_requirements(TESTS)
    assert sorted(REQUIREMENTS) == [*range(4, 196)]
    assert [f"R{number}" for number in REQUIREMENTS if not cited.get(number)] == []


def test_the_page_lists_each_test_with_its_state():
    page = render({"One": {4: "a title"}}, {4: ["tests/a", "tests/b"]}, {"tests/a": "passed"})
    assert page.endswith(
        f"| R4 | a title | `tests/a` | passed |\n|  |  | `tests/b` | {NOT_RUN} |\n"
    )


@pytest.mark.parametrize(
    ("text", "name", "numbers"),
    [
        ("R12 and R14; not R2D2, PR15 or r16", "", {12, 14}),
        ("R10-R12, R20 to R22, R30-31", "", {10, 11, 12, 20, 21, 22, 30, 31}),
        ("", "test_r7_r143_both_are_named", {7, 143}),
        ("", "test_her12_is_no_citation_nor_is_float32", set()),
    ],
)
def test_citations_are_found(text, name, numbers):
    assert numbers_in(text, name) == numbers


def test_a_citation_belongs_to_the_test_that_contains_it(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_it.py").write_text(
        '''"""R4 of the module is nobody's."""
# R5
@mark("R6")
def test_one():
    # R7
    pass

def helper():
    """R9"""

class TestGroup:
    def test_two(self):
        """R10"""
'''
    )
    test_ids = ["tests/test_it.py::test_one"]
    assert cited_requirements(tests) == {
        5: test_ids,
        6: test_ids,
        7: test_ids,
        10: ["tests/test_it.py::TestGroup::test_two"],
    }


def test_a_requirement_without_a_test_that_passed_is_named():
    cited = {4: ["a"], 5: ["b"], 6: ["c"], 7: ["a", "c"], 8: ["d"]}
    states = {"a": "passed", "b": "failed", "c": "skipped"}
    assert not_shown({"One": dict.fromkeys(range(4, 10), "")}, cited, states) == [
        "R5 is shown by failed or skipped tests only: b",
        "R6 is shown by failed or skipped tests only: c",
        "R9 is cited by no test",
    ]
