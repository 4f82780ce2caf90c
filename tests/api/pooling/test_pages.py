"""Pages as pictures at /pooling, and queries as texts: vectors of their tokens are those of `LLM.encode`, which
transformers judges elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from app import LLM
from app.media.reader import MediaReader
from app.records.media import MediaAsk
from tests.api.pooling_engines import PoolingEngines
from tests.media.media_model import reader
from tests.media.pictures import file_of, picture
from tests.models.multimodal.test_col_qwen2 import written

FILE = file_of(picture(30, 20))
PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(FILE).decode()}"}}
MOST = 3  # pictures of a request
OPTIONS: dict[str, Any] = {"max_model_len": 256, "num_blocks": 128}


@pytest.fixture(scope="module")
def own_reader() -> Iterator[MediaReader]:
    found = reader(max_images=MOST)
    yield found
    found.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, own_reader: MediaReader) -> Iterator[PoolingEngines]:
    path = tmp_path_factory.mktemp("pages") / "m"
    written("qwen2_vl", path)
    engines = PoolingEngines({"pages": path}, own_reader, **OPTIONS)
    yield engines
    engines.shutdown()


@pytest.fixture
def client(engines: PoolingEngines) -> PoolingEngines:
    return engines


def said(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def vectors(http: httpx.Client, **body: Any) -> np.ndarray[Any, Any]:
    answer = http.post("/pooling", json={"model": "pages", **body})
    assert answer.status_code == 200, answer.text
    (entry,) = answer.json()["data"]
    return np.asarray(entry["data"])


def test_pages_and_queries(http: httpx.Client, engines: PoolingEngines) -> None:
    with LLM(engines.models["pages"].info.directory.as_posix(), device="cpu", num_threads=1, **OPTIONS) as llm:
        page: Any = {"prompt": "", "multi_modal_data": {"image": FILE}}
        shown, text = llm.encode([page, "which page?"], use_tqdm=False)
        score = llm.score("which page?", "this one", use_tqdm=False)[0].outputs.score
    np.testing.assert_allclose(vectors(http, messages=said(PART)), shown.outputs.data, atol=1e-5)
    np.testing.assert_allclose(vectors(http, messages=said("which page?")), text.outputs.data, atol=1e-5)
    query = vectors(http, input="which page?", input_type="query")
    assert len(query) > len(text.outputs.data)  # marked, and lengthened
    body = {"model": "pages", "query": "which page?", "documents": ["this one"]}
    (ranked,) = http.post("/v1/rerank", json=body).json()["results"]
    np.testing.assert_allclose(ranked["relevance_score"], score, rtol=1e-5)


def test_a_prompt_is_a_text_or_a_page(http: httpx.Client) -> None:
    for parts in ((PART, PART), ("see", PART)):
        answer = http.post("/pooling", json={"model": "pages", "messages": said(*parts)})
        assert answer.status_code == 400
        assert "a text or a picture" in answer.json()["error"]["message"]


def test_what_has_no_template_takes_one_message_of_the_user(http: httpx.Client) -> None:
    for field, body in {
        "add_generation_prompt": {"add_generation_prompt": True},
        "chat_template_kwargs": {"chat_template_kwargs": {}},
        "add_special_tokens": {"add_special_tokens": True},
        "truncate_prompt_tokens": {"truncate_prompt_tokens": 9},
        "messages": {"messages": said("a") + said(PART)},
        "messages ": {"messages": [{"role": "system", "content": "a"}]},
    }.items():
        answer = http.post("/pooling", json={"model": "pages", "messages": said(PART), **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field.strip()


def test_pages_are_ranked_beside_texts(http: httpx.Client, engines: PoolingEngines) -> None:
    url = PART["image_url"]["url"]
    other = f"data:image/png;base64,{base64.b64encode(file_of(picture(16, 16, seed=1))).decode()}"
    documents = [{"image": url}, "this one", {"image": other}, {"text": "that one"}, {"image": url}]
    body = {"model": "pages", "query": "which page?", "documents": documents}
    before = len(engines.requests)
    answer = http.post("/v1/rerank", json=body)
    assert answer.status_code == 200, answer.text
    asked = [item for request in engines.requests[before:] for item in request.asks if isinstance(item, MediaAsk)]
    assert len(asked) == 2  # what comes twice is computed once
    found = {one["index"]: one for one in answer.json()["results"]}
    query = vectors(http, input="which page?", input_type="query")
    for i, document in enumerate(documents):
        text = document if isinstance(document, str) else document.get("text")
        assert found[i].get("document") == (None if text is None else {"text": text})
        part = {"type": "image_url", "image_url": {"url": document["image"]}} if text is None else text  # type: ignore[index]
        score = (query @ vectors(http, messages=said(part)).T).max(1).sum()
        np.testing.assert_allclose(found[i]["relevance_score"], score, rtol=1e-4)
    for changed, field in (
        (
            {"documents": [{"image": url, "text": "both"}]},
            "documents.0: a document of this model is a text or a picture",
        ),
        ({"documents": [{}]}, "must have text or image"),
        ({"query": {"image": url}}, "query.image"),
        ({"documents": [{"image": url}], "max_tokens_per_doc": 3}, "max_tokens_per_doc"),
        ({"documents": [{"image": url}], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"documents": [{"image": url}, {"text": ""}]}, "documents.1: is empty"),
        ({"documents": [{"image": url}] * (MOST + 1)}, f"documents.{MOST}.image: {MOST + 1} pictures; at most {MOST} "),
        ({"documents": ["a", {"image": "data:image/png;base64,AAAA"}]}, "documents.1.image"),
        ({"documents": [{"image": url}], "instruction": "rank"}, "instruction"),
    ):
        answer = http.post("/v1/rerank", json={**body, **changed})
        assert answer.status_code in (400, 422), answer.text
        assert field in answer.text
