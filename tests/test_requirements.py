"""Every requirement of the evaluation layer has tests, and docs/requirements.md lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
from requirement_table import (
    NOT_RUN,
    cited_requirements,
    disagreements,
    numbers_in,
    read_table,
    read_titles,
    render,
)

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "requirements.md").read_text(encoding="utf-8")
SECTIONS = read_titles(PAGE)
REQUIREMENTS = [number for titles in SECTIONS.values() for number in titles]
WRITE_IT = "run `make requirements`"


@pytest.fixture(scope="module")
def cited():
    return cited_requirements(TESTS)


def test_the_page_has_all_requirements_each_named_by_a_test(cited):
    assert sorted(REQUIREMENTS) == [*range(4, 196)]
    assert [f"R{number}" for number in REQUIREMENTS if not cited.get(number)] == []


def test_the_page_is_as_it_would_be_written(cited):
    """But for how tests ended, which only a run of them can tell."""
    states = {test: state for tests in read_table(PAGE).values() for test, state in tests.items()}
    assert render(SECTIONS, cited, states) == PAGE, WRITE_IT


def test_no_requirement_is_shown_by_failed_or_skipped_tests_alone():
    for number, tests in read_table(PAGE).items():
        assert "failed" not in tests.values(), f"R{number}: {tests}"
        assert {"passed", NOT_RUN} & set(tests.values()), f"R{number} is shown by skipped tests only: {tests}"


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


def test_a_citation_belongs_to_the_test_it_stands_in(tmp_path):
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
    one = ["tests/test_it.py::test_one"]
    assert cited_requirements(tests) == {5: one, 6: one, 7: one, 10: ["tests/test_it.py::TestGroup::test_two"]}


def test_a_page_that_claims_too_much_is_found_out():
    table = {4: {"a": "passed", "b": "passed", "c": "passed", "d": NOT_RUN, "e": "passed"}}
    wrong = disagreements(table, {"a": "passed", "b": "failed", "c": "skipped"})
    assert wrong == [
        "R4: the page says that b passed, but it failed",
        "R4: the page says that e passed, but it was not run",
    ]
