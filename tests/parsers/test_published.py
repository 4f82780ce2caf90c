"""The parsers against chat templates as their models publish them, which are not ours to keep here.

    PUBLISHED_TEMPLATES=folder pytest tests/parsers/test_published.py

reads every *.jinja below the folder whose form a parser knows. What a template leaves out of an assistant's turn
(text beside a call, earlier reasoning, calls beyond the first) is not asked of the parser.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template  # type: ignore[import-untyped]

from app.api.chat.messages import ChatMessage
from app.errors import InvalidRequestError
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser_name, tool_parser_name
from app.parsers.answer import AnswerParser
from app.parsers.base import ParsedAnswer
from app.text.chat_template import ChatTemplate
from tests.parsers.conftest import ANSWERS, TOOLS, Calls, cut

FOLDER = os.environ.get("PUBLISHED_TEMPLATES", "")
FOUND = sorted(Path(FOLDER).rglob("*.jinja")) if FOLDER else []
PATHS = [path for path in FOUND if "llama-cpp" not in path.name and tool_parser_name(path.read_text("utf-8"))]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = ("</s>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>", "<|end_of_text|>", "<sep>")
ENDS += ("<｜end▁of▁sentence｜>", "<SPECIAL_12>")
NESTED: Calls = [("search.files-v2", {"options": {"depth": 2, "a": [1, {"b": None, "c": "é"}]}, "patterns": ["<b>"]})]
TOOL_LIST = [
    {"type": "function", "function": {"name": name, "description": "It works.", "parameters": schema}}
    for name, schema in TOOLS.items()
]

pytestmark = pytest.mark.skipif(not PATHS, reason="PUBLISHED_TEMPLATES names no folder with such templates")


def conversation(reasoning: str, content: str, calls: Calls) -> list[dict[str, Any]]:
    """A question and an answer as a client sends them, as templates get them."""
    answer: dict[str, Any] = {"role": "assistant", "content": content or None, "reasoning": reasoning or None}
    answer["tool_calls"] = [
        {"id": f"abcDEF12{i}", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    turns = [{"role": "user", "content": "Question?"}, answer]
    return [ChatMessage.model_validate(turn).for_template() for turn in turns]


class Published:
    """One template, and the parsers of its form."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_text(encoding="utf-8")
        self.template = ChatTemplate({"default": self.source}, SPECIAL)
        self.tools = TOOL_PARSERS.load(tool_parser_name(self.source) or "")
        name = reasoning_parser_name(self.source)
        reasoning = REASONING_PARSERS.load(name) if name else None
        self.is_harmony = reasoning is not None and reasoning.markers == self.tools.markers
        self.reasoning = None if self.is_harmony else reasoning

    def turn(self, chat: list[dict[str, Any]]) -> tuple[str, bool]:
        """What the model would have written, and whether the prompt has opened the reasoning for it."""
        prompt = self.template.render(chat[:1], tools=TOOL_LIST)
        whole = self.template.render(chat, tools=TOOL_LIST, add_generation_prompt=False)
        pairs = zip(prompt, whole, strict=False)
        size = next((i for i, (mine, other) in enumerate(pairs) if mine != other), len(prompt))
        if size < len(prompt):  # the prompt opens reasoning that the answer does not have; cut before that marker
            size = prompt.rfind("<", 0, size + 1)
        text = whole[size:].rstrip("\n")
        text = next((text.removesuffix(end) for end in ENDS if text.endswith(end)), text)
        return text, self.reasoning is not None and self.reasoning.starts_inside(whole[:size], None)

    def parse(self, pieces: list[str], inside: bool) -> ParsedAnswer:
        """The answer that the pieces make."""
        reasoning = self.reasoning(inside) if self.reasoning is not None else None
        parser, answer = AnswerParser(reasoning, self.tools(TOOLS), None), ParsedAnswer()
        for piece in pieces:
            answer.add(parser.push(piece))
        answer.add(parser.flush())
        return answer


def said(text: str, turn: str) -> str:
    """The text, where the template has kept it."""
    return text.strip() if text and text.strip()[:5] in turn else ""


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_a_published_template_writes_is_read(path: Path) -> None:
    published, num_read, num_calls = Published(path), 0, 0
    for reasoning, content, calls in [*ANSWERS, ("", "", NESTED)]:
        chat = conversation(reasoning, content, calls)
        try:
            turn, inside = published.turn(chat)
        except InvalidRequestError:
            assert len(calls) > 1, "only several calls may be refused"
            continue
        if any(end in turn for end in ENDS) or ("'" in json.dumps(calls) and '"\'" + arg_value' in published.source):
            continue  # the answer ends in its middle; or quotes in quotes, as LFM2.5's template writes them
        expected = [call for call in calls if call[0] in turn][: 1 if published.is_harmony else None]
        whole = published.parse([turn], inside)
        assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == expected, turn
        texts = {whole.reasoning.strip(), whole.content.strip()} - {""}
        assert texts == {said(reasoning, turn), said(content, turn)} - {""}, turn
        if not published.is_harmony or not calls:  # gpt-oss's template calls the text beside a call reasoning
            assert whole.content.strip() == said(content, turn)
        assert not any(marker in whole.content + whole.reasoning for marker in published.tools.markers)
        for seed in range(20):
            assert published.parse(cut(list(turn), seed), inside) == whole, f"seed {seed}: {turn}"
        num_read += 1
        num_calls += len(expected)
    assert num_read >= 8
    assert num_calls >= 4


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_a_client_sends_back_is_what_the_template_expects(path: Path) -> None:
    """Calls and their results, sent as OpenAI's clients do, give what transformers gives for objects or for text."""
    published = Published(path)
    arguments = {"city": 'Köln "x"', "days": 2}
    chat = conversation("", "", [("get_weather", arguments)])
    result = {"role": "tool", "tool_call_id": "abcDEF120", "name": "get_weather", "content": 'RESULT "q"'}
    ours = published.template.render([*chat, result], tools=TOOL_LIST)
    assert "RESULT" in ours
    expected = []
    for value in (arguments, json.dumps(arguments, ensure_ascii=False)):
        for content in (None, ""):
            call = {"id": "abcDEF120", "type": "function", "function": {"name": "get_weather", "arguments": value}}
            turns = [chat[0], {"role": "assistant", "content": content, "tool_calls": [call]}, result]
            options = {"tools": TOOL_LIST, "chat_template": published.source, "add_generation_prompt": True, **SPECIAL}
            try:
                expected.append(render_jinja_template([turns], **options)[0][0])
            except Exception as error:  # such as text added to an object
                expected.append(f"refused: {error}")
    assert ours in expected
    assert '{\\"city' not in ours, "JSON inside a string"
