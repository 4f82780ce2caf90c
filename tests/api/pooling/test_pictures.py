"""Pictures among the messages of /v1/embeddings and /pooling: the vectors are those of `LLM.embed`, which transformers
judges elsewhere; what is no picture of such a model is refused by its field."""

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
from tests.chatting_media import chatting_media_model
from tests.media.media_model import END, PAD, START, reader
from tests.media.pictures import file_of, picture
from tests.models.multimodal.test_two_towers import tiny_towers

IMAGE = picture(30, 20)
URL = f"data:image/png;base64,{base64.b64encode(file_of(IMAGE)).decode()}"
PART = {"type": "image_url", "image_url": {"url": URL}}
OPTIONS: dict[str, Any] = {"runner": "pooling", "max_model_len": 32, "num_blocks": 64}


@pytest.fixture(scope="module")
def own_reader() -> Iterator[MediaReader]:
    found = reader()
    yield found
    found.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, own_reader: MediaReader) -> Iterator[PoolingEngines]:
    sees = chatting_media_model("qwen3_vl", tmp_path_factory.mktemp("sees") / "m")
    directories = {"sees": sees, "clip": tiny_towers("clip"), "siglip": tiny_towers("siglip")}
    engines = PoolingEngines(directories, own_reader, **OPTIONS)
    yield engines
    engines.shutdown()


@pytest.fixture
def client(engines: PoolingEngines) -> PoolingEngines:
    return engines


def said(*parts: Any) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def vector(http: httpx.Client, path: str = "/v1/embeddings", **body: Any) -> tuple[np.ndarray, int]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    (entry,) = found["data"]
    return np.asarray(entry.get("embedding", entry.get("data"))), found["usage"]["prompt_tokens"]


def test_a_conversation_with_a_picture(http: httpx.Client, engines: PoolingEngines) -> None:
    plain = f"<|im_start|>user\nab{START}{PAD}{END}<|im_end|>\n"
    with LLM(engines.models["sees"].info.directory.as_posix(), device="cpu", num_threads=1, **OPTIONS) as llm:
        asked = [plain, plain + "<|im_start|>assistant\n"]
        prompts = [{"prompt": prompt, "multi_modal_data": {"image": IMAGE}} for prompt in asked]
        whole, open_ended = llm.embed(prompts, use_tqdm=False)
    body = {"model": "sees", "messages": said("ab", PART)}
    found, num_tokens = vector(http, **body)
    np.testing.assert_allclose(found, whole.outputs.embedding, atol=1e-5)
    assert num_tokens == len(whole.prompt_token_ids)
    assert engines.requests[-1].asked(MediaAsk) is not None
    np.testing.assert_allclose(vector(http, "/pooling", task="embed", **body)[0], whole.outputs.embedding, atol=1e-5)
    found, _ = vector(http, **body, add_generation_prompt=True)
    np.testing.assert_allclose(found, open_ended.outputs.embedding, atol=1e-5)


def test_what_a_prompt_is_cut_to(http: httpx.Client, engines: PoolingEngines) -> None:
    messages = said("ab", PART, "cd")
    vector(http, model="sees", messages=messages)
    request = engines.requests[-1]
    ask = request.asked(MediaAsk)
    assert ask is not None
    (item,) = ask.items
    within = http.post("/v1/embeddings", json={"messages": messages, "truncate_prompt_tokens": item.offset + 1})
    assert within.status_code == 400
    assert "end within a picture" in within.json()["error"]["message"]
    before, num_tokens = vector(http, messages=messages, truncate_prompt_tokens=item.offset)
    assert num_tokens == item.offset
    assert engines.requests[-1].asked(MediaAsk) is None
    np.testing.assert_allclose(before, vector(http, input=[request.prompt_token_ids[: item.offset]])[0], atol=1e-5)


@pytest.mark.parametrize("model", ["clip", "siglip"])
def test_a_text_or_a_picture(model: str, http: httpx.Client, engines: PoolingEngines) -> None:
    with LLM(engines.models[model].info.directory.as_posix(), device="cpu", num_threads=1, **OPTIONS) as llm:
        shown, text = llm.embed([{"prompt": "", "multi_modal_data": {"image": IMAGE}}, "a cat"], use_tqdm=False)
    found, num_tokens = vector(http, model=model, messages=said(PART))
    np.testing.assert_allclose(found, shown.outputs.embedding, atol=1e-5)
    assert num_tokens == 1
    for body in ({"messages": said("a cat")}, {"input": "a cat"}):
        np.testing.assert_allclose(vector(http, model=model, **body)[0], text.outputs.embedding, atol=1e-5)
    for parts in ((PART, "a"), (PART, PART)):
        answer = http.post("/v1/embeddings", json={"model": model, "messages": said(*parts)})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
