"""Jina Reranker m0 over two ranks, and in chunks of prompts; tests/api/pooling/test_jina_m0 shows it pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.models.multimodal.jina_vl import JinaVLForRanking
from app.offline.llm import LLM
from tests.tiny_m0 import Judge, prompt, published

DOCUMENTS = ["a word", "another", "a much longer text " * 5]


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"max_num_batched_tokens": 32}])
def test_scores_of_texts(tmp_path: Path, options: dict[str, Any]) -> None:
    path = published(tmp_path / "m0")
    judge = Judge(path, tmp_path / "judge")
    with LLM(str(path), device="cpu", num_threads=1, max_model_len=256, num_blocks=128, **options) as llm:
        found = [one.outputs.score for one in llm.score("which one?", DOCUMENTS, use_tqdm=False)]
    wanted = [judge.score(prompt("which one?", text)) for text in DOCUMENTS]
    assert np.ptp(wanted) > 1e-3
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_it_is_qwen2_vl() -> None:
    assert JinaVLForRanking.family.__name__ == "Qwen2VLForConditionalGeneration"
