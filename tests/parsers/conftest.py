"""Answers, and the transcripts of them that small templates in the models' published forms write."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.api.chat.messages import ChatMessage
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS
from app.parsers.answer import AnswerParser
from app.parsers.base import ParsedAnswer
from app.text.chat_template import ChatTemplate
from tests.api.conftest import make_client, model_dir, serve, serve_model, served_model, write_model_dir

__all__ = [
    "make_client",
    "model_dir",
    "serve",
    "serve_model",
    "served_model",
    "write_model_dir",
]  # fixtures, shared with the API

FOLDER = Path(__file__).parent / "transcripts"

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
    "search.files-v2": {
        "type": "object",
        "properties": {
            "patterns": {"type": "array", "items": {"type": "string"}},
            "options": {"$ref": "#/$defs/options"},
            "limit": {"type": "number"},
            "text": {"type": "string"},
        },
        "$defs": {"options": {"type": "object", "properties": {"depth": {"type": "integer"}}}},
    },
    "now": {"type": "object", "properties": {}},
}

Calls = list[tuple[str, dict[str, Any]]]
ANSWERS: list[tuple[str, str, Calls]] = [
    ("", "Plain words: a < b, {x}, [y] and `code`.", []),
    ("", "", [("now", {})]),
    ("", "", [("get_weather", {"city": "Paris", "days": 3, "metric": True})]),
    ("", "", [("get_weather", {"city": "Köln 東京 🙂", "note": None}), ("now", {}), ("get_weather", {"city": ""})]),
    ("", "I will look it up.", [("get_weather", {"city": 'Osnabrück\nsecond line\n\tthird "quoted" \\ back'})]),
    ("", "Two\n\nparagraphs, then a call.", [("search.files-v2", {"patterns": ["*.py", "a]b}c"], "limit": -2.5})]),
    ("Short thought.", "Answer.", []),
    ('First this.\n\nThen <that>, {"a": 1}.', "", [("search.files-v2", {"options": {"depth": 2}, "text": "{[("})]),
    ("Hmm 🙂", "Calling.", [("get_weather", {"city": "Rome", "days": 0, "metric": False}), ("now", {})]),
    ("", "", [("search.files-v2", {"patterns": [], "text": "if a < b and b > c: print('x', \"y\")  # </tool> ]"})]),
    ("", "Ends in {", []),
    ("A thought that names no tool and goes on for a while, over\nseveral\n\nlines.", "Long answer. " * 20, []),
]


@dataclass(frozen=True)
class Kind:
    """One way in which some models write: parsers, template, what the template is told."""

    tools: str
    reasoning: str | None
    template: str
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.template, *self.options))


KINDS = [
    Kind("hermes", "think", "hermes"),
    Kind("llama3_json", None, "llama3_json"),
    Kind("llama3_json", None, "llama3_json", ("tagged",)),
    Kind("mistral", "mistral", "mistral"),
    Kind("mistral", "mistral", "mistral_args"),
    Kind("mistral", "mistral", "mistral_args", ("numbered",)),
    Kind("qwen3_coder", "think", "qwen3_coder"),
    Kind("deepseek_v3", "think", "deepseek_v3"),
    Kind("deepseek_v31", "think", "deepseek_v31"),
    Kind("pythonic", None, "pythonic"),
    Kind("pythonic", None, "pythonic", ("marked",)),
    Kind("pythonic", "think", "pythonic", ("lfm",)),
    Kind("harmony", None, "harmony"),
    Kind("harmony", None, "harmony", ("in_role",)),
    Kind("seed_oss", "seed_oss", "seed_oss"),
    Kind("minimax_m2", "think", "minimax_m2"),
    Kind("glm45", "think", "glm"),
    Kind("glm47", "think", "glm", ("tight",)),
]


@dataclass(frozen=True)
class Transcript:
    """What a model would have written, and what that says."""

    kind: Kind
    text: str
    reasoning: str
    content: str
    calls: Calls


def transcripts(kind: Kind) -> Iterator[Transcript]:
    """Every answer that this kind of model can give, in its form."""
    template = ChatTemplate({"default": (FOLDER / f"{kind.template}.jinja").read_text(encoding="utf-8")}, {})
    for reasoning, content, calls in ANSWERS:
        if reasoning and kind.reasoning is None and kind.tools != "harmony":
            continue
        if content and calls and kind.tools in ("llama3_json", "pythonic") and not kind.options:
            continue  # such models say nothing beside a call that has no marker
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [{"function": {"name": n, "arguments": dict(a)}} for n, a in calls]
        turn = ChatMessage.model_validate(message).for_template()
        options = dict.fromkeys(kind.options, True)
        text = template.render([turn], add_generation_prompt=False, chat_template_kwargs=options)
        yield Transcript(kind, text, reasoning, content, calls)


def new_parser(kind: Kind, inside: bool = False) -> AnswerParser:
    """The parsers of a kind, composed as the server does it."""
    reasoning = REASONING_PARSERS.load(kind.reasoning)(inside) if kind.reasoning is not None else None
    return AnswerParser(reasoning, TOOL_PARSERS.load(kind.tools)(TOOLS), None)


def parse(kind: Kind, pieces: list[str], inside: bool = False) -> ParsedAnswer:
    """The answer that the pieces make."""
    parser, answer = new_parser(kind, inside), ParsedAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.flush())
    return answer


def cut(units: list[str], seed: int) -> list[str]:
    """Units (characters, or the texts of tokens) in random pieces of 1 to 7."""
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(units):
        size = rng.randint(1, 7)
        pieces.append("".join(units[at : at + size]))
        at += size
    return pieces


@pytest.fixture(scope="session")
def all_transcripts() -> list[Transcript]:
    return [transcript for kind in KINDS for transcript in transcripts(kind)]
