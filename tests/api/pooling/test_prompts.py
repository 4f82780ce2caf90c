"""Prompts by task over HTTP; sentence-transformers, which reads the same directory, is the judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from app.checkpoints.model_info import ModelInfo
from app.errors import InvalidRequestError, UnsupportedError
from app.offline.llm import LLM
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import add_modules, texts, tiny_encoder

PROMPTS = {"query": "fish boat : ", "document": "river bank money : ", "Clustering": "rain sun : "}
ASKED = texts(4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "model"
    shutil.copytree(tiny_encoder("bert"), path)
    add_modules(path)
    given = {"prompts": PROMPTS, "default_prompt_name": "Clustering", "similarity_fn_name": "cosine"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(given))
    return path


@pytest.fixture(scope="module")
def reference(directory: Path) -> SentenceTransformer:
    return SentenceTransformer(str(directory), device="cpu")


@pytest.fixture(scope="module")
def skipping(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, whose vectors are means of what stands behind the prompt."""
    path = tmp_path_factory.mktemp("skipping") / "model"
    shutil.copytree(directory, path)
    add_modules(path, {"embedding_dimension": 48, "pooling_mode": "mean", "include_prompt": False})
    return path


@pytest.fixture(scope="module")
def client(directory: Path, skipping: Path) -> Iterator[PoolingEngines]:
    engines = PoolingEngines({"prompts": directory, "plain": tiny_encoder("bert", seed=3), "skipping": skipping})
    yield engines
    engines.shutdown()


def vectors(http: httpx.Client, **body: Any) -> np.ndarray:
    answer = http.post("/v1/embeddings", json={"model": "prompts", "input": ASKED, **body})
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


@pytest.mark.parametrize(
    ("asked", "prompt_name"),
    [
        ({}, None),
        ({"prompt_name": "document"}, "document"),
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_query"}, "query"),
        ({"input_type": "passage"}, "document"),
        ({"input_type": "clustering"}, "Clustering"),
        ({"input_type": "classification"}, None),  # which it has no prompt for: the usual one
    ],
)
def test_prompts_go_before_texts(
    http: httpx.Client, reference: SentenceTransformer, asked: dict[str, str], prompt_name: str | None
) -> None:
    expected = reference.encode(ASKED, prompt_name=prompt_name)
    np.testing.assert_allclose(vectors(http, **asked), expected, atol=1e-5)
    assert np.abs(expected - reference.encode(ASKED, prompt="")).max() > 0.01, "the prompt changes nothing"


def test_queries_and_documents_are_told_apart(http: httpx.Client, reference: SentenceTransformer) -> None:
    answer = http.post("/v1/score", json={"model": "prompts", "text_1": ASKED[0], "text_2": ASKED[1:]})
    expected = reference.encode_query(ASKED[0]) @ reference.encode_document(ASKED[1:]).T
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_name": "no"}, "prompt_name"),
        ({"prompt_name": "clustering"}, "prompt_name"),
        ({"input_type": "no"}, "input_type"),
        ({"input_type": "query", "prompt_name": "query"}, "input_type"),
        ({"input_type": "query", "input": [5, 6]}, "input_type"),
        ({"prompt_name": "query", "input": None, "messages": [{"role": "user", "content": "a"}]}, "prompt_name"),
        ({"model": "plain", "prompt_name": "query"}, "prompt_name"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/embeddings", json={"model": "prompts", "input": "a", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_a_model_without_prompts_takes_kinds_of_inputs_as_they_are(http: httpx.Client) -> None:
    plain, kind = vectors(http, model="plain"), vectors(http, model="plain", input_type="search_document")
    np.testing.assert_allclose(plain, kind, atol=1e-6)


def test_tokens_of_prompts_that_count_for_nothing(http: httpx.Client, skipping: Path, directory: Path) -> None:
    judge = SentenceTransformer(str(skipping), device="cpu")
    expected = judge.encode(ASKED, prompt_name="query")
    whole = SentenceTransformer(str(directory), device="cpu").encode(ASKED, prompt_name="query")
    assert np.abs(expected - whole).max() > 0.01
    np.testing.assert_allclose(vectors(http, model="skipping", input_type="query"), expected, atol=1e-5)
    np.testing.assert_allclose(vectors(http, model="skipping"), judge.encode(ASKED), atol=1e-5)
    answer = http.post("/v1/score", json={"model": "skipping", "text_1": ASKED[0], "text_2": ASKED[1:]})
    scores = judge.encode_query(ASKED[0]) @ judge.encode_document(ASKED[1:]).T
    np.testing.assert_allclose([one["score"] for one in answer.json()["data"]], scores, atol=1e-5)
    cohere = http.post("/v2/embed", json={"model": "skipping", "texts": ASKED, "input_type": "search_query"}).json()
    np.testing.assert_allclose(cohere["embeddings"]["float"], expected, atol=1e-5)
    with LLM(str(skipping), device="cpu", num_threads=1) as llm:
        found = [one.outputs.embedding for one in llm.embed(ASKED, use_tqdm=False)]
        offline = [one.outputs.score for one in llm.score(ASKED[0], ASKED[1:], use_tqdm=False)]
        with pytest.raises(InvalidRequestError, match="no token behind the 4 of its prompt"):
            llm.embed(ASKED, use_tqdm=False, truncate_prompt_tokens=4)
    np.testing.assert_allclose(found, judge.encode(ASKED), atol=1e-5)
    np.testing.assert_allclose(offline, scores, atol=1e-5)


def test_tokens_of_prompts_are_counted_as_the_text_is(http: httpx.Client, skipping: Path) -> None:
    judge = SentenceTransformer(str(skipping), device="cpu")
    encode = judge.tokenizer
    text = PROMPTS["query"] + ASKED[0]
    bare, skipped = (encode(one, add_special_tokens=False)["input_ids"] for one in (text, PROMPTS["query"]))
    with torch.inference_mode():
        hidden = judge[0].auto_model(torch.tensor([bare])).last_hidden_state[0]
    expected = torch.nn.functional.normalize(hidden[len(skipped) :].mean(0), dim=0)
    asked = {"input": ASKED[:1], "input_type": "query", "add_special_tokens": False}
    np.testing.assert_allclose(vectors(http, model="skipping", **asked)[0], expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["a", "b"], "truncate_prompt_tokens": 4}, "input"),
        ("/v1/embeddings", {"input": "", "add_special_tokens": False}, "input"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 4}, "text_2"),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 4}, "texts"),
        ("/v2/embed", {"texts": ["a"], "truncate": "START"}, "truncate"),
    ],
)
def test_a_text_of_which_nothing_would_count_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    kind = {} if path == "/v1/score" else {"input_type": "search_query"}
    answer = http.post(path, json={"model": "skipping", **kind, **body})
    assert answer.status_code == 400, answer.text
    assert param in answer.text
    whole = {name: value for name, value in body.items() if name not in ("truncate_prompt_tokens", "max_tokens")}
    whole |= {"truncate": "END"} if "truncate" in body else {}
    whole |= {"input": "a"} if body.get("input") == "" else {}
    assert http.post(path, json={"model": "skipping", **kind, **whole}).status_code == 200


def test_only_means_leave_tokens_out(skipping: Path, tmp_path: Path) -> None:
    shutil.copytree(skipping, tmp_path / "model")
    add_modules(tmp_path / "model", {"embedding_dimension": 48, "pooling_mode": "cls", "include_prompt": False})
    with pytest.raises(UnsupportedError, match="include_prompt=false with the pooling 'cls'"):
        PoolingInfo.of(ModelInfo.from_directory(str(tmp_path / "model")))
    means = PoolingInfo.of(ModelInfo.from_directory(str(skipping)))
    means.check(PoolingParams(num_skipped=2))
    for info, task in ((means, "token_embed"), (replace(means, pooling="cls"), "embed")):
        with pytest.raises(UnsupportedError, match="left out of means"):
            info.check(PoolingParams(task=task, num_skipped=2))  # type: ignore[arg-type]
