"""A model that sees behind Ray Serve: a picture gives the same prompt and the same answer on every way to it, through
client libraries too, and a worker's death under a stream changes nothing. transformers is the judge."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.api.picture_table import url_of
from tests.chatting_media import ask_of, chatting_media_model
from tests.e2e.conftest import metric
from tests.limits import patience_s
from tests.media.pictures import file_of, picture
from tests.tiny_media import judged

pytestmark = pytest.mark.timeout(300)

NAME, TOKENS = "qwen3_vl", 12
FILE = file_of(picture(30, 20))
DATA = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{DATA}"
BLOCK: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
PART: Any = {"type": "image_url", "image_url": {"url": URL}}
WORDS = "What is it?"
TEXT: Any = {"type": "text", "text": WORDS}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": [PART, TEXT]}],
    "max_tokens": TOKENS,
    "temperature": 0,
}
LONG_TOKENS = 800


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for long answers."""
    path = chatting_media_model(NAME, tmp_path_factory.mktemp("sees") / "m")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2048
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServeProcess]:
    engine = {"model": str(model), "kv_cache_memory_bytes": 32 << 20, "num_threads": 1, "max_num_seqs": 8}

    def edit(config: dict[str, Any]) -> None:
        args = {"models": [{"name": "m", "num_replicas": 2, "cpus_per_worker": 0.5, "engine": engine}]}
        config["applications"][0]["args"] = args

    quickstart = ROOT / "configs/serve/quickstart.yaml"
    with ServeProcess(quickstart, edit, ready_timeout_s=patience_s(), ends_gracefully=False) as server:
        limits.wait_until(lambda: figure(server, "manta:ingress_channels") == 2, "both replicas are found")
        yield server


@pytest.fixture(scope="module")
def http(server: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=patience_s()) as http:
        yield http


@pytest.fixture(scope="module")
def sdk(server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=patience_s()) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def claude(server: ServeProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.base_url, api_key="none", max_retries=0, timeout=patience_s()) as claude:
        yield claude


@pytest.fixture(scope="module")
def answer(http: httpx.Client) -> dict[str, Any]:
    """What chat says of the picture."""
    found = http.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})
    assert found.status_code == 200, found.text
    return found.json()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    assert text.strip()
    return text


def figure(server: ServeProcess, name: str) -> float:
    return metric(httpx.get(f"{server.base_url}/metrics", timeout=patience_s()).text, name)


def test_chat_says_what_transformers_would(answer: dict[str, Any], model: Path) -> None:
    ids, said = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert said == judged(NAME, ids, ask_of(model, ids, FILE), len(said))[1]


def test_all_dialects_agree(
    http: httpx.Client, sdk: openai.OpenAI, claude: anthropic.Anthropic, answer: dict[str, Any], said: str
) -> None:
    num_tokens = answer["usage"]["prompt_tokens"]
    assert sdk.chat.completions.create(**CHAT).choices[0].message.content == said
    chunks = sdk.chat.completions.create(**CHAT, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == said
    shown: Any = [{"role": "user", "content": [
        {"type": "input_image", "image_url": URL, "detail": "auto"}, {"type": "input_text", "text": WORDS}
    ]}]  # fmt: skip
    response = sdk.responses.create(model="m", input=shown, max_output_tokens=TOKENS, temperature=0)
    assert response.output_text == said
    blocks: Any = [{"role": "user", "content": [BLOCK, TEXT]}]
    greedy: Any = {"model": "m", "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**greedy, messages=blocks)
    assert "".join(block.text for block in message.content if block.type == "text") == said
    with claude.messages.stream(**greedy, messages=blocks) as stream:
        assert "".join(stream.text_stream) == said
    counted = http.post("/tokenize", json={"model": "m", "messages": CHAT["messages"]}).json()
    assert (counted["tokens"], counted["count"]) == (answer["prompt_token_ids"], num_tokens)
    assert claude.messages.count_tokens(model="m", messages=blocks).input_tokens == num_tokens
    assert response.usage is not None
    assert response.usage.input_tokens == num_tokens
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == num_tokens


def test_results_of_calls_agree(sdk: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [PART]},
    ]
    said = sdk.chat.completions.create(**{**CHAT, "messages": chat}).choices[0].message.content
    items: Any = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]},
    ]
    assert sdk.responses.create(model="m", input=items, max_output_tokens=TOKENS, temperature=0).output_text == said
    blocks: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]}]},
    ]
    message = claude.messages.create(model="m", max_tokens=TOKENS, messages=blocks, extra_body={"temperature": 0})
    assert "".join(block.text for block in message.content if block.type == "text") == said


def test_batches_and_kept_answers_agree(
    http: httpx.Client, sdk: openai.OpenAI, claude: anthropic.Anthropic, said: str
) -> None:
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": CHAT} for i in range(3)]
    file = sdk.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    params: Any = {"model": "m", "max_tokens": TOKENS, "temperature": 0}
    params["messages"] = [{"role": "user", "content": [BLOCK, TEXT]}]
    made = claude.messages.batches.create(requests=[{"custom_id": "0", "params": params}])
    bodies = []
    for _ in range(2):
        kept = http.post("/v1/chat/completions", json=CHAT, headers={"Idempotency-Key": "shown"})
        assert kept.status_code == 200, kept.text
        bodies.append(kept.json())
    assert bodies[0] == bodies[1]
    assert kept.headers["idempotent-replayed"] == "true"
    assert bodies[0]["choices"][0]["message"]["content"] == said
    limits.wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed", "the batch")
    done = sdk.batches.retrieve(batch.id)
    errors = sdk.files.content(done.error_file_id).text if done.error_file_id else ""
    assert not errors
    assert done.output_file_id is not None
    results = [json.loads(line) for line in sdk.files.content(done.output_file_id).text.splitlines()]
    assert [one["response"]["body"]["choices"][0]["message"]["content"] for one in results] == [said] * 3
    limits.wait_until(lambda: claude.messages.batches.retrieve(made.id).processing_status == "ended", "the messages")
    (result,) = claude.messages.batches.results(made.id)
    assert result.result.type == "succeeded", result.result
    assert "".join(block.text for block in result.result.message.content if block.type == "text") == said


def test_langchain(server: ServeProcess, said: str) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    own: Any = {"api_key": "none", "max_retries": 0, "max_tokens": TOKENS, "temperature": 0}
    image = {"type": "image", "base64": DATA, "mime_type": "image/png"}
    for responses in (False, True):
        model = ChatOpenAI(model="m", base_url=f"{server.base_url}/v1", use_responses_api=responses, **own)
        for part in (PART, image):
            message = HumanMessage(content=[part, TEXT])
            assert model.invoke([message]).text == said
        assert "".join(chunk.text for chunk in model.stream([message])) == said


def test_llama_index(server: ServeProcess, said: str) -> None:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.llms.openai_like import OpenAILike

    own: Any = {"api_key": "none", "max_retries": 0, "max_tokens": TOKENS, "temperature": 0, "is_chat_model": True}
    model = OpenAILike(model="m", api_base=f"{server.base_url}/v1", **own)
    message = ChatMessage(
        role="user", blocks=[ImageBlock(image=FILE, image_mimetype="image/png"), TextBlock(text=WORDS)]
    )
    assert model.chat([message]).message.content == said
    assert "".join(part.delta or "" for part in model.stream_chat([message])) == said


def test_litellm(server: ServeProcess, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In OpenAI's dialect, and in Anthropic's, to which it translates."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch the prices of models
    import litellm

    for kind, base in (("openai", f"{server.base_url}/v1"), ("anthropic", server.base_url)):
        body: Any = {**CHAT, "model": f"{kind}/m", "api_base": base, "api_key": "none"}
        whole: Any = litellm.completion(**body)
        assert whole.choices[0].message.content == said
        chunks: Any = litellm.completion(**body, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said


def test_streams_go_on_behind_their_pictures_when_a_worker_is_killed(server: ServeProcess, sdk: openai.OpenAI) -> None:
    """The other replica has not seen those pictures."""
    counts = [0] * 4

    def ask(number: int) -> str:
        shown = {"type": "image_url", "image_url": {"url": url_of(30, 20, number + 1)}}
        content = [{"type": "text", "text": f"{number}: {WORDS}"}, shown]
        body: dict[str, Any] = {**CHAT, "messages": [{"role": "user", "content": content}], "max_tokens": LONG_TOKENS}
        body |= {"temperature": 1.0, "seed": number, "frequency_penalty": 0.3, "extra_body": {"ignore_eos": True}}
        text = ""
        for chunk in sdk.chat.completions.create(**body, stream=True):
            text += chunk.choices[0].delta.content or ""
            counts[number] += 1
        return text

    workers = server.find("ray::Worker")
    assert len(workers) == 2, workers
    with ThreadPoolExecutor(4) as pool:
        whole = list(pool.map(ask, range(4)))
        counts[:] = [0] * 4
        before = [cpu_s(worker) for worker in workers]
        again = [pool.submit(ask, number) for number in range(4)]
        limits.wait_until(lambda: min(counts) > 4, "all streams have begun")
        _, index = max((cpu_s(worker) - before[i], i) for i, worker in enumerate(workers))
        workers[index].kill()  # one that works: where the Router sends prompts is its own affair
        assert [one.result(patience_s()) for one in again] == whole
    assert figure(server, "manta:ingress_migrations_total") > 0


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
