"""/v1/messages as Anthropic's SDK sees it: shapes, order of events, tools, stops, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from anthropic import beta_tool

from app.api.server.app import create_app
from app.config.limits import RequestLimits

HI: Any = [{"role": "user", "content": "hi"}]
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
Say = Callable[[str], None]
PromptOf = Callable[[], str]


def ask(claude: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    message = claude.messages.create(**{"model": "m", "max_tokens": 200, "messages": HI, **fields})
    assert isinstance(message, anthropic.types.Message)
    return message


def test_an_answer(claude: anthropic.Anthropic, say: Say, prompt_of: PromptOf) -> None:
    say("The quick brown fox.")
    message = ask(claude, system="Be brief.")
    assert message.content[0].to_dict() == {"type": "text", "text": "The quick brown fox."}
    assert (message.role, message.type, message.model, message.stop_reason) == ("assistant", "message", "m", "end_turn")
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens > 3
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt_of()


def test_count_tokens_equals_usage(claude: anthropic.Anthropic, say: Say) -> None:
    say("yes")
    fields: Any = {"messages": HI, "system": [{"type": "text", "text": "Be brief."}], "tools": [ADD]}
    usage = ask(claude, **fields).usage
    assert usage.cache_read_input_tokens
    counted = claude.messages.count_tokens(model="m", **fields).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_the_order_of_events(claude: anthropic.Anthropic, say: Say, http: httpx.Client) -> None:
    say(f"Let me add. {CALL}")
    body = {"model": "m", "max_tokens": 200, "messages": HI, "tools": [ADD], "stream": True}
    lines = http.post("/v1/messages", json=body).text.splitlines()
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    datas = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [data["type"] for data in datas]
    assert [name for i, name in enumerate(named) if i == 0 or name != named[i - 1]] == [
        "message_start",
        "ping",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    assert datas[0]["message"]["content"] == []
    assert [d["index"] for d in datas if d["type"] == "content_block_start"] == [0, 1]
    assert datas[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert datas[-2]["usage"]["output_tokens"] > 10


@pytest.mark.parametrize("text", ["The quick brown fox 🙂.", f"Let me add.\n{CALL}", f"{CALL}{CALL}", ""])
def test_streamed_equals_collected(claude: anthropic.Anthropic, say: Say, text: str) -> None:
    say(text)
    whole = ask(claude, tools=[ADD])
    with claude.messages.stream(model="m", max_tokens=200, messages=HI, tools=[ADD]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()

    def seen(message: Any) -> Any:
        content = [{k: v for k, v in block.to_dict().items() if k != "id"} for block in message.content]
        return content, message.stop_reason, message.stop_sequence, message.usage.to_dict()

    assert seen(final) == seen(whole)
    if CALL in text:
        assert whole.stop_reason == "tool_use"
        assert whole.content[-1].to_dict()["input"] == {"a": 1, "b": 2}
        assert whole.content[-1].to_dict()["id"].startswith("toolu_")


def test_a_tool_s_result_goes_back(claude: anthropic.Anthropic, say: Say, prompt_of: PromptOf) -> None:
    say("3")
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "three"}]}
    turns: Any = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "Adding."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    ask(claude, messages=turns, tools=[ADD])
    prompt = prompt_of()
    assert (
        '<|im_start|>assistant\nAdding.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>' in prompt
    )
    assert "<|im_start|>tool\nthree<|im_end|>\n<|im_start|>user\nSo?<|im_end|>" in prompt
    result["is_error"] = True
    ask(claude, messages=turns, tools=[ADD])
    assert "<|im_start|>tool\nError: three<|im_end|>" in prompt_of()


def test_the_tool_runner(claude: anthropic.Anthropic, client: Any, served_model: Any) -> None:
    @beta_tool
    def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    def script(request: Any) -> list[int]:
        prompt = served_model.tokenizer.decode(request.prompt_token_ids, False)
        text = "It is 3." if "<|im_start|>tool\n3<|im_end|>" in prompt else CALL
        return list(served_model.tokenizer.encode(text, False))

    client.script = script
    runner = claude.beta.messages.tool_runner(model="m", max_tokens=200, tools=[add], messages=HI)
    final = runner.until_done()
    assert final.content[0].to_dict()["text"] == "It is 3."
    assert len(client.requests) == 2  # the runner asked for a thread first, was refused, and did without


def test_at_most_one_call_where_asked_for(claude: anthropic.Anthropic, say: Say) -> None:
    say(CALL + CALL)
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(claude, tools=[ADD], tool_choice=choice).content) == 1
    assert len(ask(claude, tools=[ADD]).content) == 2
    none: Any = {"type": "none"}
    assert ask(claude, tools=[ADD], tool_choice=none).content[0].type == "text"


def test_why_it_stopped(claude: anthropic.Anthropic, say: Say) -> None:
    say("one, two, three")
    stopped = ask(claude, stop_sequences=["three", "two"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    assert stopped.content[0].to_dict()["text"] == "one, "
    cut = ask(claude, max_tokens=2)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 2)
    say("the fox " * 400)
    assert ask(claude, max_tokens=100_000).stop_reason == "model_context_window_exceeded"


def test_an_assistant_s_last_message_is_continued(claude: anthropic.Anthropic, say: Say, prompt_of: PromptOf) -> None:
    say(" fox")
    ask(claude, messages=[*HI, {"role": "assistant", "content": "The quick"}])
    assert prompt_of().endswith("<|im_start|>assistant\nThe quick")


def test_sampling(claude: anthropic.Anthropic, client: Any) -> None:
    extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    ask(claude, extra_body=extra, metadata={"user_id": "u"})
    params = client.requests[-1].sampling
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 200)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"container": "c"}, "container: there are no containers"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.source"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "content.0.source"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}, "redacted"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [ADD, ADD]}, "unique"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "'sub' is not one of the tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "name"),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences: 5 stop strings; at most 4"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"speed": "fast"}, "speed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], words: str, stream: bool) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": HI, "stream": stream, **fields}
    response = http.post("/v1/messages", json=body)
    assert response.status_code == 400
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}])
def test_a_model_that_cannot_think_answers_who_asks_it_to(
    claude: anthropic.Anthropic, say: Say, client: Any, thinking: Any
) -> None:
    """Agents send `thinking` to whatever model they were given."""
    say("The quick brown fox.")
    answer = ask(claude, thinking=thinking)
    assert [block.to_dict()["text"] for block in answer.content] == ["The quick brown fox."]
    with claude.messages.stream(model="m", max_tokens=200, messages=HI, thinking=thinking) as stream:
        assert stream.get_final_text() == "The quick brown fox."
    assert all(request.sampling.thinking_token_budget is None for request in client.requests)
    count = claude.messages.count_tokens
    assert count(model="m", messages=HI, thinking=thinking) == count(model="m", messages=HI)


def test_other_errors_keep_the_shape(claude: anthropic.Anthropic, http: httpx.Client, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        ask(claude, model="nobody")
    assert missing.value.request_id
    assert http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    large = http.post("/v1/messages", content=b" " * 300_000)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    long: Any = [{"role": "user", "content": "the fox " * 600}]
    with pytest.raises(anthropic.BadRequestError, match="context"):
        ask(claude, messages=long)
    client.fail_after = (2, RuntimeError("broken"))
    with (
        pytest.raises(anthropic.APIStatusError, match="internal server error"),
        claude.messages.stream(model="m", max_tokens=200, messages=HI) as stream,
    ):
        stream.until_done()
    assert client.num_running == 0


def test_the_asynchronous_sdk_in_process(client: Any, say: Say) -> None:
    say("The quick brown fox.")

    async def talk() -> tuple[str, str]:
        transport = httpx2.ASGITransport(create_app(client, RequestLimits()))
        http = httpx2.AsyncClient(transport=transport, base_url="http://test")
        async with anthropic.AsyncAnthropic(api_key="none", base_url="http://test", http_client=http) as sdk:
            message = await sdk.messages.create(model="m", max_tokens=50, messages=HI)
            async with sdk.messages.stream(model="m", max_tokens=50, messages=HI) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            return str(message.content[0].to_dict()["text"]), text

    assert asyncio.run(talk()) == ("The quick brown fox.", "The quick brown fox.")
