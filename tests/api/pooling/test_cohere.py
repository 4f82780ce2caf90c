"""POST /v2/embed and /v1/embed, as Cohere's clients ask; sentence-transformers judges vectors and packed forms."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import add_modules, texts, tiny_encoder

ASKED = texts(5)
FORMS = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cohere") / "model"
    shutil.copytree(tiny_encoder("bert"), path)
    add_modules(path)
    given = {"prompts": {"query": "fish boat : ", "document": ""}}
    (path / "config_sentence_transformers.json").write_text(json.dumps(given))
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> SentenceTransformer:
    return SentenceTransformer(str(directory), device="cpu")


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[PoolingEngines]:
    engines = PoolingEngines({"embed": directory})
    yield engines
    engines.shutdown()


def embed(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v2/embed", json={"model": "embed", "input_type": "search_document", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_every_form_of_each_vector(http: httpx.Client, reference: SentenceTransformer) -> None:
    answer = embed(http, texts=ASKED, embedding_types=FORMS)
    found, expected = answer["embeddings"], reference.encode(ASKED)
    assert found.keys() == set(FORMS)
    np.testing.assert_allclose(found["float"], expected, atol=1e-5)
    decoded = [np.frombuffer(base64.b64decode(one), "<f4") for one in found["base64"]]
    np.testing.assert_allclose(decoded, expected, atol=1e-5)
    for form in ("binary", "ubinary"):
        np.testing.assert_array_equal(found[form], quantize_embeddings(expected, precision=form))
    whole = np.array(found["int8"])
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, whole)
    assert np.abs(whole).max(1).tolist() == [127] * len(ASKED)
    cosines = (whole * expected).sum(1) / np.linalg.norm(whole, axis=1)
    assert cosines.min() > 0.999
    tokens = sum(len(ids) for ids in reference.tokenizer(ASKED)["input_ids"])
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}
    assert answer["texts"] == ASKED
    assert answer["response_type"] == "embeddings_by_type"


def test_the_first_version_answers_a_list_or_forms(http: httpx.Client, reference: SentenceTransformer) -> None:
    asked: dict[str, Any] = {"model": "embed", "texts": ASKED}
    plain = http.post("/v1/embed", json=asked | {"input_type": "search_query"}).json()
    np.testing.assert_allclose(plain["embeddings"], reference.encode_query(ASKED), atol=1e-5)
    assert plain["response_type"] == "embeddings_floats"
    assert plain["texts"] == ASKED
    assert plain["meta"]["api_version"] == {"version": "1"}
    several = http.post("/v1/embed", json=asked | {"embedding_types": FORMS}).json()
    assert several["embeddings"].keys() == set(FORMS)
    np.testing.assert_allclose(several["embeddings"]["float"], reference.encode(ASKED), atol=1e-5)
    assert several["response_type"] == "embeddings_by_type"
    for wrong, param in (
        ({"texts": None}, "texts"),
        ({"embedding_types": []}, "embedding_types"),
        ({"images": ["data:"]}, "images"),
    ):
        answer = http.post("/v1/embed", json=asked | wrong)
        assert answer.status_code == 400, answer.text
        assert str(answer.json()["error"]["param"]).split(".")[0] == param


def test_kinds_of_inputs_and_inputs_in_parts(http: httpx.Client, reference: SentenceTransformer) -> None:
    queries = embed(http, texts=ASKED, input_type="search_query")["embeddings"]
    assert queries.keys() == {"float"}
    np.testing.assert_allclose(queries["float"], reference.encode_query(ASKED), atol=1e-5)
    parts = [{"type": "text", "text": "a quick "}, {"type": "text", "text": "fox"}]
    joined = embed(http, inputs=[{"content": parts}])["embeddings"]["float"]
    np.testing.assert_allclose(joined, reference.encode(["a quick fox"]), atol=1e-5)


def test_long_texts_lose_the_end_that_is_named(http: httpx.Client, reference: SentenceTransformer) -> None:
    long = " ".join(texts(20))
    ids = reference.tokenizer(long)["input_ids"]
    ends = {"END": [*ids[:129], ids[-1]], "START": [ids[0], *ids[-129:]]}
    for truncate, kept in ends.items():
        found = embed(http, texts=[long], truncate=truncate)
        assert found["meta"]["billed_units"]["input_tokens"] == 130
        same = http.post("/v1/embeddings", json={"model": "embed", "input": [kept]}).json()["data"][0]["embedding"]
        np.testing.assert_allclose(found["embeddings"]["float"][0], same, atol=1e-6)
    assert embed(http, texts=[long], max_tokens=12)["meta"]["billed_units"]["input_tokens"] == 12
    refused = http.post(
        "/v2/embed", json={"model": "embed", "input_type": "search_query", "texts": [long], "truncate": "NONE"}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "texts"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "input_type": None}, "input_type"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "output_dimension": 8}, "output_dimension"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "images": ["data:image/png;base64,"]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}, "inputs"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v2/embed", json={"model": "embed", "input_type": "search_document", **body})
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).split(".")[0] == param


def test_reranking_answers_what_cohere_s_client_reads(http: httpx.Client) -> None:
    answer = http.post("/v2/rerank", json={"model": "embed", "query": "a", "documents": ASKED, "top_n": 2}).json()
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert len(answer["results"]) == 2
