"""BGE-M3's three kinds of vectors over HTTP, and their scores; the judge is its definition over transformers' encoder:
the first token's state, relu(w h + b) of each token, W h + b of each but the first, all vectors at length 1."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from app.errors import CheckpointError
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import add_modules, hf_encoder, texts, tiny_encoder
from tests.worker.pooling.pooling_driver import PoolingDriver

ASKED = texts(6, 30, seed=2)
SIZE = 48


class Judge:
    """One text at a time."""

    def __init__(self, directory: Path) -> None:
        self.model, self.tokenizer = hf_encoder(directory), AutoTokenizer.from_pretrained(directory)
        self.special = set(self.tokenizer.all_special_ids)
        self.vectors, self.weights = (torch.load(directory / f"{name}_linear.pt") for name in ("colbert", "sparse"))

    def __call__(self, text: str) -> tuple[np.ndarray, dict[int, float], np.ndarray]:
        encoded = self.tokenizer(text, return_tensors="pt")
        with torch.inference_mode():
            hidden = self.model(**encoded).last_hidden_state[0]
        weights = (hidden @ self.weights["weight"].T + self.weights["bias"]).relu()[:, 0]
        sparse: dict[int, float] = {}
        for token, weight in zip(encoded["input_ids"][0].tolist(), weights.tolist(), strict=True):
            if token not in self.special and weight > sparse.get(token, 0.0):
                sparse[token] = weight
        vectors = F.normalize(hidden[1:] @ self.vectors["weight"].T + self.vectors["bias"], dim=1)
        return F.normalize(hidden[0], dim=0).numpy(), sparse, vectors.numpy()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m3") / "model"
    shutil.copytree(tiny_encoder("xlm-roberta"), path)
    add_modules(path, {"word_embedding_dimension": SIZE, "pooling_mode_cls_token": True})
    torch.manual_seed(3)
    for name, size in (("colbert", SIZE), ("sparse", 1)):
        tensors = {"weight": torch.randn(size, SIZE) * 0.3, "bias": torch.randn(size) * 0.3}
        torch.save(tensors, path / f"{name}_linear.pt")
    return path


@pytest.fixture(scope="module")
def judge(directory: Path) -> Judge:
    return Judge(directory)


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[PoolingEngines]:
    engines = PoolingEngines({"m3": directory})
    yield engines
    engines.shutdown()


def posted(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    answer = http.post(path, json={"model": "m3", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]  # type: ignore[no-any-return]


def check_sparse(found: dict[str, list[Any]], expected: dict[int, float]) -> None:
    assert found["indices"] == sorted(expected)
    np.testing.assert_allclose(found["values"], [expected[token] for token in found["indices"]], atol=1e-4)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_all_in_one_answer(http: httpx.Client, judge: Judge, form: str) -> None:
    assert sum(len(judge(text)[1]) for text in ASKED) > 10, "tokens have no weights"

    def read(value: Any, *shape: int) -> np.ndarray:
        array = np.frombuffer(base64.b64decode(value), "<f4") if form == "base64" else np.array(value)
        return array.reshape(*shape)

    for text, entry in zip(ASKED, posted(http, "/pooling", input=ASKED, task="all", encoding_format=form), strict=True):
        dense, sparse, vectors = judge(text)
        np.testing.assert_allclose(read(entry["data"]["dense"], SIZE), dense, atol=1e-4)
        np.testing.assert_allclose(read(entry["data"]["vectors"], -1, SIZE), vectors, atol=1e-4)
        check_sparse(entry["data"]["sparse"], sparse)


def test_each_alone(http: httpx.Client, judge: Judge) -> None:
    dense, weights = posted(http, "/v1/embeddings", input=ASKED), "sparse"
    sparse = posted(http, "/v1/embeddings", input=ASKED, encoding_format=weights)
    vectors = posted(http, "/pooling", input=ASKED, task="token_embed")
    for i, text in enumerate(ASKED):
        expected = judge(text)
        np.testing.assert_allclose(dense[i]["embedding"], expected[0], atol=1e-4)
        check_sparse(sparse[i]["embedding"], expected[1])
        np.testing.assert_allclose(vectors[i]["data"], expected[2], atol=1e-4)


def judged_score(weights: dict[str, float], query: tuple[Any, ...], document: tuple[Any, ...]) -> float:
    """As FlagEmbedding adds them up."""
    found = {
        "dense": float(query[0] @ document[0]),
        "sparse": sum(weight * document[1].get(token, 0.0) for token, weight in query[1].items()),
        "vectors": float((query[2] @ document[2].T).max(axis=1).mean()),
    }
    return sum(weights[kind] * found[kind] for kind in weights) / sum(weights.values())


@pytest.mark.parametrize(
    "weights",
    [{"sparse": 1}, {"vectors": 1.0}, {"dense": 0.4, "sparse": 0.2, "vectors": 0.4}, {"dense": 2, "sparse": 0}],
)
def test_scores_by_all_that_the_model_gives(http: httpx.Client, judge: Judge, weights: dict[str, float]) -> None:
    query, documents = ASKED[0], [*ASKED[1:], ASKED[0]]
    expected = [judged_score(weights, judge(query), judge(document)) for document in documents]
    data = posted(http, "/v1/score", text_1=query, text_2=documents, score_weights=weights)
    np.testing.assert_allclose([one["score"] for one in data], expected, atol=1e-4)
    body = {"model": "m3", "query": query, "documents": documents, "score_weights": weights}
    ranked = http.post("/v1/rerank", json=body).json()["results"]
    assert [one["index"] for one in ranked] == np.argsort(-np.array(expected), kind="stable").tolist()


@pytest.mark.parametrize("weights", [{"dense": 0}, {"dense": -1}, {"colbert": 1}, {}, {"dense": float("1e9")}, 1])
def test_weights_that_cannot_be(http: httpx.Client, weights: Any) -> None:
    body = {"model": "m3", "text_1": "a", "text_2": "b", "score_weights": weights}
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("score_weights")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pooling", {"task": "all", "encoding_format": "sparse"}, "encoding_format"),
        ("/v1/embeddings", {"encoding_format": "sparse", "dimensions": 4}, "dimensions"),
        ("/pooling", {"task": "classify"}, "task"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json={"model": "m3", "input": "a", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


class Harmful:
    """Would run code where it is read as a pickle may be."""

    def __reduce__(self) -> Any:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"weight": torch.zeros(2, SIZE), "bias": torch.zeros(2)}, "weight has shape"),
        ({"weight": torch.zeros(1, SIZE)}, "bias has shape None"),
        ({"weight": Harmful()}, "could run code"),
    ],
)
def test_files_of_layers_that_are_none(
    directory: Path, tmp_path: Path, tensors: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(directory, tmp_path / "model")
    torch.save(tensors, tmp_path / "model" / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=reason):
        PoolingDriver(tmp_path / "model")
    assert "it ran" not in capsys.readouterr().out
