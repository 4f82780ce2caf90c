"""The quickstart as its first user meets it: `serve run`, then curl and the openai SDK."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.checkpoints.model_info import resolve_model
from benchmarks.serve_process import ServeProcess
from tests import limits
from tests.api.chat.test_beam_search import judge
from tests.e2e.conftest import heldout, metric, wait_until
from tests.tiny_models import hf_model

pytestmark = pytest.mark.timeout(300)


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_streamed_equals_not_streamed(client: openai.OpenAI) -> None:
    for example in heldout()[::36]:
        body = {
            "model": "tiny-chat",
            "messages": example["messages"],
            "temperature": 0,
            "max_tokens": 64,
            "extra_body": {"chat_template_kwargs": example.get("chat_template_kwargs") or {}},
        }
        whole = client.chat.completions.create(**body)
        chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == (whole.choices[0].message.content or "")
        streamed, at_once = chunks[-1].usage, whole.usage  # the second one finds the prompt in the cache
        assert streamed is not None
        assert at_once is not None
        assert streamed.completion_tokens == at_once.completion_tokens > 0
        assert streamed.prompt_tokens == at_once.prompt_tokens > 0
        assert whole.choices[0].finish_reason == [c.choices[0].finish_reason for c in chunks if c.choices][-1]


def test_it_answers_sensibly(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny-chat", messages=_messages("What is 7 + 5?"), temperature=0)
    assert "12" in (answer.choices[0].message.content or "")


def test_n_choices_and_seed(client: openai.OpenAI) -> None:
    body = {"model": "tiny-chat", "messages": _messages("Tell me a story."), "n": 3, "seed": 7, "max_tokens": 24}
    first, second = (client.chat.completions.create(**body) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in second.choices]


def test_beam_search_over_the_graph(client: openai.OpenAI, quickstart: ServeProcess) -> None:
    """The ingress asks a replica step by step; the beams are those of transformers, and nothing stays behind."""
    messages = _messages("Who are you?")
    extra = {"use_beam_search": True, "return_token_ids": True, "length_penalty": 0.8}
    whole = client.chat.completions.create(
        model="tiny-chat", messages=messages, n=3, max_tokens=16, temperature=0, extra_body=extra
    )
    reference = hf_model(resolve_model("tiny-chat"))
    expected = judge(reference, whole.prompt_token_ids, 3, 3, 16, length_penalty=0.8)
    assert [choice.token_ids for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({tuple(beam) for beam in expected}) == 3
    with pytest.raises(openai.BadRequestError, match="use_beam_search"):
        client.chat.completions.create(
            model="tiny-chat", messages=messages, stream=True, extra_body={"use_beam_search": True}
        )
    wait_until(
        lambda: metric(httpx.get(f"{quickstart.base_url}/metrics").text, "vllm:num_requests_running") == 0,
        10,
        "the beams' requests are gone",
    )


def test_completions_models_tokenize(client: openai.OpenAI, quickstart: ServeProcess) -> None:
    assert [model.id for model in client.models.list()] == ["tiny-chat"]
    http = httpx.Client(base_url=quickstart.base_url, timeout=limits.patience_s())
    ids = http.post("/tokenize", json={"model": "tiny-chat", "prompt": "count from 1 to 5"}).json()["tokens"]
    text = http.post("/detokenize", json={"model": "tiny-chat", "tokens": ids}).json()["prompt"]
    assert text == "count from 1 to 5"
    by_text = client.completions.create(model="tiny-chat", prompt=text, temperature=0, max_tokens=8)
    by_ids = client.completions.create(model="tiny-chat", prompt=ids, temperature=0, max_tokens=8)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert "version" in http.get("/version").json()
    assert http.get("/docs").status_code == 200


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=_messages("hi"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny-chat", messages=_messages("hi"), extra_body={"temprature": 1})
    assert caught.value.param == "temprature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny-chat", prompt=[5] * 100_000)
    assert "100000" in str(caught.value).replace(",", "")
    assert caught.value.code == "context_length_exceeded"


def test_metrics_parse_and_count(client: openai.OpenAI, quickstart: ServeProcess) -> None:
    def generated() -> float:
        return metric(httpx.get(f"{quickstart.base_url}/metrics").text, "vllm:generation_tokens_total")

    before = generated()
    answer = client.completions.create(
        model="tiny-chat", prompt="hello", max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    wait_until(lambda: generated() >= before + 10, 5, "ten tokens in vllm:generation_tokens_total")
    families = {f.name for f in text_string_to_metric_families(httpx.get(f"{quickstart.base_url}/metrics").text)}
    assert {"vllm:time_to_first_token_seconds", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= families


def test_concurrent_requests_share_the_steps(client: openai.OpenAI) -> None:
    def ask(i: int) -> str:
        done = client.chat.completions.create(
            model="tiny-chat", messages=_messages(f"What is {i} + {i}?"), temperature=0, max_tokens=24
        )
        return done.choices[0].message.content or ""

    alone = [ask(i) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == alone


def test_closing_the_socket_frees_the_blocks(quickstart: ServeProcess) -> None:
    def usage() -> float:
        text = httpx.get(f"{quickstart.base_url}/metrics").text
        requests = metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting")
        return requests + metric(text, "vllm:kv_cache_usage_perc")

    wait_until(lambda: usage() == 0, 5, "an idle server")
    body = b'{"model":"tiny-chat","prompt":"hello","max_tokens":500,"n":32,"ignore_eos":true,"stream":true}'
    with socket.create_connection(("127.0.0.1", quickstart.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(body)
            + body
        )
        received = b""
        while received.count(b"data: ") < 5:
            received += connection.recv(4096)
        assert usage() > 0
    wait_until(lambda: usage() == 0, 1, "no request and no block in use after the client went away")
