"""Beam search and best_of through the real SDK over an engine; transformers judges the beams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from app.api.chat.beam_search import BeamSearchClient
from app.api.engine_client import RouteInfo
from app.beams.search import BeamSearchParams
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.limits import until, wait_until
from tests.tiny_models import hf_model

PROMPTS = ["Hello, my name is", "The capital of the country is a city that"]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineInThisProcess]:
    client = EngineInThisProcess()
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


@pytest.fixture(scope="module")
def reference(engine: EngineInThisProcess) -> Any:
    return hf_model(engine.models["tiny-chat"].info.directory)


def judge(reference: Any, token_ids: list[int], width: int, n: int, max_tokens: int, **options: Any) -> list[list[int]]:
    """The `n` best of `width` beams by transformers, without padding."""
    import torch

    ids = torch.tensor([token_ids])
    found = reference.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=n, max_new_tokens=max_tokens,
        do_sample=False, pad_token_id=0, **options,
    )  # fmt: skip
    eos = reference.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    rows = [row[len(token_ids) :].tolist() for row in found]
    return [next((row[: i + 1] for i, token in enumerate(row) if token in ends), row) for row in rows]


def test_completions_are_transformers_beams(sdk: openai.OpenAI, engine: Any, reference: Any) -> None:
    extra = {"use_beam_search": True, "length_penalty": 0.6, "early_stopping": "never", "return_token_ids": True}
    whole: Any = sdk.completions.create(
        model="tiny-chat", prompt=PROMPTS, n=2, best_of=4, max_tokens=12, temperature=0, logprobs=2, extra_body=extra
    )
    tokenizer = engine.models["tiny-chat"].tokenizer
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for i, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt)
        expected = judge(reference, ids, 4, 2, 12, length_penalty=0.6, early_stopping="never")
        mine = whole.choices[2 * i : 2 * i + 2]
        assert [choice.token_ids for choice in mine] == expected
        for choice, beam in zip(mine, expected, strict=True):
            assert choice.text == tokenizer.decode(beam)
            assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == len(beam)
            assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    shown = sum(len(choice.token_ids) for choice in whole.choices)
    assert whole.usage.completion_tokens == shown
    assert whole.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in PROMPTS)


def test_chat_answers_with_the_best_beams(sdk: openai.OpenAI, engine: Any, reference: Any) -> None:
    messages: Any = [{"role": "user", "content": "Who are you?"}]
    extra = {"use_beam_search": True, "return_token_ids": True, "prompt_logprobs": 0}
    whole: Any = sdk.chat.completions.create(
        model="tiny-chat", messages=messages, n=3, max_tokens=16, logprobs=True, extra_body=extra
    )
    expected = judge(reference, whole.prompt_token_ids, 3, 3, 16)
    assert [choice.token_ids for choice in whole.choices] == expected
    tokenizer = engine.models["tiny-chat"].tokenizer
    assert whole.choices[0].message.content == tokenizer.decode(expected[0])
    for choice, beam in zip(whole.choices, expected, strict=True):  # reasoning is told apart, as in any answer
        assert (choice.message.content or choice.message.reasoning) in tokenizer.decode(beam)
    assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids)
    assert [len(choice.logprobs.content) for choice in whole.choices] == [len(beam) for beam in expected]


def test_best_of_shows_the_most_likely(sdk: openai.OpenAI, http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "tiny-chat", "prompt": PROMPTS, "max_tokens": 8, "seed": 3, "temperature": 1.5}
    every = sdk.completions.create(**body, n=6, logprobs=0)
    best = sdk.completions.create(**body, n=2, best_of=6)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]

    def likelihood(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    for i in range(len(PROMPTS)):
        ranked = sorted(every.choices[6 * i : 6 * i + 6], key=likelihood, reverse=True)
        assert len({choice.text for choice in ranked}) > 2
        assert [choice.text for choice in best.choices[2 * i : 2 * i + 2]] == [choice.text for choice in ranked[:2]]
    assert best.choices[0].logprobs is None
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens, "all that was made is paid for"
    answer = http.post("/v1/completions", json={**body, "n": 1, "best_of": 3, "echo": True}).json()
    assert [choice["text"].startswith(prompt) for choice, prompt in zip(answer["choices"], PROMPTS, strict=True)]


def test_tools_that_must_be_called_are_refused(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True}
    answer = http.post("/v1/chat/completions", json={**body, "tools": [tool], "tool_choice": "required"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    answer = http.post("/v1/chat/completions", json={**body, "response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


def num_requests(engine: EngineInThisProcess) -> int:
    stats = engine.engine.stats()
    return stats.num_running + stats.num_waiting


def test_a_client_that_leaves_ends_the_search(engine: EngineInThisProcess) -> None:
    """Cancelled choices leave nothing running in the engine."""

    async def leave() -> None:
        beams = BeamSearchClient(engine, BeamSearchParams(beam_width=4))
        params = SamplingParams(max_tokens=400, ignore_eos=True, seed=1, n=2)
        requests = [EngineRequest(f"left-0-{i}", [5, 6, 7], params, i) for i in range(2)]

        async def read(request: EngineRequest) -> None:
            async for _ in beams.generate("tiny-chat", request, RouteInfo()):
                pass

        tasks = [asyncio.create_task(read(request)) for request in requests]
        await until(lambda: num_requests(engine) > 0)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, "a task is left behind"

    asyncio.run(leave())
    wait_until(lambda: num_requests(engine) == 0)
