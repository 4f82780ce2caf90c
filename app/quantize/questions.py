"""Questions with known answers that a model brings along (`heldout.jsonl`, as the built-in one does)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import ConfigError

FILE = "heldout.jsonl"
_CHECKS = ("exact", "one_of", "contains", "json", "tool_call")
_LONG = ("long_answer", "multiplication", "think", "think_multiplication")


def read_questions(directory: Path, most: int | None = None) -> list[dict[str, Any]]:
    """family, messages, expected, check, and where needed tools and chat_template_kwargs; none without the file; at
    most `most`, from all over it. ConfigError names a line that is no question."""
    file = directory / FILE
    if not file.is_file() or most == 0:
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"MODEL: cannot read {file}: {error}") from None
    questions = [_question(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if most is None or len(questions) <= most:
        return questions
    return [questions[number * len(questions) // most] for number in range(most)]


def longest_answer(question: Mapping[str, Any]) -> int:
    """Tokens that an answer may take."""
    return 900 if question["family"] in _LONG else 320


def is_right(question: Mapping[str, Any], answer: str) -> bool:
    """True if the text of an answer (its reasoning included or not) is right."""
    answer, expected, how = _without_reasoning(answer), question["expected"], question["check"]
    if how == "exact":
        return bool(answer == expected.strip())
    if how == "one_of":
        return answer in expected
    if how == "contains":
        return expected in answer
    if how == "json":
        return _same_json(expected, answer)
    if how == "tool_call":
        return same_calls(expected, parse_tool_calls(answer))
    raise ValueError(f"unknown check: {how}")


def parse_tool_calls(text: str) -> list[dict[str, Any]] | None:
    """The Hermes calls of an answer; None if one of them is not well formed."""
    calls = []
    for part in text.split("<tool_call>")[1:]:
        if "</tool_call>" not in part:
            return None
        try:
            call = json.loads(part.split("</tool_call>")[0])
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict):
            return None
        calls.append(call)
    return calls


def same_calls(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]] | None) -> bool:
    """Calls as {"name", "arguments"}; arguments may be an object or its JSON text, as over HTTP."""
    if found is None:
        return False
    return [(call["name"], _plain(call["arguments"])) for call in expected] == [
        (call.get("name"), _plain(call.get("arguments"))) for call in found
    ]


def _question(place: str, line: str) -> dict[str, Any]:
    try:
        question = json.loads(line)
        for name, holds in _FIELDS.items():
            if not holds(question):
                raise ValueError(f"{name} is {question.get(name)!r:.80}")
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"MODEL: {place} is no question ({error}); --questions 0 leaves them out") from None
    return dict(question)


def _is_expected(question: Mapping[str, Any]) -> bool:
    expected, how = question.get("expected"), question["check"]
    if how == "tool_call":
        return isinstance(expected, list) and all({"name", "arguments"} <= dict(call).keys() for call in expected)
    return isinstance(expected, list if how == "one_of" else str)


_FIELDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "family": lambda question: isinstance(question.get("family"), str),
    "messages": lambda question: isinstance(question.get("messages"), list),
    "check": lambda question: question.get("check") in _CHECKS,
    "expected": _is_expected,
}


def _without_reasoning(text: str) -> str:
    return text.rsplit("</think>", 1)[-1].strip()


def _same_json(expected: str, answer: str) -> bool:
    try:
        found, wanted = json.loads(answer), json.loads(expected)
    except ValueError:
        return False
    return bool(found == wanted and list(found) == list(wanted))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
