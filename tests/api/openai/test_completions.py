"""/v1/completions through the real SDK, over a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits


def say(client: Any, text: str) -> None:
    tokenizer = client.models["m"].tokenizer
    client.script = lambda request: tokenizer.encode(text, add_special_tokens=False)


def streamed(sdk: openai.OpenAI, index: int = 0, **body: Any) -> tuple[str, list[Any]]:
    chunks = list(sdk.completions.create(model="m", stream=True, **body))
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index), chunks


@pytest.mark.parametrize("text", ["the fox", "Grüße 🙂👩‍👩‍👧", 'a "b" \\ \n'])
def test_streamed_equals_collected(sdk: openai.OpenAI, client: Any, text: str) -> None:
    say(client, text)
    for echo in (False, True):
        whole = sdk.completions.create(model="m", prompt="Once 🙂", max_tokens=50, echo=echo)
        got, chunks = streamed(sdk, prompt="Once 🙂", max_tokens=50, echo=echo)
        assert whole.choices[0].text == got == ("Once 🙂" if echo else "") + text
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
        assert whole.object == chunks[0].object == "text_completion"
        assert whole.id.startswith("cmpl-")


def test_the_default_is_16_tokens(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "the fox " * 20)
    whole = sdk.completions.create(model="m", prompt="x")
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16


def test_prompt_forms_give_the_same(sdk: openai.OpenAI, client: Any) -> None:
    tokenizer = client.models["m"].tokenizer
    text = "The quick brown"
    ids = tokenizer.encode(text)
    for prompt in (text, [text], ids, [ids]):
        whole = sdk.completions.create(model="m", prompt=prompt, max_tokens=100)
        assert client.requests[-1].prompt_token_ids == ids
        assert [c.text for c in whole.choices] == [text]  # the script repeats the prompt


def test_a_prompt_that_an_encoder_reads(
    http_to: Any, make_client: Any, serve_model: Any, write_model_dir: Any, tmp_path: Path
) -> None:
    """What the client sent is counted, not the decoder's start; it has no logprobs."""
    path = write_model_dir(tmp_path / "bart", 24)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["BartForConditionalGeneration"], "model_type": "bart", "decoder_start_token_id": 2}
    (path / "config.json").write_text(json.dumps(config))
    client = make_client(serve_model(path))
    http = http_to(create_app(client, RequestLimits()))
    ids = client.models["m"].tokenizer.encode("The quick brown")
    body = {"model": "m", "prompt": "The quick brown", "max_tokens": 3, "return_token_ids": True}
    answer = http.post("/v1/completions", json=body).json()
    assert client.requests[-1].prompt_token_ids == [2]
    assert answer["usage"]["prompt_tokens"] == len(ids) > 2
    assert answer["choices"][0]["prompt_token_ids"] == ids
    text = http.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
    assert f'"prompt_tokens":{len(ids)}' in text.replace(" ", "")
    for own in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        refused = http.post("/v1/completions", json={**body, **own})
        assert refused.status_code == 400
        assert "prompt_logprobs: the model's encoder reads the prompt" in refused.json()["error"]["message"]
    refused = http.post("/v1/completions", json={**body, "prompt": [5] * 25})
    assert refused.status_code == 400
    assert "encoder reads 24 tokens" in refused.json()["error"]["message"]
    cut = http.post("/v1/completions", json={**body, "prompt": [5] * 25, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 24


def test_many_prompts_and_choices_keep_their_order(sdk: openai.OpenAI, client: Any) -> None:
    tokenizer = client.models["m"].tokenizer
    client.script = lambda r: [*r.prompt_token_ids, *tokenizer.encode(f" {r.choice_index}", add_special_tokens=False)]
    prompts = ["one", "two", "three"]
    expected = [f"{prompt} {choice}" for prompt in prompts for choice in range(2)]
    for given in (prompts, [tokenizer.encode(prompt) for prompt in prompts]):
        whole = sdk.completions.create(model="m", prompt=given, n=2, max_tokens=50)
        assert [c.index for c in whole.choices] == list(range(6))
        assert [c.text for c in whole.choices] == expected
    for i in range(6):
        assert streamed(sdk, i, prompt=prompts, n=2, max_tokens=50)[0] == expected[i]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    seeds = [request.sampling.seed for request in client.requests[-6:]]
    assert len(set(seeds)) == 3, "a seed for each prompt, shared by its choices"


def test_echo_of_token_ids_is_their_text(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "!")
    ids = client.models["m"].tokenizer.encode("東京 fox")
    assert sdk.completions.create(model="m", prompt=ids, echo=True).choices[0].text == "東京 fox!"


def test_echo_shows_the_special_tokens_that_its_logprobs_list(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "!")
    text = "<|im_start|>user\nfox<|im_end|>"
    ids = client.models["m"].tokenizer.encode(text)
    for prompt in (ids, text):
        choice = sdk.completions.create(model="m", prompt=prompt, echo=True, logprobs=0, max_tokens=1).choices[0]
        assert choice.text == text + "!"
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == text + "!"
        for token, offset in zip(choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True):
            assert choice.text.startswith(token, offset)


def check_logprobs(logprobs: Any, text: str) -> None:
    """Offsets point at the tokens in the text; all lists are of one length."""
    assert logprobs is not None
    assert len({len(v) for v in (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset)}) == 1
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert text[offset : offset + len(token)] == token


def test_logprobs(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "the 🙈 fox")
    tokenizer = client.models["m"].tokenizer
    ids = [*tokenizer.encode("the 🙈 fox", add_special_tokens=False), tokenizer.eos_token_id]
    whole = sdk.completions.create(model="m", prompt="x", logprobs=2, max_tokens=50)
    choice = whole.choices[0]
    check_logprobs(choice.logprobs, choice.text)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-token / 100 for token in ids]
    assert choice.logprobs.top_logprobs is not None
    assert [len(top) for top in choice.logprobs.top_logprobs] == [3] * len(ids), "two and the chosen one"
    assert any(token.startswith("bytes:\\x") for token in choice.logprobs.tokens or [])
    _, chunks = streamed(sdk, prompt="x", logprobs=2, max_tokens=50)
    parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for part in parts for v in getattr(part, name)] == getattr(choice.logprobs, name)
    zero = sdk.completions.create(model="m", prompt="x", logprobs=0, max_tokens=50).choices[0].logprobs
    assert zero is not None
    assert zero.top_logprobs is not None
    assert [len(top) for top in zero.top_logprobs] == [1] * len(ids)


def test_echo_with_logprobs_scores_the_prompt(sdk: openai.OpenAI, client: Any) -> None:
    say(client, " jumps")
    prompt = "The quick 🙈 fox"
    ids = client.models["m"].tokenizer.encode(prompt)
    whole = sdk.completions.create(model="m", prompt=prompt, echo=True, logprobs=1, max_tokens=9).choices[0]
    assert whole.text == prompt + " jumps"
    check_logprobs(whole.logprobs, whole.text)
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs is not None
    assert whole.logprobs.token_logprobs[: len(ids)] == [None, *(-token / 100 for token in ids[1:])]
    text, chunks = streamed(sdk, prompt=prompt, echo=True, logprobs=1, max_tokens=9)
    assert text == whole.text
    parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [v for part in parts for v in getattr(part, name)] == getattr(whole.logprobs, name)


def test_max_tokens_0_only_scores(sdk: openai.OpenAI, client: Any) -> None:
    say(client, "never shown")
    ids = client.models["m"].tokenizer.encode("The fox")
    whole = sdk.completions.create(model="m", prompt="The fox", echo=True, logprobs=1, max_tokens=0)
    choice = whole.choices[0]
    assert (choice.text, choice.finish_reason) == ("The fox", "length")
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == len(ids)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (0, len(ids))
    text, chunks = streamed(
        sdk, prompt="The fox", echo=True, logprobs=1, max_tokens=0, stream_options={"include_usage": True}
    )
    assert text == "The fox"
    assert chunks[-1].usage.completion_tokens == 0


def test_extensions(http: httpx.Client, client: Any) -> None:
    say(client, "ab")
    body = {"prompt": "The quick fox", "prompt_logprobs": 2, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == client.requests[-1].prompt_token_ids
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    assert choice["token_ids"][-1] == client.models["m"].tokenizer.eos_token_id
    plain = http.post("/v1/completions", json={"prompt": "The quick fox"}).json()
    names = ("prompt_logprobs", "prompt_token_ids", "token_ids", "logprobs", "stop_reason")
    assert {name: plain["choices"][0][name] for name in names} == dict.fromkeys(names), "null, but there"
    assert plain["kv_transfer_params"] is None
    for echo in (False, True):
        two = {"prompt": ["The quick fox", "dog"], "return_token_ids": True, "stream": True, "echo": echo}
        lines = http.post("/v1/completions", json=two).text.split("\n\n")
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        told = {c["index"]: c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c}
        assert told == {i: client.models["m"].tokenizer.encode(text) for i, text in enumerate(two["prompt"])}
        assert sum("prompt_token_ids" in c for c in chunks) == 2
    equal = http.post("/v1/completions", json={"prompt": "x", "n": 2, "best_of": 2})
    assert equal.status_code == 200
