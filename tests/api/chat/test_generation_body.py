"""vLLM's extension fields through the real SDK over an engine: each changes what it says, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from app.api.engine_client import RouteInfo
from app.records.request import EngineRequest
from tests.api.engine_in_this_process import EngineInThisProcess

PROMPT = "The quick brown fox jumps over the lazy dog and then it"


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineInThisProcess]:
    client = EngineInThisProcess()
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


def complete(sdk: openai.OpenAI, *, logprobs: int | None = None, prompt: Any = PROMPT, **extra: Any) -> Any:
    """One greedy completion of 8 tokens with these extension fields."""
    body = {"return_token_ids": True, **extra}
    return sdk.completions.create(
        model="tiny-chat", prompt=prompt, max_tokens=8, temperature=0, logprobs=logprobs, extra_body=body
    )


def ids(answer: Any) -> list[int]:
    found: list[int] = answer.choices[0].token_ids
    return found


def test_what_changes_the_tokens(sdk: openai.OpenAI, engine: EngineInThisProcess) -> None:
    plain = ids(complete(sdk, ignore_eos=True))
    assert len(plain) == 8
    first = plain[0]
    assert ids(complete(sdk, ignore_eos=True, logit_bias={str(first): -100}))[0] != first
    assert set(ids(complete(sdk, ignore_eos=True, logit_bias={"7": 100}))) == {7}
    assert set(ids(complete(sdk, ignore_eos=True, allowed_token_ids=[5, 9]))) <= {5, 9}
    stopped = complete(sdk, ignore_eos=True, stop_token_ids=[plain[3]])
    assert ids(stopped) == plain[: plain.index(plain[3]) + 1]
    assert stopped.choices[0].stop_reason == plain[3]
    later = ids(complete(sdk, ignore_eos=True, stop_token_ids=[plain[0]], min_tokens=4))
    assert len(later) >= 4
    assert plain[0] not in later[:3], "an end is masked until then"
    assert ids(complete(sdk, prompt=complete(sdk).choices[0].prompt_token_ids, ignore_eos=True)) == plain


def test_logprobs_of_named_tokens(sdk: openai.OpenAI, engine: EngineInThisProcess) -> None:
    """The values are those that the whole of the most likely would show."""
    named, name = [9, 300, 5], "token_id:{}".format
    told: dict[str, Any] = {"return_tokens_as_token_ids": True, "logprobs": 0}
    found = complete(sdk, **told, logprob_token_ids=named).choices[0].logprobs
    assert [list(top) for top in found.top_logprobs] == [
        list(dict.fromkeys([*map(name, named), token])) for token in found.tokens
    ]
    forced = complete(sdk, **told, allowed_token_ids=[300]).choices[0].logprobs  # the values are of the model's own
    assert found.top_logprobs[0][name(300)] == pytest.approx(forced.token_logprobs[0], abs=1e-4)
    body: Any = {"model": "tiny-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    extra = {"logprob_token_ids": named, "return_tokens_as_token_ids": True}
    chat = sdk.chat.completions.create(**body, temperature=0, logprobs=True, extra_body=extra)
    for entry in chat.choices[0].logprobs.content:
        assert [top.token for top in entry.top_logprobs] == list(map(name, named))


def test_truncation(sdk: openai.OpenAI, engine: EngineInThisProcess) -> None:
    whole = engine.models["tiny-chat"].tokenizer.encode(PROMPT)
    assert complete(sdk, truncate_prompt_tokens=4).choices[0].prompt_token_ids == whole[-4:]
    right = complete(sdk, truncate_prompt_tokens=4, truncation_side="right")
    assert right.choices[0].prompt_token_ids == whole[:4]
    assert right.usage.prompt_tokens == 4
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat: Any = sdk.chat.completions.create(
        model="tiny-chat", messages=messages, max_tokens=1,
        extra_body={"truncate_prompt_tokens": 5, "truncation_side": "right", "return_token_ids": True},
    )  # fmt: skip
    full: Any = sdk.chat.completions.create(
        model="tiny-chat", messages=messages, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert chat.prompt_token_ids == full.prompt_token_ids[:5]


def test_tokens_named_by_their_ids(sdk: openai.OpenAI) -> None:
    plain = complete(sdk, logprobs=2, echo=True)
    named = complete(sdk, logprobs=2, echo=True, return_tokens_as_token_ids=True)
    choice = named.choices[0]
    assert choice.text == plain.choices[0].text
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in choice.prompt_token_ids + choice.token_ids]
    assert choice.logprobs.token_logprobs == plain.choices[0].logprobs.token_logprobs
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs[1:] for name in top)
    messages: Any = [{"role": "user", "content": "hi"}]
    body: Any = {"model": "tiny-chat", "messages": messages, "max_tokens": 4, "temperature": 0, "logprobs": True}
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    whole: Any = sdk.chat.completions.create(**body, top_logprobs=1, extra_body=extra)
    content = whole.choices[0].logprobs.content
    assert [entry.token for entry in content] == [f"token_id:{i}" for i in whole.choices[0].token_ids]
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    chunks = list(sdk.chat.completions.create(**body, top_logprobs=1, extra_body=extra, stream=True))
    streamed = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content or []]
    assert streamed == content


def test_cache_salt_keeps_prefixes_apart(sdk: openai.OpenAI) -> None:
    def cached(**extra: Any) -> int:
        answer = complete(sdk, prompt=list(range(30, 100)), **extra)
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0


def test_what_goes_with_the_request(
    sdk: openai.OpenAI, engine: EngineInThisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[EngineRequest, RouteInfo]] = []
    generate = engine.generate

    def spy(model: str, request: EngineRequest, route: RouteInfo) -> Any:
        seen.append((request, route))
        return generate(model, request, route)

    monkeypatch.setattr(engine, "generate", spy)
    complete(sdk, priority=-3, session_id="mine")
    raw = sdk.completions.with_raw_response.create(model="tiny-chat", prompt="x", extra_body={"request_id": "r-1"})
    assert [(request.placement.priority, request.placement.session) for request, route in seen] == [
        (-3, "mine"),
        (0, ""),
    ]
    assert raw.headers["x-request-id"] == "r-1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncation_side": "middle", "truncate_prompt_tokens": 2}, "truncation_side"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"session_id": ""}, "session_id"),
        ({"stream_interval": 2}, "stream_interval"),
        ({"repetition_detection": {"min_count": 2}}, "repetition_detection.max_pattern_size"),
        ({"repetition_detection": {"min_count": 1, "max_pattern_size": 2}}, "repetition_detection.min_count"),
        (
            {"repetition_detection": {"min_count": 2, "max_pattern_size": 2, "min_pattern_size": 3}},
            "repetition_detection",
        ),
        ({"stream_interval": 2000, "stream": True}, "stream_interval"),
        *(
            ({name: value}, name)
            for name, value in {
                "suffix": "x", "vllm_xargs": {}, "watermarking": {},
                "mm_processor_kwargs": {}, "media_io_kwargs": {}, "guided_json": {},
                "return_prompt_text": True, "return_token_offsets": True, "ec_transfer_params": {},
                "kv_transfer_params": {}, "prompt_embeds": "x",
            }.items()
        ),
    ],
)  # fmt: skip
def test_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], **fields}
    for path, body in (("completions", {"prompt": "x", **fields}), ("chat/completions", chat)):
        answer = http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"]


def test_an_answer_in_circles_ends(sdk: openai.OpenAI) -> None:
    circles = {"ignore_eos": True, "logit_bias": {"7": 100}, "include_stop_str_in_output": False}
    whole = complete(sdk, logprobs=0, **circles).choices[0]
    assert ids_of(whole) == [7] * 8
    assert whole.finish_reason == "length"
    detection = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}
    ended = complete(sdk, logprobs=0, **circles, repetition_detection=detection).choices[0]
    assert (ids_of(ended), ended.finish_reason, ended.stop_reason) == ([7] * 6, "stop", "repetition_detected")
    assert ended.text
    assert whole.text.startswith(ended.text)
    assert len(ended.logprobs.tokens) == 6
    at_limit = complete(sdk, **circles, repetition_detection=detection, max_tokens=6).choices[0]
    assert (ids_of(at_limit), at_limit.finish_reason, at_limit.stop_reason) == ([7] * 6, "length", None)
    later = complete(sdk, **circles, repetition_detection=detection, min_tokens=7).choices[0]
    assert ids_of(later) == [7] * 7


def ids_of(choice: Any) -> list[int]:
    found: list[int] = choice.token_ids
    return found
