"""An adapter is a model name in every dialect; transformers with PEFT's formula is the judge in tests/worker/lora."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from app.records.adapter import AdapterAsk
from tests.adapters import pair, write_adapter
from tests.api.engine_in_this_process import EngineInThisProcess


def adapter(directory: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (256, 128), "mlp.down_proj": (640, 256)}
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(6):
        for name, (size_in, size_out) in sizes.items():
            own = pair(f"model.layers.{layer}.{name}", size_in=size_in, size_out=size_out)
            tensors |= {key: tensor * 0.3 for key, tensor in own.items()}
    return write_adapter(directory, tensors)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineInThisProcess]:
    client, path = EngineInThisProcess(enable_lora=True, max_loras=2), str(adapter(tmp_path_factory.mktemp("pirate")))
    digest = client.engine.control("load_adapter", {"name": "pirate", "path": path}).result()
    ask = AdapterAsk("pirate", bytes.fromhex(digest))
    client.models["pirate"] = client.models["tiny-chat"].adapted(ask, path)
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


def test_models_lists_it_with_its_parent(http: httpx.Client, engine: EngineInThisProcess) -> None:
    listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
    assert list(listed) == ["tiny-chat", "pirate"]
    assert listed["tiny-chat"]["parent"] is None
    assert listed["pirate"]["parent"] == "tiny-chat"
    assert listed["pirate"]["root"] == engine.models["pirate"].root
    assert http.get("/v1/models/pirate").json() == listed["pirate"]


MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
LONG = [{"role": "user", "content": "Count from 1 to 30, please, and say each number twice. " * 3}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12}),
    "completions": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 12}),
    "responses": ("/v1/responses", {"input": "What is 12 + 30?", "max_output_tokens": 12, "store": False}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 12}),
    "beams": ("/v1/completions", {"prompt": "Once upon", "max_tokens": 5, "use_beam_search": True, "n": 2}),
    "tokens": ("/inference/v1/generate", {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 12}}),
}


def text_of(answer: dict[str, Any]) -> str:
    """What differs between answers of two models."""
    kept = {name: answer[name] for name in ("choices", "output", "content") if name in answer}
    return str([one for one in _strings(kept) if not one.startswith(("msg_", "chatcmpl", "cmpl"))])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [value[name] for name in value if name not in ("id", "logprobs")]
    if isinstance(value, list):
        for one in value:
            yield from _strings(one)
    else:
        yield str(value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_answers_with_it(http: httpx.Client, dialect: str) -> None:
    path, body = DIALECTS[dialect]
    greedy = {} if dialect in ("tokens", "beams") else {"temperature": 0}
    if dialect == "tokens":
        body = {**body, "sampling_params": {**body["sampling_params"], "temperature": 0}}
    answers = {}
    for name in ("tiny-chat", "pirate", "tiny-chat", "pirate"):
        answer = http.post(path, json={"model": name, **greedy, **body})
        assert answer.status_code == 200, answer.text
        found = text_of(answer.json())
        assert answers.setdefault(name, found) == found
    assert answers["tiny-chat"] != answers["pirate"]


def test_no_block_of_the_base_model_is_the_adapters(http: httpx.Client) -> None:
    """The same long prompt under both names, each twice: only the second time comes from the cache."""
    cached = []
    for name in ("tiny-chat", "pirate", "pirate", "tiny-chat"):
        body = {"model": name, "messages": LONG, "temperature": 0, "max_tokens": 2}
        usage = http.post("/v1/chat/completions", json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0


def test_an_unknown_adapter_is_a_404(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"model": "sailor", "messages": MESSAGES})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
