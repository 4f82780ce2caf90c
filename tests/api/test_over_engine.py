"""The whole way on one machine: SDK, HTTP, AsyncEngine, workers, tiny-chat. transformers is the judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pydantic
import pytest

from app.checkpoints.model_info import ModelInfo
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.limits import patience_s, wait_until

QUESTIONS = [
    "hi",
    "What is 12 + 30?",
    "Reverse the word 'lantern'.",
    "Grüße 🙂, wie geht's?",
    "Count from 1 to 30.",
    'Spell "manta" \\ with "quotes"\n and lines.',
    "東京 नमस्ते 👩‍👩‍👧",
    "Who are you?",
]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineInThisProcess]:
    client = EngineInThisProcess()
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


@pytest.fixture(scope="module")
def reference() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    path = ModelInfo.from_directory("tiny-chat").directory
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_streamed_equals_collected(sdk: openai.OpenAI) -> None:
    for i in (0, 3, 5, 6):
        messages: Any = [{"role": "user", "content": QUESTIONS[i]}]
        body: Any = {"model": "tiny-chat", "messages": messages, "max_tokens": 40, "seed": i, "temperature": i % 2}
        whole = sdk.chat.completions.create(**body)
        chunks = list(sdk.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == whole.choices[0].finish_reason


def test_greedy_answers_equal_transformers(http: httpx.Client, engine: EngineInThisProcess, reference: Any) -> None:
    import torch

    tokenizer = engine.models["tiny-chat"].tokenizer
    for question in QUESTIONS[:4]:
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
        answer = http.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
        ids = torch.tensor([answer["prompt_token_ids"]])
        expected = reference.generate(ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))
        new = expected[0, ids.shape[1] :].tolist()
        assert answer["choices"][0]["token_ids"] == new
        assert answer["choices"][0]["message"]["content"] == tokenizer.decode(new)


def test_prompt_scoring_equals_transformers(sdk: openai.OpenAI, engine: EngineInThisProcess, reference: Any) -> None:
    import torch

    prompt = "The quick brown fox jumps over 12 lazy dogs 🙂."
    scored = sdk.completions.create(model="tiny-chat", prompt=prompt, echo=True, logprobs=2, max_tokens=0).choices[0]
    ids = torch.tensor([engine.models["tiny-chat"].tokenizer.encode(prompt)])
    with torch.no_grad():
        expected = torch.log_softmax(reference(ids).logits[0, :-1].double(), -1)
    assert scored.text == prompt
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.top_logprobs is not None
    chosen = expected[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(chosen.tolist(), abs=1e-4)
    for entry, row in zip(scored.logprobs.top_logprobs[1:], expected, strict=True):
        top = sorted(entry.values(), reverse=True)[:2]
        assert top == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_a_seed_gives_the_same_answer_and_choices_differ(sdk: openai.OpenAI) -> None:
    body: Any = {"model": "tiny-chat", "prompt": "Once upon", "max_tokens": 12, "temperature": 1.5, "n": 3, "seed": 5}
    first, second = (sdk.completions.create(**body) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1
    alone = sdk.completions.create(**{**body, "n": 1})
    assert alone.choices[0].text == texts[0]


def test_a_disconnect_frees_the_blocks(server: Any, engine: EngineInThisProcess) -> None:
    body = {"prompt": "Count to a thousand", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()  # one that nobody holds any more closes the connection
        for _ in range(8):
            line = next(lines)
            assert line == "" or line.startswith("data: ")
        assert engine.engine.stats().num_running == 1
    wait_until(lambda: engine.engine.stats().num_free_blocks == engine.engine.stats().num_blocks)
    assert engine.engine.stats().num_running == 0


QUESTION = "What is 12 + 30?"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


class Verdict(pydantic.BaseModel):
    ok: bool
    count: Literal["one", "two"]


def test_anthropic_s_sdk_thinks_calls_and_answers(server: Any) -> None:
    greedy: Any = {"model": "tiny-chat", "max_tokens": 200, "extra_body": {"temperature": 0}}
    messages: Any = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as sdk:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        whole = sdk.messages.create(**greedy, messages=messages, thinking=thinking)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        with sdk.messages.stream(**greedy, messages=messages, thinking=thinking) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0].to_dict() == whole.content[0].to_dict()
        assert streamed.content[1].to_dict()["text"] == whole.content[1].to_dict()["text"]
        hidden = sdk.messages.create(**greedy, messages=messages, thinking={**thinking, "display": "omitted"})
        assert hidden.content == whole.content[1:]

        tools: Any = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]
        for choice in ("auto", "any"):
            tool_choice: Any = {"type": choice}
            asked = sdk.messages.create(**greedy, messages=messages, tools=tools, tool_choice=tool_choice)
            assert asked.stop_reason == "tool_use"
            assert asked.content[-1].to_dict()["input"] == {"a": 12, "b": 30}
        result = {"type": "tool_result", "tool_use_id": asked.content[-1].to_dict()["id"], "content": "42"}
        turns = [*messages, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        answered = sdk.messages.create(**greedy, messages=turns, tools=tools)
        assert "42" in answered.content[0].to_dict()["text"]
        parsed = sdk.messages.parse(**greedy, messages=messages, output_format=Verdict)
        assert isinstance(parsed.parsed_output, Verdict)


def test_responses_think_call_and_follow_a_schema(sdk: openai.OpenAI) -> None:
    greedy: Any = {"model": "tiny-chat", "temperature": 0, "max_output_tokens": 200}
    thinks: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    whole = sdk.responses.create(**greedy, input=QUESTION, **thinks)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    summary: Any = {"summary": "auto"}
    with sdk.responses.stream(**greedy, input=QUESTION, reasoning=summary, **thinks) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    assert "response.reasoning_summary_text.delta" in kinds
    assert streamed.output_text == whole.output_text
    reasoning: Any = whole.output[0]
    shown: Any = streamed.output[0]
    assert shown.summary[0].text == reasoning.content[0].text

    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
    asked = sdk.responses.create(**greedy, input=QUESTION, tools=tools, tool_choice="required")
    call: Any = asked.output[-1]
    assert json.loads(call.arguments) == {"a": 12, "b": 30}
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
    answered = sdk.responses.create(**greedy, input=output, previous_response_id=asked.id, tools=tools)
    assert "42" in answered.output_text
    parsed = sdk.responses.parse(**greedy, input=QUESTION, text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)


def _hostile(i: int) -> tuple[dict[str, Any], set[int]]:
    """A body that asks for much work, and how it may be answered."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTIONS[4]}], "max_tokens": 24, "seed": i}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return [
        (chat | {"stop": ["x" * 1024] * 4}, {200}),
        (chat | {"stop": ["x" * 100_000]}, {400}),
        (chat | {"bad_words": [f"word {j}" for j in range(128)]}, {200}),
        (chat | {"bad_words": [f"word {j}" for j in range(5000)]}, {400}),
        (chat | {"n": 8}, {200}),
        (chat | {"n": 10**6}, {400}),
        (chat | {"structured_outputs": {"regex": "(a{1,500}){1,500}b"}}, {200, 400}),
        (chat | {"structured_outputs": {"json": json.dumps(deep)}}, {400}),
        (chat | {"messages": [{"role": "user", "content": "long words, " * 10_000}]}, {400}),
        (chat | {"logit_bias": {str(j): 1 for j in range(1000)}, "user": "u" * 4000}, {200, 400}),
    ][i]


def test_hostile_neighbours_are_refused_or_wait_and_others_are_served(server: Any) -> None:
    """Cheap requests that come in the midst of them give what they give alone, and nothing is left running."""
    cheap = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": 12, "temperature": 0}

    async def send() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=patience_s()) as http:
            path = "/v1/chat/completions"
            alone = (await http.post(path, json=cheap)).json()["choices"][0]["message"]
            hostile = [asyncio.ensure_future(http.post(path, json=_hostile(i)[0])) for i in range(10)]
            for _ in range(4):
                answer = await http.post(path, json=cheap)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["message"] == alone
            for i, answer in enumerate(await asyncio.gather(*hostile)):
                assert answer.status_code in _hostile(i)[1], (i, answer.text[:300])

    asyncio.run(send())
