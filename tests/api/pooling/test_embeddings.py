"""POST /v1/embeddings over real engines with OpenAI's SDK; transformers and sentence-transformers are the judges."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from sentence_transformers import SentenceTransformer

from app.api.pooling import run
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import add_modules, texts, tiny_encoder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embed") / "model"
    shutil.copytree(tiny_encoder("bert"), path)
    add_modules(path)
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> SentenceTransformer:
    return SentenceTransformer(str(directory), device="cpu")


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[PoolingEngines]:
    short = tiny_encoder("bert", changes='{"matryoshka_dimensions": [8, 16]}')
    engines = PoolingEngines({"embed": directory, "short": short, "tiny-chat": "tiny-chat"})
    yield engines
    engines.shutdown()


@pytest.fixture
def client(engines: PoolingEngines) -> PoolingEngines:
    return engines


def post(http: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refusal(http: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> tuple[str, str]:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_the_sdk_gets_what_sentence_transformers_gives(sdk: openai.OpenAI, reference: SentenceTransformer) -> None:
    asked = texts(16)
    whole = sdk.embeddings.create(model="embed", input=asked)  # base64 on the wire, unless told otherwise
    plain = sdk.embeddings.create(model="embed", input=asked, encoding_format="float", user="me")
    assert [entry.index for entry in whole.data] == list(range(16))
    # Not to the bit: the two may have shared their steps with others, whose lengths change the order of sums.
    np.testing.assert_allclose([e.embedding for e in whole.data], [e.embedding for e in plain.data], atol=1e-6)
    np.testing.assert_allclose([entry.embedding for entry in whole.data], reference.encode(asked), atol=1e-5)
    tokens = sum(len(ids) for ids in reference.tokenizer(asked)["input_ids"])
    assert whole.usage.prompt_tokens == whole.usage.total_tokens == tokens
    assert whole.object == "list"
    assert whole.model == "embed"
    one = sdk.embeddings.create(model="embed", input=asked[3])
    np.testing.assert_allclose(one.data[0].embedding, whole.data[3].embedding, atol=1e-6)


def test_token_ids_and_base64(http: httpx.Client, engines: PoolingEngines) -> None:
    asked = texts(3)
    ids = [engines.models["embed"].tokenizer.encode(text) for text in asked]
    by_text = post(http, model="embed", input=asked)["data"]
    by_ids = post(http, model="embed", input=ids, encoding_format="base64")["data"]
    for plain, packed in zip(by_text, by_ids, strict=True):
        decoded = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
        np.testing.assert_allclose(decoded, plain["embedding"], atol=1e-6)
    single = post(http, input=ids[0])  # a flat list is one prompt; without a name, the first model
    np.testing.assert_allclose(single["data"][0]["embedding"], by_text[0]["embedding"], atol=1e-6)


def test_shorter_embeddings(sdk: openai.OpenAI, http: httpx.Client) -> None:
    whole = np.array(post(http, model="short", input="a quick fox", normalize=False)["data"][0]["embedding"])
    short = sdk.embeddings.create(model="short", input="a quick fox", dimensions=8).data[0].embedding
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    assert refusal(http, model="short", input="a", dimensions=9)[0] == "dimensions"
    param, message = refusal(http, model="embed", input="a", dimensions=8)
    assert param == "dimensions"
    assert "Matryoshka" in message


def test_long_texts_are_cut_only_when_asked(http: httpx.Client, reference: SentenceTransformer) -> None:
    long = " ".join(texts(20))
    param, message = refusal(http, model="embed", input=["a", long])
    assert param == "input"
    assert "130" in message
    answer = post(http, model="embed", input=[long], truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 130
    reference.max_seq_length = 130
    np.testing.assert_allclose(answer["data"][0]["embedding"], reference.encode([long])[0], atol=1e-5)
    reference.max_seq_length = 12
    answer = post(http, model="embed", input=[long], truncate_prompt_tokens=12)
    np.testing.assert_allclose(answer["data"][0]["embedding"], reference.encode([long])[0], atol=1e-5)
    assert refusal(http, model="embed", input="a", truncate_prompt_tokens=1)[0] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [[1, 10_000]]}, "input"),
        ({"input": [[-1]]}, "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"input": ["a"] * 17}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": True, "use_activation": True}, "normalize"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "model": "tiny-chat"}, "model"),
        ({"input": "\ud800"}, None),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], param: str | None) -> None:
    content = json.dumps({"model": "embed", **body})
    answer = http.post("/v1/embeddings", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert str(answer.json()["error"]["param"]).split(".")[0] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_a_pooling_model_generates_nothing(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    param, message = refusal(http, path, model="embed", **body)
    assert param == "model"
    assert "/v1/embeddings" in message


def test_unknown_model(http: httpx.Client) -> None:
    assert http.post("/v1/embeddings", json={"model": "no", "input": "a"}).status_code == 404


def test_a_body_travels_in_few_requests(
    http: httpx.Client, engines: PoolingEngines, reference: SentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many prompts in each as leave room to others, and no more tokens than a step or two compute."""
    asked, reference.max_seq_length = texts(16), 130
    for most in (run.MAX_BUNDLE_TOKENS, 40, 1):
        monkeypatch.setattr(run, "MAX_BUNDLE_TOKENS", most)
        before = len(engines.requests)
        answer = post(http, model="embed", input=asked)
        found = engines.requests[before:]
        assert sum(one.num_prompts for one in found) == 16
        assert max(one.num_prompts for one in found) <= engines.models["embed"].max_running_of_prompt // 2
        assert all(one.num_prompts == 1 or len(one.prompt_token_ids) <= most for one in found)
        assert len(found) <= (4 if most > 40 else 16)
        np.testing.assert_allclose([entry["embedding"] for entry in answer["data"]], reference.encode(asked), atol=1e-5)
    engines.wait_idle()


def test_a_cache_salt_keeps_tenants_apart(http: httpx.Client, engines: PoolingEngines) -> None:
    post(http, model="embed", input="a")
    plain = engines.requests[-1].placement.cache_root
    post(http, model="embed", input="a", cache_salt="s", priority=3)
    assert engines.requests[-1].placement.cache_root != plain
    assert engines.requests[-1].placement.priority == 3
    engines.wait_idle()
