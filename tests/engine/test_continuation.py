"""A request that goes on behind what it generated elsewhere brings the tokens of one that was never cut off.

Two engines of the same model: the first runs every request undisturbed, the second gets each with a beginning of its
output, cut at the ends and at random. The judge is the first engine, whose tokens other tests hold against
transformers, SDKs and references.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from app.api.generation.request_builder import RequestBuilder
from app.errors import InvalidRequestError
from app.offline.llm import LLM
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.thinking_budget import ThinkingBudget
from app.structured.reasoning import ReasoningSpan
from tests.engine.core_driver import Results, assert_idle, make_core, make_request, run

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
LONG = "Who are you? " * 60
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("Count from 1 to 30.", {"temperature": 0.0}),
    "sampled": ("Tell me a story.", {"temperature": 1.3, "top_p": 0.95, "top_k": 40, "min_p": 0.01}),
    "penalties": (
        "Count from 1 to 30.",
        {"presence_penalty": 0.6, "frequency_penalty": 0.8, "repetition_penalty": 1.3, "temperature": 0.9},
    ),
    "bad words": ("Count from 1 to 30.", {"bad_words": ["3", "12", "15, 16"], "temperature": 0.0}),
    "bias": ("Tell me a story.", {"logit_bias": {40: 5.0, 50: -100.0}, "allowed_token_ids": list(range(20, 400))}),
    "min_tokens": ("hi", {"min_tokens": 30, "stop_token_ids": [40, 41, 42, 43], "temperature": 1.5}),
    "logprobs": ("Tell me a story.", {"logprobs": 3, "temperature": 1.0}),
    "prompt logprobs": ("Who are you?", {"prompt_logprobs": 2, "logprobs": 1, "temperature": 1.0}),
    "json": ("Answer: ", {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0}),
    "regex": ("Answer: ", {"structured_outputs": {"regex": r"([a-z]{2,5} ){4}[0-9]{3}"}, "temperature": 1.0}),
    "choices": ("Tell me a story.", {"n": 3, "temperature": 1.0}),
    "long prompt": (LONG, {"temperature": 1.0}),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[LLM, LLM]]:
    """The second one computes prompts in small chunks, in few blocks."""
    options: dict[str, Any] = {"num_threads": 1, "block_size": 8, "max_num_seqs": 32}
    with (
        LLM("tiny-chat", num_blocks=600, **options) as first,
        LLM("tiny-chat", num_blocks=400, max_num_batched_tokens=64, **options) as second,
    ):
        yield first, second


def requests_of(llm: LLM, name: str, number: int) -> list[EngineRequest]:
    prompt, options = CASES[name]
    endless = "structured_outputs" not in options
    params = SamplingParams(**{"max_tokens": 40, "seed": 100 + number, "ignore_eos": endless, **options})
    return RequestBuilder(llm._model, params).choices(name, llm.tokenizer.encode(prompt))


def cuts(length: int, rng: random.Random) -> list[int]:
    return sorted({1, length - 1, *(rng.randrange(1, length) for _ in range(2))} - {0}) if length > 1 else []


def continued(request: EngineRequest, tokens: list[int], count: int) -> EngineRequest:
    return replace(request, request_id=f"{request.request_id}@{count}", output_token_ids=tokens[:count])


def check_rest(whole: Results, rest: Results, request: EngineRequest, count: int) -> None:
    name, cut = request.request_id, f"{request.request_id}@{count}"
    assert rest.tokens[cut] == whole.tokens[name][count:], cut
    ours, theirs = rest.final[cut], whole.final[name]
    assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason), cut
    for entry, expected in zip(rest.logprobs[cut], whole.logprobs[name][count:], strict=True):
        assert entry.token_ids == expected.token_ids, cut
        assert entry.logprobs == pytest.approx(expected.logprobs, abs=1e-4), cut
    assert cut not in rest.prompt_logprobs, "they were delivered with the first token"


def test_every_kind_of_state_goes_on(engines: tuple[LLM, LLM]) -> None:
    first, second = engines
    rng = random.Random(3)
    requests = [request for i, name in enumerate(CASES) for request in requests_of(first, name, i)]
    whole = run(first._core, requests)
    assert len(whole.prompt_logprobs) == 1
    assert all(json.loads(first.tokenizer.decode(whole.tokens["json-0"])).values())
    asked = [(one, count) for one in requests for count in cuts(len(whole.tokens[one.request_id]), rng)]
    assert len(asked) >= 3 * len(CASES)
    rest = run(second._core, [continued(one, whole.tokens[one.request_id], count) for one, count in asked])
    for one, count in asked:
        check_rest(whole, rest, one, count)
    assert_idle(second._core)


def test_reasoning_goes_on(engines: tuple[LLM, LLM]) -> None:
    """A cut in the reasoning, at its end, and in the answer behind it; and a budget for it."""
    first, second = engines
    ids = first.tokenizer.encode("Count from 1 to 30.")
    end = tuple(first.tokenizer.encode("11, 12", add_special_tokens=False))
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=60, structured_outputs={"json": SCHEMA})
    [guided] = RequestBuilder(first._model, params, reasoning=ReasoningSpan(end)).choices("guided", ids)
    [plain] = RequestBuilder(first._model, params.model_copy(update={"structured_outputs": None})).choices("plain", ids)
    thinks = replace(plain, asks=(ThinkingBudget(9, (), end),))
    whole = run(first._core, [guided, thinks])
    asked = [(one, count) for one in (guided, thinks) for count in range(1, len(whole.tokens[one.request_id]))]
    rest = run(second._core, [continued(one, whole.tokens[one.request_id], count) for one, count in asked])
    for one, count in asked:
        check_rest(whole, rest, one, count)


def test_an_answer_that_lacks_only_its_end(engines: tuple[LLM, LLM]) -> None:
    """A grammar's last token does not come with the end, which may be what got lost."""
    first, second = engines
    [request] = requests_of(first, "regex", 5)
    tokens = run(first._core, [request]).tokens[request.request_id]
    rest = run(second._core, [continued(request, tokens, len(tokens))])
    (final,) = rest.final.values()
    assert (final.finish_reason, final.new_token_ids) == ("stop", [])


def test_what_cannot_be_behind_the_output_is_refused(engines: tuple[LLM, LLM]) -> None:
    _, second = engines
    [request] = requests_of(second, "regex", 5)
    for output, field in (([0], "structured_outputs"), ([5] * 40, "output_token_ids"), ([-1], "output_token_ids")):
        with pytest.raises(InvalidRequestError) as caught:
            second._core.prepare(replace(request, output_token_ids=output))
        assert caught.value.param == field


def test_one_that_comes_from_elsewhere_goes_first_and_is_counted_once() -> None:
    core = make_core(max_num_seqs=1)
    waiting = [make_request(f"r{i}", [5 + i] * 6, max_tokens=4) for i in range(3)]
    core.add_request(waiting[0])
    core.step()
    moved = replace(make_request("moved", [9] * 6, max_tokens=4), output_token_ids=[1, 2])
    results = run(core, [*waiting[1:], moved])
    assert results.order[:2] == ["r0", "moved"]
    assert core.stats().figures["prompt_tokens"] == 3 * 6
    assert results.final["moved"].num_cached_tokens == 0
