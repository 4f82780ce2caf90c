"""A structured output has reasoning before it where the model was asked to think or may think unasked, else none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.checkpoints.model_info import ASSETS
from app.config.limits import RequestLimits
from app.structured.reasoning import ReasoningSpan
from app.text.chat_template import ChatTemplate
from tests.api.conftest import ScriptedClient, served

HI = [{"role": "user", "content": "hi"}]
CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 10}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
FORMAT = {"max_tokens": 50, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
# Opens the reasoning when it is told to; closes it when it is told not to; leaves it to the model; knows no thinking.
WHEN_TOLD = "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
UNLESS_TOLD = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
HINT = "{% if enable_thinking is defined and enable_thinking %}Think.{% endif %}"


def asked(template: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """The engine's request for a body, to a model that thinks in the way of `template`."""
    model = served(ASSETS / "tiny-chat", "tiny")
    source = "<|im_start|>{{ messages[-1].content }}" + template + "{# </think> #}"
    client = ScriptedClient(
        replace(model, chat_template=ChatTemplate({"default": source}, {}), reasoning_parser="think")
    )

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(client, RequestLimits()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, json={"model": "tiny", "messages": HI, **body})

    response = asyncio.run(send())
    assert response.status_code == 200, response.text
    return client.requests[-1]


@pytest.mark.parametrize(
    ("template", "body", "may_open"),
    [
        (WHEN_TOLD, {}, False),
        (WHEN_TOLD, {"reasoning_effort": "none"}, False),
        (WHEN_TOLD, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        (UNLESS_TOLD, {}, True),
        (UNLESS_TOLD, {"reasoning_effort": "none"}, False),
        (UNLESS_TOLD, {"reasoning_effort": "high"}, True),
        ("", {}, True),
        ("", {"reasoning_effort": "none"}, False),
        ("", {"chat_template_kwargs": {"thinking": False}}, False),
        (HINT, {"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_who_may_open_reasoning_before_a_choice(template: str, body: dict[str, Any], may_open: bool) -> None:
    span = asked(template, {**CHOICE, **body}).asked(ReasoningSpan)
    assert (span is not None and span.start_token_id is not None) is may_open


def test_reasoning_that_the_prompt_has_opened_stays() -> None:
    span = asked(WHEN_TOLD, {**CHOICE, "reasoning_effort": "high"}).asked(ReasoningSpan)
    assert span is not None
    assert span.start_token_id is None


@pytest.mark.parametrize("template", [WHEN_TOLD, UNLESS_TOLD, ""])
def test_messages_without_thinking_begin_with_text(template: str) -> None:
    path = "/v1/messages"
    assert asked(template, FORMAT, path).asked(ReasoningSpan) is None
    if template:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        assert asked(template, {**FORMAT, "thinking": thinking}, path).asked(ReasoningSpan)


def test_the_built_in_model_thinks_when_it_is_asked(tmp_path: Path) -> None:
    template = ChatTemplate.from_directory(ASSETS / "tiny-chat")
    assert not template.thinks_unasked
    assert ChatTemplate({"default": "{{ raise_exception('enable_thinking') }}"}, {}).thinks_unasked
