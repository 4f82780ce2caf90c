"""Which answers are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ASSETS
from app.errors import ConfigError
from app.quantize.questions import is_right, longest_answer, read_questions, same_calls

CALL = [{"name": "f", "arguments": {"x": 1}}]


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ({"check": "exact", "expected": " 7."}, "7.", True),
        ({"check": "exact", "expected": "7."}, "3 + 4\n</think>\n\n7.", True),
        ({"check": "exact", "expected": "7."}, "8.", False),
        ({"check": "one_of", "expected": ["a", "b"]}, "b", True),
        ({"check": "json", "expected": '{"a": 1}'}, '{"a":1}', True),
        ({"check": "json", "expected": '{"a": 1}'}, '{"a": 2}', False),
        ({"check": "json", "expected": '{"a": 1}'}, "{", False),
        ({"check": "contains", "expected": "42"}, "It is 42.", True),
        (
            {"check": "tool_call", "expected": CALL},
            '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
            True,
        ),
        ({"check": "tool_call", "expected": CALL}, '<tool_call>\n{"name": "f", "argum', False),
        ({"check": "tool_call", "expected": CALL}, "<tool_call>3</tool_call>", False),
    ],
)
def test_answers(question: dict[str, Any], answer: str, right: bool) -> None:
    assert is_right(question, answer) is right


def test_arguments_as_text_are_the_same() -> None:
    assert same_calls(CALL, [{"name": "f", "arguments": '{"x": 1}'}])
    assert not same_calls(CALL, None)


def test_questions_of_the_built_in_model(tmp_path: Path) -> None:
    questions = read_questions(ASSETS / "tiny-chat")
    assert len(questions) == 504
    assert {longest_answer(question) for question in questions} == {320, 900}
    assert read_questions(tmp_path) == []
    assert [question["expected"] for question in read_questions(ASSETS / "tiny-chat", 2)] == [
        questions[0]["expected"],
        questions[252]["expected"],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("3", "'int' object"),
        ("{", "Expecting"),
        ('{"family": "a", "messages": [], "check": "none", "expected": ""}', "check is 'none'"),
        ('{"family": "a", "messages": [], "check": "exact", "expected": 3}', "expected is 3"),
        ('{"family": "a", "messages": [], "check": "tool_call", "expected": [{"name": "f"}]}', "expected is"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "heldout.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=rf"heldout\.jsonl:1 is no question \(.*{message}"):
        read_questions(tmp_path)
