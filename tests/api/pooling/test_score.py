"""Scores, reranking, classes and raw pooling over real engines; transformers is the judge."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from app.api.pooling.protocol import ScoredText
from app.api.pooling.score import _Pairs
from app.config.limits import RequestLimits
from app.errors import PromptTooLongError
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import add_modules, hf_encoder, texts, tiny_encoder

QUERY, DOCUMENTS = "the quick brown fox", texts(20, 20, seed=4)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingEngines]:
    embed = tmp_path_factory.mktemp("embed") / "model"
    shutil.copytree(tiny_encoder("roberta"), embed)
    add_modules(embed)
    directories: dict[str, Any] = {"cross": tiny_encoder("bert", 1), "classes": tiny_encoder("bert", 3), "embed": embed}
    engines = PoolingEngines({**directories, "tiny-chat": "tiny-chat"})
    yield engines
    engines.shutdown()


@pytest.fixture
def client(engines: PoolingEngines) -> PoolingEngines:
    return engines


def logits(kind: str, *sides: list[str]) -> torch.Tensor:
    """transformers' logits of texts or pairs."""
    directory = tiny_encoder("bert", {"cross": 1, "classes": 3}[kind])
    model, tokenizer = hf_encoder(directory, classifies=True), AutoTokenizer.from_pretrained(directory)
    with torch.inference_mode():
        return torch.cat([model(**tokenizer(*row, return_tensors="pt")).logits for row in zip(*sides, strict=True)])


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_a_cross_encoder(http: httpx.Client, path: str) -> None:
    expected = logits("cross", [QUERY] * 20, DOCUMENTS)[:, 0]
    answer = post(http, path, model="cross", text_1=QUERY, text_2=DOCUMENTS[:16])
    np.testing.assert_allclose([e["score"] for e in answer["data"]], expected.sigmoid()[:16], atol=1e-4)
    raw = post(http, path, model="cross", queries=[QUERY], documents=DOCUMENTS[0], use_activation=False)
    assert raw["data"][0]["score"] == pytest.approx(float(expected[0]), abs=1e-4)
    pairs = post(http, path, model="cross", data_1=DOCUMENTS[:3], data_2=DOCUMENTS[3:6])
    each = logits("cross", DOCUMENTS[:3], DOCUMENTS[3:6])[:, 0].sigmoid()
    np.testing.assert_allclose([e["score"] for e in pairs["data"]], each, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder("bert", 1))
    tokens = sum(len(tokenizer(QUERY, text)["input_ids"]) for text in DOCUMENTS[:16])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert [e["object"] for e in answer["data"]] == ["score"] * 16


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_order(http: httpx.Client, path: str) -> None:
    documents = DOCUMENTS[:16]
    expected = logits("cross", [QUERY] * 16, documents)[:, 0].sigmoid()
    objects = [documents[0], *({"text": text} for text in documents[1:])]
    answer = post(http, path, model="cross", query=QUERY, documents=objects)
    assert [e["index"] for e in answer["results"]] == expected.argsort(descending=True).tolist()
    assert [e["document"]["text"] for e in answer["results"]] == [documents[e["index"]] for e in answer["results"]]
    scores = [e["relevance_score"] for e in answer["results"]]
    np.testing.assert_allclose(scores, expected.sort(descending=True).values, atol=1e-4)
    best = post(http, path, model="cross", query=QUERY, documents=documents, top_n=3, return_documents=False)
    assert [e["index"] for e in best["results"]] == [e["index"] for e in answer["results"]][:3]
    assert "document" not in best["results"][0]


def test_documents_are_cut(http: httpx.Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_encoder("bert", 1))
    model = hf_encoder(tiny_encoder("bert", 1), classifies=True)
    long = " ".join(DOCUMENTS)
    for name, limit in (("max_tokens_per_doc", 5), ("truncate_prompt_tokens", 20)):
        answer = post(http, "/rerank", model="cross", query=QUERY, documents=[long], **{name: limit})
        room = 5 + len(tokenizer(QUERY)["input_ids"]) + 1 if name == "max_tokens_per_doc" else 20
        how = {"truncation": "only_second" if name == "max_tokens_per_doc" else True, "max_length": room}
        with torch.inference_mode():
            expected = model(**tokenizer(QUERY, long, return_tensors="pt", **how)).logits[0, 0].sigmoid()
        assert answer["usage"]["prompt_tokens"] == room
        assert answer["results"][0]["relevance_score"] == pytest.approx(float(expected), abs=1e-4)


def test_scores_of_an_embedding_model_are_cosines(http: httpx.Client) -> None:
    documents = DOCUMENTS[:8]
    model, tokenizer = hf_encoder(tiny_encoder("roberta")), AutoTokenizer.from_pretrained(tiny_encoder("roberta"))
    with torch.inference_mode():
        vectors = torch.stack(
            [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in (QUERY, *documents)]
        )
    expected = torch.cosine_similarity(vectors[:1], vectors[1:])
    answer = post(http, "/score", model="embed", text_1=QUERY, text_2=documents)
    np.testing.assert_allclose([e["score"] for e in answer["data"]], expected, atol=1e-4)
    ranked = post(http, "/rerank", model="embed", query=QUERY, documents=documents)["results"]
    assert [e["index"] for e in ranked] == expected.argsort(descending=True).tolist()


def test_classes(http: httpx.Client) -> None:
    expected = logits("classes", DOCUMENTS[:6]).softmax(-1)
    answer = post(http, "/classify", model="classes", input=DOCUMENTS[:6])
    np.testing.assert_allclose([e["probs"] for e in answer["data"]], expected, atol=1e-4)
    assert [e["label"] for e in answer["data"]] == [f"LABEL_{i}" for i in expected.argmax(-1).tolist()]
    assert answer["data"][0]["num_classes"] == 3


def test_raw_pooling(http: httpx.Client) -> None:
    model, tokenizer = hf_encoder(tiny_encoder("roberta")), AutoTokenizer.from_pretrained(tiny_encoder("roberta"))
    with torch.inference_mode():
        hidden = model(**tokenizer(QUERY, return_tensors="pt")).last_hidden_state[0]
    each = post(http, "/pooling", model="embed", input=QUERY, use_activation=False)["data"][0]["data"]
    np.testing.assert_allclose(each, hidden, atol=1e-4)
    packed = post(http, "/pooling", model="embed", input=QUERY, task="embed", encoding_format="base64")
    one = np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(one, torch.nn.functional.normalize(hidden.mean(0), dim=0), atol=1e-4)
    scores = post(http, "/pooling", model="classes", input=QUERY, use_activation=False)["data"][0]["data"]
    np.testing.assert_allclose(scores, logits("classes", [QUERY])[0], atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"model": "classes", "text_1": "a", "text_2": "b"}, "model"),
        ("/score", {"model": "tiny-chat", "text_1": "a", "text_2": "b"}, "model"),
        ("/score", {"model": "cross", "text_1": "a"}, "text_1"),
        ("/score", {"model": "cross", "text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"model": "cross", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"model": "cross", "text_1": "a", "text_2": "b", "queries": "c", "documents": "d"}, "text_1"),
        ("/score", {"model": "cross", "text_1": "a", "text_2": ["b"] * 17}, "text_2"),
        ("/score", {"model": "cross", "text_1": "a", "text_2": "fox " * 200}, "text_2"),
        ("/score", {"model": "embed", "text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
        ("/rerank", {"model": "cross", "query": "a", "documents": []}, "documents"),
        ("/rerank", {"model": "cross", "query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        ("/score", {"model": "embed", "text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
        ("/rerank", {"model": "cross", "query": "a", "documents": [3]}, "documents"),
        ("/rerank", {"model": "cross", "query": "a", "documents": [{"image": "b"}]}, "documents"),
        ("/rerank", {"model": "cross", "query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"model": "cross", "documents": ["b"]}, "query"),
        ("/classify", {"model": "embed", "input": "a"}, "task"),
        ("/classify", {"model": "tiny-chat", "input": "a"}, "model"),
        ("/pooling", {"model": "embed", "input": "a", "task": "classify"}, "task"),
        ("/pooling", {"model": "embed", "input": "a", "task": "plugin"}, "task"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).split(".")[0] == param


def test_an_instruction_counts_for_each_pair() -> None:
    items = [(ScoredText("a"), ScoredText("b")), (ScoredText("a"), ScoredText("c"))]
    pairs, limits = _Pairs("id", items, "documents"), RequestLimits(max_prompt_chars=10)
    pairs.check(limits, "12345")
    with pytest.raises(PromptTooLongError, match="12 characters together; at most 10") as caught:
        pairs.check(limits, "123456")
    assert caught.value.param == "instruction"


def test_nothing_is_left_over(engines: PoolingEngines) -> None:
    engines.wait_idle()
