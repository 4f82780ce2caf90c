"""Regular expressions with the classes of ASCII; Python's re with its ASCII flag is the judge."""

from __future__ import annotations

import re

import pytest

from app.structured.patterns import ascii_classes, with_ascii_patterns

SUBJECTS = ["7", "٣", "a", "é", "_", "-", "\\d", "d", "\\", "]", "7-", "[", "ad"]


@pytest.mark.parametrize(
    "pattern", [r"\d", r"\w", r"[\d-]", r"[^\w]", r"\\d", r"\\\d", r"[\]\d]", r"\[\d?", r"(\w\w)|-", r"[\\\d]+"]
)
def test_same_language_as_with_the_ascii_flag(pattern: str) -> None:
    for subject in SUBJECTS:
        expected = re.fullmatch(pattern, subject, re.ASCII) is not None
        found = re.fullmatch(ascii_classes(pattern), subject) is not None
        assert found == expected, subject


def test_only_patterns_change() -> None:
    schema = {
        "pattern": r"\d",
        "properties": {"pattern": {"pattern": r"\d"}, "enum": {"anyOf": [{"pattern": r"\w"}]}},
        "patternProperties": {r"^\d$": {"const": {"pattern": r"\d"}}},
        "enum": [{"pattern": r"\d"}],
    }
    assert with_ascii_patterns(schema) == {
        "pattern": "[0-9]",
        "properties": {"pattern": {"pattern": "[0-9]"}, "enum": {"anyOf": [{"pattern": "[A-Za-z0-9_]"}]}},
        "patternProperties": {"^[0-9]$": {"const": {"pattern": r"\d"}}},
        "enum": [{"pattern": r"\d"}],
    }
