"""Conversations drawn at random, in the forms of the families of docs/models.md, as transformers renders them.

The templates are written for these tests after what the families document of their turns, tools and reasoning.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template  # type: ignore[import-untyped]

from app.api.chat.messages import ChatMessage
from app.errors import CheckpointError, InvalidRequestError
from app.text.chat_template import ChatTemplate
from tests.text.test_template_forms import SPECIAL, TOOLS

FAMILIES = {
    file.stem: file.read_text() for file in sorted((Path(__file__).parent / "family_templates").glob("*.jinja"))
}
WORDS = (
    "be brief",
    "Köln?",
    "1 < 2 & 3",
    '"quoted"',
    "{{ braces }}",
    "東京 🙂",
    "/no_think",
    "line\nline",
    "  spaces  ",
    "a\r\n\r\nb",
)


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """System or none; users and answers in turn, some with reasoning, some by calls of tools; sometimes out of turn."""

    def said() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))

    chat: list[dict[str, Any]] = [{"role": "system", "content": said()}] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        chat.append({"role": "user", "content": said()})
        if rng.random() < 0.3:
            names = [f"call{rng.randrange(10**5):05}" for _ in range(rng.randint(1, 2))]
            calls = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": said(), "days": 2}},
                }
                for name in names
            ]
            chat.append({"role": "assistant", "content": "", "tool_calls": calls})
            chat += [{"role": "tool", "tool_call_id": name, "name": "weather", "content": said()} for name in names]
        if rng.random() < 0.9:
            reasoning = {"reasoning_content": said()} if rng.random() < 0.4 else {}
            chat.append({"role": "assistant", "content": said(), **reasoning})
    return (
        chat if chat[-1]["role"] != "assistant" or rng.random() < 0.3 else [*chat, {"role": "user", "content": said()}]
    )


def sent(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a client sends it, with arguments as text, and as the template then gets it."""
    turns = []
    for turn in chat:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn.get("tool_calls", ())
        ]
        turns.append(ChatMessage.model_validate({**turn, **({"tool_calls": calls} if calls else {})}).for_template())
    return turns


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_are_rendered_as_transformers_does(family: str) -> None:
    rng = random.Random(family)
    template = ChatTemplate({"default": FAMILIES[family]}, SPECIAL)
    num_refused, seen = 0, set()
    for _ in range(40):
        chat, tools = conversation(rng), rng.choice([None, TOOLS])
        options = {"enable_thinking": rng.random() < 0.5}
        opens = chat[-1]["role"] != "assistant" and rng.random() < 0.8
        rules = {"tools": tools, "add_generation_prompt": opens, "documents": None}
        try:
            (expected,), _ = render_jinja_template(
                [chat], chat_template=FAMILIES[family], **rules, **options, **SPECIAL
            )
        except Exception:
            num_refused += 1
            with pytest.raises(InvalidRequestError, match="refuses this conversation"):
                template.render(sent(chat), tools=tools, add_generation_prompt=opens, chat_template_kwargs=options)
            continue
        ours = template.render(sent(chat), tools=tools, add_generation_prompt=opens, chat_template_kwargs=options)
        assert ours == expected
        seen.add(expected)
    assert len(seen) > 5, f"{num_refused} of 40 refused"


def test_chat_template_json(tmp_path: Path) -> None:
    """The file of processors: behind chat_template.jinja, before tokenizer_config.json; one template, or named ones."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    file = tmp_path / "chat_template.json"
    chat = [{"role": "user", "content": "x"}]

    def rendered(tools: list[dict[str, Any]] | None = None) -> str:
        return ChatTemplate.from_directory(tmp_path, _NoTokenizer()).render(chat, tools=tools)  # type: ignore[arg-type]

    assert rendered() == "config"
    file.write_text(json.dumps({"chat_template": "json"}))
    assert rendered() == "json"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    file.write_text(json.dumps({"chat_template": named}))
    assert (rendered(), rendered(TOOLS)) == ("plain", "tools")
    file.write_text(json.dumps({"chat_template": {entry["name"]: entry["template"] for entry in named}}))
    assert (rendered(), rendered(TOOLS)) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert rendered() == "jinja"
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in ("{", "[]", '{"chat_template": 3}', '{"chat_template": [{"name": "default"}]}'):
        file.write_text(wrong)
        with pytest.raises(CheckpointError, match=r"chat_template\.json"):
            rendered()


class _NoTokenizer:
    special_tokens = SPECIAL
