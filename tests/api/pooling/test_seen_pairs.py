"""Pairs with pictures at /v1/rerank, as Qwen3-VL-Reranker reads them: transformers' logits behind the prompt that its
authors write are the judge."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from app.media.reader import MediaReader
from tests.api.pooling_engines import PoolingEngines
from tests.chatting_media import ask_of, chatting_media_model
from tests.media.media_model import reader
from tests.media.pictures import file_of, picture
from tests.tiny_media import IMAGE, MODELS, media_judge

FILES = [file_of(picture(30, 20)), file_of(picture(16, 16, seed=1))]
MOST = 3  # pictures of a request
OVERRIDES = {
    "architectures": ["Qwen3VLForSequenceClassification"],
    "classifier_from_token": ["n", "y"],
    "is_original_qwen3_reranker": True,
}
USUAL = "Given a search query, retrieve relevant candidates that answer the query."
HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
)
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


def url_of(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@pytest.fixture(scope="module")
def own_reader() -> Iterator[MediaReader]:
    found = reader(max_images=MOST)
    yield found
    found.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template shows messages of users alone, as the published one does."""
    directory = chatting_media_model("qwen3_vl", tmp_path_factory.mktemp("seen") / "m")
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def judge(path: Path) -> PreTrainedModel:
    return media_judge(path)


@pytest.fixture(scope="module")
def engines(path: Path, own_reader: MediaReader) -> Iterator[PoolingEngines]:
    options: dict[str, Any] = {"runner": "pooling", "max_model_len": 512, "num_blocks": 256, "hf_overrides": OVERRIDES}
    engines = PoolingEngines({"seen": path}, own_reader, **options)
    yield engines
    engines.shutdown()


@pytest.fixture
def client(engines: PoolingEngines) -> PoolingEngines:
    return engines


def expected(
    engines: PoolingEngines, judge: PreTrainedModel, path: Path, text: str, file: bytes | None = None
) -> float:
    """transformers' score of a prompt with at most one picture."""
    tokenizer = engines.models["seen"].tokenizer
    before, mark, after = text.partition("<|image_pad|>")
    ids = tokenizer.encode(before, False)
    seen: dict[str, torch.Tensor] = {}
    if mark:
        assert file is not None
        media = engines.models["seen"].media
        assert media is not None
        count = media.read("image", file).layout.num_tokens
        ids += [IMAGE] * count + tokenizer.encode(after, False)
        seen = MODELS["qwen3_vl"].judge(ask_of(path, ids, file).items)
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logits = judge(input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), use_cache=False, **seen).logits
    yes, no = (logits[0, -1, tokenizer.token_to_id(letter)] for letter in "yn")
    return float(torch.sigmoid(yes - no))


def prompt(query: str, document: str, instruction: str = USUAL) -> str:
    return f"{HEAD}{instruction}<Query>:{query}\n<Document>:{document}<|im_end|>\n<|im_start|>assistant\n"


def ranked(http: httpx.Client, **body: Any) -> dict[int, float]:
    answer = http.post("/v1/rerank", json={"model": "seen", **body})
    assert answer.status_code == 200, answer.text
    return {one["index"]: one["relevance_score"] for one in answer.json()["results"]}


def test_documents_are_texts_pictures_or_both(
    http: httpx.Client, engines: PoolingEngines, judge: PreTrainedModel, path: Path
) -> None:
    urls = [url_of(file) for file in FILES]
    documents = [{"image": urls[0]}, "a word", {"text": "a word", "image": urls[1]}, {"image": urls[0]}]
    texts = [SEEN, "a word", f"{SEEN}a word", SEEN]
    shown = [FILES[0], None, FILES[1], FILES[0]]
    found = ranked(http, query="which one?", documents=documents)
    wanted = [
        expected(engines, judge, path, prompt("which one?", text), file)
        for text, file in zip(texts, shown, strict=True)
    ]
    assert np.ptp(wanted) > 1e-3
    np.testing.assert_allclose([found[i] for i in range(4)], wanted, atol=1e-4)
    found = ranked(http, query="which one?", documents=["a word", "another"])
    wanted = [expected(engines, judge, path, prompt("which one?", text)) for text in ("a word", "another")]
    np.testing.assert_allclose([found[0], found[1]], wanted, atol=1e-4)


def test_a_query_that_is_a_picture_and_an_instruction(
    http: httpx.Client, engines: PoolingEngines, judge: PreTrainedModel, path: Path
) -> None:
    query = {"image": url_of(FILES[0]), "text": "like this"}
    found = ranked(http, query=query, documents=["a word", "another"], instruction="Find <|image_pad|>")
    plain = ranked(http, query=query, documents=["a word", "another"])
    wanted = [
        expected(engines, judge, path, prompt(f"{SEEN}like this", text), FILES[0]) for text in ("a word", "another")
    ]
    np.testing.assert_allclose([plain[0], plain[1]], wanted, atol=1e-4)
    assert found[0] != plain[0]


def test_texts_of_documents_are_repeated_and_pictures_are_not(http: httpx.Client) -> None:
    shown = url_of(FILES[0])
    documents = ["a word", {"text": "another", "image": shown}, {"image": shown}]
    answer = http.post("/v1/rerank", json={"model": "seen", "query": "which one?", "documents": documents})
    found = {one["index"]: one.get("document") for one in answer.json()["results"]}
    assert found == {0: {"text": "a word"}, 1: {"text": "another"}, 2: None}


def test_what_is_refused(http: httpx.Client) -> None:
    shown = {"image": url_of(FILES[0])}
    for changed, field, says in (
        ({"documents": [shown], "max_tokens_per_doc": 3}, "max_tokens_per_doc", "a picture is not cut"),
        ({"documents": [shown], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "a picture is not cut"),
        ({"documents": [shown] * (MOST + 1)}, f"documents.{MOST}.image", f"{MOST + 1} pictures; at most {MOST}"),
        ({"documents": [{"image": "data:image/png;base64,AAAA"}]}, "documents.0.image", "is no picture"),
        ({"documents": [{}]}, "documents", "document 0 must have text or image"),
        ({"query": {}}, "query", "must have text or image"),
        ({"query": 3}, "query", "must be a text or an object"),
    ):
        answer = http.post("/v1/rerank", json={"model": "seen", "query": "which?", "documents": ["a"], **changed})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
        assert says in answer.json()["error"]["message"]
