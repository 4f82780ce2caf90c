"""Jina Reranker m0 at /v1/rerank and /v1/score: transformers' Qwen2-VL and two linear layers behind the prompt
that its authors write are the judge."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.media.reader import MediaReader
from tests.api.pooling_engines import PoolingEngines
from tests.media.media_model import reader
from tests.media.pictures import file_of, picture
from tests.tiny_m0 import SEEN, Judge, prompt, published

FILES = [file_of(picture(30, 20)), file_of(picture(16, 16, seed=1))]


def url_of(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@pytest.fixture(scope="module")
def own_reader() -> Iterator[MediaReader]:
    found = reader(max_images=3)
    yield found
    found.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("m0") / "m")


@pytest.fixture(scope="module")
def judge(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(path, tmp_path_factory.mktemp("judge") / "m")


@pytest.fixture(scope="module")
def engines(path: Path, own_reader: MediaReader) -> Iterator[PoolingEngines]:
    engines = PoolingEngines({"m0": path}, own_reader, max_model_len=512, num_blocks=256)
    yield engines
    engines.shutdown()


@pytest.fixture
def client(engines: PoolingEngines) -> PoolingEngines:
    return engines


def ranked(http: httpx.Client, **body: Any) -> dict[int, float]:
    answer = http.post("/v1/rerank", json={"model": "m0", **body})
    assert answer.status_code == 200, answer.text
    return {one["index"]: one["relevance_score"] for one in answer.json()["results"]}


def test_documents_are_texts_or_pictures(http: httpx.Client, engines: PoolingEngines, judge: Judge) -> None:
    media = engines.models["m0"].media
    documents = [{"image": url_of(FILES[0])}, "a word", {"image": url_of(FILES[1])}, "another"]
    found = ranked(http, query="which one?", documents=documents)
    wanted = [
        judge.score(prompt("which one?", SEEN), media, FILES[:1]),
        judge.score(prompt("which one?", "a word")),
        judge.score(prompt("which one?", SEEN), media, FILES[1:]),
        judge.score(prompt("which one?", "another")),
    ]
    assert np.ptp(wanted) > 1e-3
    np.testing.assert_allclose([found[i] for i in range(4)], wanted, atol=1e-4)


def test_a_query_that_is_a_picture_stands_behind_the_document(
    http: httpx.Client, engines: PoolingEngines, judge: Judge
) -> None:
    media = engines.models["m0"].media
    found = ranked(http, query={"image": url_of(FILES[0])}, documents=["a word", {"image": url_of(FILES[1])}])
    wanted = [
        judge.score(prompt(SEEN, "a word"), media, FILES[:1]),
        judge.score(prompt(SEEN, SEEN), media, FILES[::-1]),
    ]
    np.testing.assert_allclose([found[0], found[1]], wanted, atol=1e-4)


def test_pairs_of_texts(http: httpx.Client, judge: Judge) -> None:
    body = {"model": "m0", "text_1": "which one?", "text_2": ["a word", "a much longer text " * 9]}
    cut = http.post("/v1/score", json={**body, "truncate_prompt_tokens": 60})
    assert cut.status_code == 200, cut.text
    data = http.post("/v1/score", json=body).json()["data"]
    wanted = [judge.score(prompt("which one?", text)) for text in body["text_2"]]
    np.testing.assert_allclose([one["score"] for one in data], wanted, atol=1e-4)
    assert cut.json()["data"][1]["score"] != data[1]["score"]
    assert cut.json()["usage"]["prompt_tokens"] <= 2 * 60
    refused = http.post("/v1/score", json={**body, "instruction": "Find boats"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instruction")
