"""Jina Reranker v3 over HTTP and offline; transformers' Qwen 3 with its two matrices is the judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError
from app.offline.llm import LLM
from app.records.pooling_info import PoolingInfo
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import texts
from tests.tiny_listwise import MARKS, Judge, published

QUERY, DOCUMENTS = "which fox jumps over the boat ?", texts(9, 20, seed=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("listwise") / "model")


@pytest.fixture(scope="module")
def judge(directory: Path) -> Judge:
    return Judge(directory)


@pytest.fixture(scope="module")
def client(directory: Path) -> Iterator[PoolingEngines]:
    engines = PoolingEngines({"jina": directory}, max_num_batched_tokens=512)
    yield engines
    engines.shutdown()


def posted(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"model": "jina", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("instruction", [None, "Find boats"])
def test_documents_are_ranked_together(http: httpx.Client, judge: Judge, instruction: str | None) -> None:
    expected = judge.scores(QUERY, DOCUMENTS, instruction)
    assert np.ptp(expected) > 0.02, "all documents are alike"
    asked = {} if instruction is None else {"instruction": instruction}
    ranked = posted(http, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **asked)
    found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    np.testing.assert_allclose([found[i] for i in range(len(DOCUMENTS))], expected, atol=1e-4)
    assert [one["index"] for one in ranked["results"]] == np.argsort(-np.array(expected)).tolist()


def test_pairs_of_several_queries(http: httpx.Client, judge: Judge) -> None:
    """Those of one query share a prompt, wherever they stand."""
    queries = [QUERY, "rain in paris", QUERY, QUERY]
    data = posted(http, "/v1/score", text_1=queries, text_2=DOCUMENTS[:4])["data"]
    together = judge.scores(QUERY, [DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[3]])
    expected = [together[0], *judge.scores("rain in paris", DOCUMENTS[1:2]), *together[1:]]
    np.testing.assert_allclose([one["score"] for one in data], expected, atol=1e-4)


def test_texts_are_cut_and_marks_of_theirs_count_for_nothing(http: httpx.Client, judge: Judge) -> None:
    long = " ".join(DOCUMENTS)
    short = judge.tokenizer.decode(judge.tokenizer(long)["input_ids"][:9])
    documents = [long, f"{MARKS[1]}fox{MARKS[0]}"]
    ranked = posted(http, "/v1/rerank", query=QUERY + MARKS[0], documents=documents, max_tokens_per_doc=9)
    found = {one["index"]: one["relevance_score"] for one in ranked["results"]}
    np.testing.assert_allclose([found[0], found[1]], judge.scores(QUERY, [short, "fox"]), atol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/rerank",
            {"query": QUERY, "documents": DOCUMENTS, "truncate_prompt_tokens": 99},
            "truncate_prompt_tokens",
        ),
        ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}, "use_activation"),
        ("/v1/embeddings", {"input": QUERY}, "task"),
    ],
)
def test_what_is_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json={"model": "jina", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_offline_in_chunks_of_prompts(directory: Path, judge: Judge) -> None:
    """More documents than a prompt holds: the query's vector is a mean."""
    documents = texts(130, 3, seed=5)
    with LLM(str(directory), device="cpu", num_threads=1, max_num_batched_tokens=512) as llm:
        found = llm.score(QUERY, documents, use_tqdm=False)
        with pytest.raises(UnsupportedError, match="several texts"):
            llm.score(QUERY, documents, truncate_prompt_tokens=9)
    np.testing.assert_allclose([one.outputs.score for one in found], judge.scores(QUERY, documents), atol=1e-4)


def test_over_two_ranks(directory: Path, judge: Judge) -> None:
    with LLM(str(directory), device="cpu", num_threads=1, tensor_parallel_size=2) as llm:
        found = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], judge.scores(QUERY, DOCUMENTS), atol=1e-4)


def test_marks_that_the_vocabulary_lacks(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "model")
    file = tmp_path / "model/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for entry in tokenizer["added_tokens"]:
        entry["id"] += 1000 * (entry["content"] == MARKS[1])
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="rerank_token"):
        PoolingInfo.of(ModelInfo.from_directory(str(tmp_path / "model")))
