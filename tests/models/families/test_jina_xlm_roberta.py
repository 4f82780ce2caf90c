"""Jina Embeddings v3 and Jina Reranker v2 in their published layout: vectors with the adapter of each task and scores
equal those of a page of plain matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from app.checkpoints.model_info import ASSETS, ModelInfo
from app.config.engine import EngineConfig
from app.errors import CheckpointError, UnsupportedError
from app.models.model_check import check_model
from tests.hf_logprobs import prompts
from tests.models.families.published import Page, heads, turn_halves
from tests.worker.pooling.pooling_driver import PoolingDriver

TOKENIZER = str(ASSETS / "tiny-chat")
PROMPTS = prompts((1, 17, 3, 60, 33))
Tensor = torch.Tensor
SIZE, WIDTH, LAYERS, DIM, RANK = 48, 80, 2, 12, 3
TASKS = ["retrieval.query", "retrieval.passage", "text-matching"]
CONFIG = {
    **{"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "use_flash_attn": True, "vocab_size": 512},
    **{"hidden_size": SIZE, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4},
    **{"max_position_embeddings": 130, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu"},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "emb_pooler": "mean"},
}
V3 = {
    **{**CONFIG, "position_embedding_type": "rotary", "rotary_emb_base": 20_000.0, "lora_adaptations": TASKS},
    **{"lora_rank": RANK, "lora_alpha": 2},
}
RERANKER = {**CONFIG, "architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
RERANKER |= {"position_embedding_type": "absolute"}


def reference(p: Page, ids: Tensor) -> Tensor:
    """Hidden states [T, C]."""
    tables = {name: p.tensors.get(f"roberta.embeddings.{name}_embeddings.weight") for name in ("word", "position")}
    assert tables["word"] is not None
    x = tables["word"][ids] + p.tensors["roberta.embeddings.token_type_embeddings.weight"][0]
    if tables["position"] is not None:
        x = x + tables["position"][2 : 2 + len(ids)]
    x = p.layer_norm("roberta.emb_ln", x, 1e-5)
    for i in range(LAYERS):
        name = f"roberta.encoder.layers.{i}"
        q, k, v = (heads(part, DIM) for part in p.linear(f"{name}.mixer.Wqkv", x).chunk(3, -1))
        if tables["position"] is None:
            q, k = (turn_halves(one, p.config["rotary_emb_base"]) for one in (q, k))
        seen = ((q @ k.transpose(1, 2) / DIM**0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = p.layer_norm(f"{name}.norm1", x + p.linear(f"{name}.mixer.out_proj", seen), 1e-5)
        fed = p.linear(f"{name}.mlp.fc2", F.gelu(p.linear(f"{name}.mlp.fc1", x)))
        x = p.layer_norm(f"{name}.norm2", x + fed, 1e-5)
    return x


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of weights and biases, by module."""
    linears = {"roberta.pooler.dense": (SIZE, SIZE)}
    norms = ["roberta.emb_ln"]
    for i in range(LAYERS):
        name = f"roberta.encoder.layers.{i}"
        linears |= {f"{name}.mixer.Wqkv": (3 * SIZE, SIZE), f"{name}.mixer.out_proj": (SIZE, SIZE)}
        linears |= {f"{name}.mlp.fc1": (WIDTH, SIZE), f"{name}.mlp.fc2": (SIZE, WIDTH)}
        norms += [f"{name}.norm1", f"{name}.norm2"]
    if config is RERANKER:
        linears |= {"classifier.dense": (SIZE, SIZE), "classifier.out_proj": (1, SIZE)}
    tables = {"word": 512, "token_type": 1} | ({} if config is V3 else {"position": 130})
    found: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    found |= {f"{name}.bias": (shape[0],) for name, shape in linears.items()}
    found |= {f"{name}.{leaf}": (SIZE,) for name in norms for leaf in ("weight", "bias")}
    return found | {f"roberta.embeddings.{name}_embeddings.weight": (rows, SIZE) for name, rows in tables.items()}


def published(directory: Path, config: dict[str, Any], **changes: Any) -> dict[str, Tensor]:
    """Writes a random checkpoint, of v3 with adapters; its weights as they are without any."""
    torch.manual_seed(0)
    weights = {
        name: (torch.randn(shape) * 0.2 + (len(shape) == 1 and name.endswith("weight")))
        for name, shape in shapes(config).items()
    }
    stored = dict(weights)
    if config is V3:
        for name in [name for name, tensor in weights.items() if tensor.ndim == 2]:
            rows, columns = weights[name].shape
            stem = name.removesuffix("weight") + "parametrizations.weight."
            stored[f"{stem}original"] = stored.pop(name)
            sides = (rows, RANK), (RANK, columns)
            first, second = sides if "embeddings." in name else sides[::-1]
            stored[f"{stem}0.lora_A"] = torch.randn(len(TASKS), *first) * 0.3
            stored[f"{stem}0.lora_B"] = torch.randn(len(TASKS), *second) * 0.3
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | changes))
    return weights


def adapted(directory: Path, weights: dict[str, Tensor], task: int) -> dict[str, Tensor]:
    """Weights with the adapter of a task, as Jina's code adds it."""
    stored, found = load_file(directory / "model.safetensors"), dict(weights)
    for name, weight in weights.items():
        stem = name.removesuffix("weight") + "parametrizations.weight.0.lora_"
        if f"{stem}A" in stored:
            first, second = stored[f"{stem}A"][task], stored[f"{stem}B"][task]
            product = first @ second if "embeddings." in name else second @ first
            found[name] = weight + product * V3["lora_alpha"] / RANK
    return found


def agree(directory: Path, weights: dict[str, Tensor], **options: Any) -> None:
    """Vectors, means of a text's tokens, equal the page's."""
    page = Page(weights, V3)
    with PoolingDriver(directory, tokenizer=TOKENIZER, max_model_len=128, **options) as driver:
        found = driver.pool(PROMPTS, task="embed")
    for prompt, vector in zip(PROMPTS, found, strict=True):
        expected = F.normalize(reference(page, torch.tensor(prompt)).mean(0), dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("task", [None, *TASKS[1:]])
def test_vectors_of_each_task(tmp_path: Path, task: str | None) -> None:
    weights = published(tmp_path, V3, jina_task=task)
    own = weights if task is None else adapted(tmp_path, weights, TASKS.index(task))
    agree(tmp_path, own)


def test_over_two_ranks(tmp_path: Path) -> None:
    weights = published(tmp_path, V3, jina_task=TASKS[1])
    agree(tmp_path, adapted(tmp_path, weights, 1), executor="local_processes", tensor_parallel_size=2)


def test_scores_of_the_reranker(tmp_path: Path) -> None:
    page = Page(published(tmp_path, RERANKER), RERANKER)
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        found = driver.pool(PROMPTS, task="classify")
    for prompt, score in zip(PROMPTS, found, strict=True):
        pooled = torch.tanh(page.linear("classifier.dense", reference(page, torch.tensor(prompt))[0]))
        np.testing.assert_allclose(score, page.linear("classifier.out_proj", pooled).sigmoid().numpy(), atol=1e-4)


def test_vectors_of_tokens_of_jina_colbert(tmp_path: Path) -> None:
    """Stanford's layout over Jina's encoder; tests/api/pooling/test_late_interaction compares scores of that layout."""
    plain = {name: value for name, value in V3.items() if not name.startswith("lora_")}
    weights = published(tmp_path, CONFIG, **{**plain, "architectures": ["HF_ColBERT"]})
    weights = {name: tensor for name, tensor in weights.items() if "position_embeddings" not in name}
    weights |= {"linear.weight": torch.randn(16, SIZE)}
    save_file(weights, tmp_path / "model.safetensors")
    marks = {"query_token_id": "[QueryMarker]", "doc_token_id": "[DocumentMarker]", "attend_to_mask_tokens": True}
    (tmp_path / "artifact.metadata").write_text(json.dumps({"dim": 16, "query_maxlen": 32, **marks}))
    page = Page(weights, V3)
    with PoolingDriver(tmp_path, tokenizer=TOKENIZER, max_model_len=128) as driver:
        late, found = driver.pooling.late, driver.pool(PROMPTS, task="token_embed")
    assert late is not None
    assert dict(late.marks) == {"query": "[QueryMarker] ", "document": "[DocumentMarker] "}
    assert late.expansion is not None
    assert late.expansion.is_seen
    for prompt, vectors in zip(PROMPTS, found, strict=True):
        expected = F.normalize(page.linear("linear", reference(page, torch.tensor(prompt))), dim=1)
        np.testing.assert_allclose(vectors, expected.numpy(), atol=1e-4)


def test_what_cannot_be(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "max_model_len": 128}
    published(tmp_path, V3, jina_task="separation")
    with pytest.raises(UnsupportedError, match=r"jina_task='separation': known are retrieval\.query"):
        PoolingDriver(tmp_path, **options)
    published(tmp_path, V3, lora_adaptations="all")
    with pytest.raises(CheckpointError, match="lora_adaptations"):
        check_model(EngineConfig(model=str(tmp_path)))
    published(tmp_path, V3, jina_task=TASKS[0])
    stored = load_file(tmp_path / "model.safetensors")
    name = "roberta.encoder.layers.1.mlp.fc1.parametrizations.weight.0.lora_B"
    for wrong, error in ((stored[name][:, 1:], "shape of another weight"), (None, "holds no adapter")):
        kept = {own: tensor for own, tensor in stored.items() if own != name}
        save_file(kept if wrong is None else kept | {name: wrong.clone()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=error):
            PoolingDriver(tmp_path, **options)


def test_plain_xlm_roberta_keeps_its_name(tmp_path: Path) -> None:
    plain = {name: value for name, value in CONFIG.items() if name != "use_flash_attn"}
    published(tmp_path, plain)
    assert ModelInfo.from_directory(str(tmp_path)).architecture == "XLMRobertaModel"
