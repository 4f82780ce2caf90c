"""What /render gives runs on /inference/v1/generate as the request itself does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.5, "seed": 3},
    {"messages": [{"role": "user", "content": "hi"}], "stop": ["x"], "logprobs": True, "top_logprobs": 2, "n": 2},
    {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}, "max_tokens": 5},
    {"messages": [{"role": "user", "content": "hi"}], "tools": [ADD], "tool_choice": "required", "max_tokens": 5},
    {"messages": [{"role": "user", "content": "hi"}], "cache_salt": "s", "priority": 3, "logit_bias": {"5": 1}},
]


@pytest.mark.parametrize("body", CHATS)
def test_a_rendered_chat_runs_as_the_chat_does(http: httpx.Client, client: Any, body: dict[str, Any]) -> None:
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    asked = client.requests[-1]
    rendered = http.post("/v1/chat/completions/render", json=body)
    assert rendered.status_code == 200, rendered.text
    assert client.requests[-1] is asked, "nothing runs"
    answer = http.post("/inference/v1/generate", json=rendered.json())
    assert answer.status_code == 200, answer.text
    ran = client.requests[-1]
    assert ran.prompt_token_ids == asked.prompt_token_ids
    given = {"seed"} if "seed" not in body else set()
    assert ran.sampling.model_dump(exclude=given) == asked.sampling.model_dump(exclude=given)
    assert (ran.placement.priority, ran.placement.cache_root) == (asked.placement.priority, asked.placement.cache_root)


def test_each_prompt_of_a_completion_is_rendered(http: httpx.Client, client: Any) -> None:
    body = {"prompt": ["The quick", "fox"], "max_tokens": 4, "temperature": 0}
    assert http.post("/v1/completions", json=body).status_code == 200
    asked = {tuple(request.prompt_token_ids) for request in client.requests}
    rendered = http.post("/v1/completions/render", json=body).json()
    assert {tuple(each["token_ids"]) for each in rendered} == asked
    assert [each["sampling_params"]["max_tokens"] for each in rendered] == [4, 4]


def test_faults_are_those_of_the_request(http: httpx.Client) -> None:
    hi = CHATS[0]["messages"]
    for fields, param in (({"n": 500}, "n"), ({"use_beam_search": True}, "use_beam_search"), ({"foo": 1}, "foo")):
        answer = http.post("/v1/chat/completions/render", json={"messages": hi, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
