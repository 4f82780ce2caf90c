"""Scores by a language model's yes and no over HTTP, in every form that such models have; sentence-transformers'
CrossEncoder is the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import CheckpointError, ConfigError, UnsupportedError
from app.models.model_check import check_model
from app.offline.llm import LLM
from app.records.pooling_info import PoolingInfo
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import texts
from tests.tiny_models import DEFAULTS
from tests.tiny_rerankers import HEADS, TEMPLATE, converted, packed, written
from tests.worker.pooling.pooling_driver import PoolingDriver

QUERY, DOCUMENTS = "which fox jumps over the boat ?", texts(12, 20, seed=4)
AS_VLLM = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rerankers")
    source = written(root / "source", tied=True, template=TEMPLATE)
    plain = written(root / "plain", tied=False)
    return {
        "packed": packed(source, root / "packed"),
        "asked": packed(source, root / "asked", prompts={"boats": "Find boats"}, default_prompt_name="boats"),
        "original": plain,
        "judge": packed(written(root / "judge-source", tied=False, template=TEMPLATE), root / "judge"),
        "converted": converted(plain, root / "converted"),
    }


@pytest.fixture(scope="module")
def judges(models: dict[str, Path]) -> dict[str, CrossEncoder]:
    found = {name: CrossEncoder(str(models[name]), device="cpu") for name in ("packed", "asked", "judge")}
    return {**found, "original": found["judge"], "converted": found["judge"]}


@pytest.fixture(scope="module")
def client(models: dict[str, Path]) -> Iterator[PoolingEngines]:
    engines = PoolingEngines({name: models[name] for name in ("packed", "asked", "converted")})
    yield engines
    engines.shutdown()


@pytest.fixture(scope="module")
def original(models: dict[str, Path]) -> Iterator[LLM]:
    """As users of vLLM start it, offline."""
    with LLM(str(models["original"]), hf_overrides=AS_VLLM, device="cpu", num_threads=1) as llm:
        yield llm


def posted(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", ["packed", "asked"])
def test_scores_of_what_sentence_transformers_packed(
    http: httpx.Client, judges: dict[str, CrossEncoder], name: str
) -> None:
    expected = judges[name].predict([(QUERY, text) for text in DOCUMENTS])
    logits = judges[name].predict([(QUERY, text) for text in DOCUMENTS], activation_fn=torch.nn.Identity())
    assert np.ptp(logits) > 0.5, "all documents are alike"
    data = posted(http, "/v1/score", model=name, text_1=QUERY, text_2=DOCUMENTS)["data"]
    np.testing.assert_allclose([one["score"] for one in data], expected, atol=1e-4)
    ranked = posted(http, "/v1/rerank", model=name, query=QUERY, documents=DOCUMENTS, top_n=5)["results"]
    assert [one["index"] for one in ranked] == np.argsort(-expected, kind="stable")[:5].tolist()
    raw = posted(http, "/score", model=name, text_1=QUERY, text_2=DOCUMENTS, use_activation=False)["data"]
    np.testing.assert_allclose([one["score"] for one in raw], logits, atol=1e-4)


@pytest.mark.parametrize("name", ["packed", "asked", "converted"])
def test_an_instruction_of_the_request(http: httpx.Client, judges: dict[str, CrossEncoder], name: str) -> None:
    """It takes the place of the usual one, wherever that is written down."""
    pairs = [(QUERY, text) for text in DOCUMENTS]
    asked: dict[str, Any] = {"model": name, "text_1": QUERY, "text_2": DOCUMENTS, "instruction": "Find trains"}
    if name == "converted":  # a plain classifier, whose texts bring the template
        refused = http.post("/score", json=asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instruction")
        return
    expected = judges[name].predict(pairs, prompt="Find trains")
    assert np.abs(expected - judges[name].predict(pairs)).max() > 1e-3
    data = posted(http, "/score", **asked)["data"]
    np.testing.assert_allclose([one["score"] for one in data], expected, atol=1e-4)


def test_scores_of_the_original_with_the_overrides_of_vllm(original: LLM, judges: dict[str, CrossEncoder]) -> None:
    expected = judges["original"].predict([(QUERY, text) for text in DOCUMENTS])
    found = original.score(QUERY, DOCUMENTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], expected, atol=1e-4)
    head, tail = TEMPLATE.partition("{{")[0], "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    asked = "Given a web search query, retrieve relevant passages that answer the query"
    wrapped = f"{head}{asked}\n<Query>: {QUERY}\n"
    found = original.score(wrapped, [f"<Document>: {text}{tail}" for text in DOCUMENTS], use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], expected, atol=1e-4)


def test_a_converted_classifier_reads_the_template_that_its_texts_bring(
    http: httpx.Client, judges: dict[str, CrossEncoder]
) -> None:
    expected = judges["converted"].predict([(QUERY, text) for text in DOCUMENTS])
    head, tail = TEMPLATE.partition("{{")[0], "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    asked = "Given a web search query, retrieve relevant passages that answer the query"
    documents = [f"<Document>: {text}{tail}" for text in DOCUMENTS]
    wrapped = f"{head}{asked}\n<Query>: {QUERY}\n"
    data = posted(http, "/v1/score", model="converted", text_1=wrapped, text_2=documents)["data"]
    np.testing.assert_allclose([one["score"] for one in data], expected, atol=1e-4)


def test_texts_are_cut_and_the_template_is_not(http: httpx.Client, models: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models["packed"])

    def score(document: str, **more: Any) -> float:
        body = {"query": QUERY, "documents": [document], "model": "packed", **more}
        return float(posted(http, "/rerank", **body)["results"][0]["relevance_score"])

    long = " ".join(DOCUMENTS)
    short = tokenizer.decode(tokenizer(long, add_special_tokens=False)["input_ids"][:9])
    assert score(long, max_tokens_per_doc=9) == pytest.approx(score(short), abs=1e-6)
    whole = posted(http, "/rerank", model="packed", query=QUERY, documents=[long])["usage"]["prompt_tokens"]
    for limit in (whole - 1, whole - 30):
        used = posted(http, "/rerank", model="packed", query=QUERY, documents=[long], truncate_prompt_tokens=limit)
        assert limit - 3 <= used["usage"]["prompt_tokens"] <= limit
        assert used["results"][0]["relevance_score"] != score(long)
    refused = http.post(
        "/rerank",
        json={"model": "packed", "query": QUERY, "documents": [long], "truncate_prompt_tokens": 5},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


MXBAI = (
    "<|im_start|>user\nquery: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "document: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}\nRelevant?"
    "<|im_end|>\n<|im_start|>assistant\n{{ '' }}"
)


@pytest.mark.parametrize(("family", "tokens"), [("qwen2", ["no", "yes"]), ("gemma", ["yes"])])
def test_other_language_models_judge_too(
    models: dict[str, Path], family: str, tokens: list[str], tmp_path: Path
) -> None:
    """As mxbai-rerank-v2 and bge-reranker-v2-gemma are served, by two tokens or one, behind a template of theirs."""
    source = models["original"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((source / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(MXBAI)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config = AutoConfig.for_model(family, **{**DEFAULTS, **HEADS, "vocab_size": len(tokenizer), "head_dim": 16})
    torch.manual_seed(3)
    judge = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    judge.save_pretrained(tmp_path)
    own = {"architectures": [judge.config.architectures[0].replace("CausalLM", "SequenceClassification")]}
    method = "from_2_way_softmax" if len(tokens) == 2 else "no_post_processing"
    overrides = {**own, "classifier_from_token": tokens, "method": method}
    with LLM(str(tmp_path), hf_overrides=overrides, runner="pooling", device="cpu", num_threads=1) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    expected = []
    for text in DOCUMENTS:
        chat = [{"role": "query", "content": QUERY}, {"role": "document", "content": text}]
        prompt = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=False)
        with torch.inference_mode():
            logits = judge(prompt).logits[0, -1, ids]
        expected.append(float(torch.sigmoid(logits[-1] - (logits[0] if len(tokens) == 2 else 0.0))))
    assert np.ptp(expected) > 1e-2
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_over_two_ranks(models: dict[str, Path], judges: dict[str, CrossEncoder]) -> None:
    """Yes and no may lie with different ranks."""
    pairs = [(QUERY, text) for text in DOCUMENTS[:4]]
    expected = judges["original"].predict(pairs)
    tokenizer = AutoTokenizer.from_pretrained(models["judge"])
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "query", "content": query}, {"role": "document", "content": document}],
            tokenize=True,
            return_dict=False,
        )
        for query, document in pairs
    ]
    options: dict[str, Any] = {"executor": "local_processes", "tensor_parallel_size": 2}
    with PoolingDriver(models["judge"], **options) as driver:
        found = driver.pool(prompts, task="classify")
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        (
            {"classifier_from_token": ["no", "perhaps"], "method": "from_2_way_softmax"},
            CheckpointError,
            "'perhaps' is no token",
        ),
        ({"classifier_from_token": ["no", "yes"], "method": "no_post_processing"}, UnsupportedError, "of 2 tokens"),
        ({"classifier_from_token": [1, 2]}, CheckpointError, "classifier_from_token"),
        ({"classifier_from_token": ["yes"] * 3}, CheckpointError, "at most 2"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers"),
    ],
)
def test_what_cannot_be(models: dict[str, Path], changes: dict[str, Any], error: type[Exception], reason: str) -> None:
    options = {**AS_VLLM, "is_original_qwen3_reranker": False, **changes}
    with pytest.raises(error, match=reason):
        check_model(EngineConfig(model=str(models["original"]), hf_overrides=options))


def test_overrides_are_for_our_own_modules(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="hf_overrides: transformers reads"):
        check_model(EngineConfig(model=str(models["original"]), hf_overrides={"a": 1}, model_impl="transformers"))


def test_overrides_of_objects_change_what_they_name(models: dict[str, Path]) -> None:
    read = json.loads((models["original"] / "config.json").read_text())["rope_parameters"]
    info = ModelInfo.of(EngineConfig(model=str(models["original"]), hf_overrides={"rope_parameters": {"factor": 2.0}}))
    assert info.hf_config["rope_parameters"] == {**read, "factor": 2.0}


def test_one_token_is_its_logit(models: dict[str, Path]) -> None:
    changes = {**AS_VLLM, "is_original_qwen3_reranker": False, "classifier_from_token": ["yes"]}
    info = ModelInfo.of(EngineConfig(model=str(models["original"]), hf_overrides=changes))
    verdict = PoolingInfo.of(info).verdict
    vocabulary = json.loads((models["original"] / "tokenizer.json").read_text())["model"]["vocab"]
    assert verdict is not None
    assert (verdict.yes, verdict.no) == (vocabulary["yes"], None)
