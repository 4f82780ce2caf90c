"""/generative_scoring over the engine; transformers is the judge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.api.openai.generative_scoring import probability
from app.api.server.app import create_app
from app.checkpoints.model_info import ModelInfo
from app.config.limits import RequestLimits
from tests.api.test_over_engine import EngineInThisProcess

URL = "/generative_scoring"
QUERY, ITEMS = "Is 12 + 30 equal to", [" 42?", " 43?", " a long list of words, and of other words?", ""]
LABELS = [300, 9, 77]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineInThisProcess]:
    client = EngineInThisProcess()
    yield client
    client.engine.shutdown()


@pytest.fixture
def client(engine: EngineInThisProcess) -> EngineInThisProcess:
    return engine


@pytest.fixture(scope="module")
def reference() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    path = ModelInfo.from_directory("tiny-chat").directory
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def judged(reference: Any, prompt: list[int], labels: list[int], softmax: bool) -> float:
    import torch

    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0, -1].float()
    among = logits[labels] if softmax else logits
    return float(torch.softmax(among, -1)[0 if softmax else labels[0]])


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_scores_are_the_model_s_probabilities(
    http: httpx.Client, engine: EngineInThisProcess, reference: Any, softmax: bool, item_first: bool, as_ids: bool
) -> None:
    tokenizer = engine.models["tiny-chat"].tokenizer
    query, items = tokenizer.encode(QUERY, True), [tokenizer.encode(item, False) for item in ITEMS]
    body: dict[str, Any] = {"query": query if as_ids else QUERY, "items": items if as_ids else ITEMS}
    body |= {"label_token_ids": LABELS, "apply_softmax": softmax, "item_first": item_first}
    answer = http.post(URL, json=body).json()
    prompts = [item + query if item_first else query + item for item in items]
    expected = [judged(reference, prompt, LABELS, softmax) for prompt in prompts]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, rel=2e-3)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(4)]
    assert (answer["object"], answer["model"]) == ("list", "tiny-chat")
    assert answer["id"].startswith("generative-scoring-")
    usage, num_prompt = answer["usage"], sum(map(len, prompts))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 4)
    assert usage["total_tokens"] == num_prompt + 4


def test_scores_of_all_labels_are_one(http: httpx.Client) -> None:
    def score(labels: list[int], **fields: Any) -> float:
        body = {"query": QUERY, "items": ITEMS[:1], "label_token_ids": labels, **fields}
        return float(http.post(URL, json=body).json()["data"][0]["score"])

    assert sum(score(LABELS[i:] + LABELS[:i]) for i in range(3)) == pytest.approx(1.0)
    assert score([9]) == 1.0
    assert score([9, 9, 77]) == pytest.approx(score([9, 77])), "a label that is there twice counts once"
    assert score([9], apply_softmax=False) < 1.0


def test_probabilities() -> None:
    assert probability([math.log(0.2), math.log(0.6)], among_these=True) == pytest.approx(0.25)
    assert probability([math.log(0.2), math.log(0.6)], among_these=False) == pytest.approx(0.2)
    assert probability([-math.inf, -math.inf], among_these=True) == 0.0
    assert probability([-900.0, -1000.0], among_these=True) == 1.0, "no underflow"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["a"] * 17}, "items"),
        ({"items": ["a", [1]]}, "items.1"),
        ({"items": [[1], "a"]}, "items.1"),
        ({"items": [[10**9]]}, "items"),
        ({"items": ["word " * 20_000]}, "items"),
        ({"query": "word " * 20_000}, "query"),
        ({"query": None}, "query"),
        ({"query": [], "items": [[]]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**9]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"label_token_ids": ["a"]}, "label_token_ids.0"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_refusals_name_the_field(client: Any, http_to: Any, fields: dict[str, Any], param: str) -> None:
    http = http_to(create_app(client, RequestLimits(max_prompts=16)))
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | fields
    refused = http.post(URL, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_prompts_are_bounded_together(client: Any, http_to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.openai.generative_scoring.MAX_TOKEN_IDS", 100)
    http = http_to(create_app(client, RequestLimits()))
    body = {"query": [5] * 20, "items": [[6]] * 4, "label_token_ids": LABELS}
    assert http.post(URL, json=body).status_code == 200
    refused = http.post(URL, json=body | {"items": [[6]] * 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")
