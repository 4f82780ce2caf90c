"""Vectors of tokens and their scores over HTTP; sentence-transformers' MultiVectorEncoder is the judge."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder

from app.errors import MantaError, UnsupportedError
from app.records import pooling_info
from app.records.late_interaction import LateInteraction, QueryExpansion
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import texts
from tests.tiny_late_models import LAYOUTS, written

QUERIES, DOCUMENTS = ["the quick brown fox", *texts(3, 30, seed=8)], ["boat . , rain", *texts(11, 40, seed=4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: written(name, tmp_path_factory.mktemp(name)) for name in LAYOUTS}


@pytest.fixture(scope="module")
def judges(models: dict[str, Path]) -> dict[str, MultiVectorEncoder]:
    return {name: MultiVectorEncoder(str(path), device="cpu") for name, path in models.items()}


@pytest.fixture(scope="module")
def client(models: dict[str, Path]) -> Iterator[PoolingEngines]:
    engines = PoolingEngines(dict(models))
    yield engines
    engines.shutdown()


def posted(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(http: httpx.Client, model: str, asked: list[str], **more: Any) -> list[np.ndarray]:
    entries = posted(http, "/pooling", model=model, input=asked, encoding_format="base64", **more)["data"]
    found = [np.frombuffer(base64.b64decode(one["data"]), "<f4") for one in entries]
    return [one.reshape(-1, 12) for one in found]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_vectors_of_queries_and_documents(
    http: httpx.Client, judges: dict[str, MultiVectorEncoder], layout: str
) -> None:
    """In one step each, of mixed lengths."""
    expected = judges[layout].encode_query(QUERIES), judges[layout].encode_document(DOCUMENTS)
    found = vectors(http, layout, QUERIES, input_type="query"), vectors(http, layout, DOCUMENTS)
    for theirs, ours in zip((*expected[0], *expected[1]), (*found[0], *found[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert len({len(one) for one in found[1]}) > 4


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_scores(http: httpx.Client, judges: dict[str, MultiVectorEncoder], layout: str) -> None:
    judge = judges[layout]
    expected = judge.similarity(judge.encode_query(QUERIES[:1]), judge.encode_document(DOCUMENTS))[0].numpy()
    data = posted(http, "/v1/score", model=layout, text_1=QUERIES[0], text_2=DOCUMENTS)["data"]
    np.testing.assert_allclose([one["score"] for one in data], expected, atol=1e-4)
    ranked = posted(http, "/v2/rerank", model=layout, query=QUERIES[0], documents=DOCUMENTS, top_n=5)["results"]
    assert [one["index"] for one in ranked] == np.argsort(-expected, kind="stable")[:5].tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in ranked], np.sort(expected)[::-1][:5], atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "a"}, "task"),
        ("/pooling", {"input": "a", "task": "embed"}, "task"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
        ("/pooling", {"input": "a", "dimensions": 4}, "dimensions"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json={"model": "stanford", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_token_ids_are_taken_as_they_are(http: httpx.Client, models: dict[str, Path]) -> None:
    assert len(vectors(http, "stanford", [[5, 6, 7]])[0]) == 3  # type: ignore[list-item]


def test_stanfords_projection_of_another_width_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["stanford"], tmp_path / "model")
    (tmp_path / "model" / "artifact.metadata").write_text(json.dumps({"dim": 16}))
    with pytest.raises(MantaError, match="weight has shape"):
        PoolingEngines({"model": tmp_path / "model"})


def test_a_decoder_cannot_hide_the_tokens_that_lengthen_a_query(tmp_path: Path) -> None:
    decoder = SimpleNamespace(directory=tmp_path, is_causal=True)
    late = LateInteraction(expansion=QueryExpansion(8, is_seen=False))
    with pytest.raises(UnsupportedError, match="attend_to_expansion_tokens"):
        pooling_info._of_tokens(decoder, [], late, {})  # type: ignore[arg-type]
