"""Where the budget of reasoning begins to count."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import pytest

from app.records.thinking_budget import ThinkingBudget
from tests import limits

PAST = "<think>x</think>" + "The answer goes on and on, over more tokens than a prompt's end has. " * 3


@pytest.mark.parametrize(
    ("parser", "said", "is_inside"),
    [
        ("think", "<think>Let me", True),
        ("think", PAST, False),
        ("think", None, False),
        ("deepseek_r1", PAST, False),
        ("deepseek_r1", None, True),
    ],
)
def test_a_continued_message_says_whether_reasoning_is_open(
    served_model: Any, make_client: Any, serve: Any, parser: str, said: str | None, is_inside: bool
) -> None:
    """A budget whose reasoning is open counts from the first token; any other begins at the marker that opens one."""
    client = make_client(dataclasses.replace(served_model, reasoning_parser=parser))
    messages = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"thinking_token_budget": 3, "max_tokens": 5}
    if said is not None:
        messages.append({"role": "assistant", "content": said})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    with httpx.Client(base_url=serve(client).url, timeout=limits.patience_s()) as http:
        answer = http.post("/v1/chat/completions", json={**body, "messages": messages})
    assert answer.status_code == 200, answer.text
    budget = client.requests[-1].asked(ThinkingBudget)
    assert (budget.num_tokens, budget.opening == ()) == (3, is_inside)
