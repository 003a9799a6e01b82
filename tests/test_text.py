"""Text from peers is safe to print."""

from __future__ import annotations

import sys

import pytest

from aiorl.text import indented, is_label, is_name, many_lines, one_line

SEPARATORS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def test_no_character_has_an_effect_beyond_its_display() -> None:
    """All of Unicode: control characters, C1, line separators, direction marks, unassigned
    characters.
    """
    everything = "".join(chr(code) for code in range(sys.maxunicode + 1))
    line = one_line(everything, len(everything))
    assert len(line) == len(everything)
    assert line.isprintable()
    assert "\N{LATIN SMALL LETTER E WITH ACUTE}" in line
    for harmful in (
        "\x1b",
        "\x9b",
        "\x07",
        "\x00",
        "\x7f",
        "\u202e",
        "\u2066",
        "\u200f",
        "\ufeff",
        *SEPARATORS,
    ):
        assert harmful not in line
    lines = many_lines(everything, len(everything)).split("\n")
    assert len(lines) > 5
    assert all(part.isprintable() for part in lines)


def test_printable_text_is_unchanged() -> None:
    text = "Fehler: 'größer' als 3 → 😀 日本"
    assert one_line(text, 100) == many_lines(text, 100) == text


def test_white_space_becomes_a_space_and_the_rest_a_question_mark() -> None:
    assert one_line("a\tb\nc\u2028d\x1b[31me", 99) == "a b c d?[31me"


@pytest.mark.parametrize("max_chars", [10, 100])
def test_text_that_is_too_long_is_cut(max_chars: int) -> None:
    text = "start" + "x" * 1000 + "end"
    assert one_line(text, max_chars) == text[: max_chars - 3] + "..."
    assert many_lines(text, max_chars) == text[: max_chars - 3] + "..."
    assert many_lines(text, max_chars, keep_end=True) == "..." + text[3 - max_chars :]
    assert len(many_lines(SEPARATORS * 1000, max_chars)) <= max_chars


@pytest.mark.parametrize("separator", SEPARATORS)
def test_lines_after_the_first_are_indented_for_every_separator(separator: str) -> None:
    text = f"a worker said{separator}2026-01-01 00:00:00,000 ERROR aiorl: forged"
    first, second = indented(many_lines(text, 200)).splitlines()
    assert first == "a worker said"
    assert second.startswith("    2026")
    assert len(one_line(text, 200).splitlines()) == 1


def test_names_are_visible_ascii_and_labels_printable() -> None:
    assert is_name("")
    assert is_name("a" * 64)
    assert not any(map(is_name, ("a" * 65, "a b", "a\n", "é", "\x7f")))
    assert is_label("a b é")
    assert is_label("é" * 256)
    assert not any(map(is_label, ("é" * 257, "a\n", "\u202e")))


@pytest.mark.parametrize(
    "text", ["a\n\n\n", "a\r\n\x85\u2028", "\n", "a\n\nb\n", "x" * 99 + "\n" * 9]
)
def test_printable_text_does_not_change_a_second_time(text):
    once = many_lines(text, 100)
    assert many_lines(once, 100) == once
    assert many_lines(text, 100, keep_end=True) == many_lines(
        many_lines(text, 100, keep_end=True), 100, keep_end=True
    )
    assert one_line(one_line(text, 100), 100) == one_line(text, 100)
