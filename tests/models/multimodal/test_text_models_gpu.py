"""Models that read a text and write an answer, on a GPU through the whole engine with its graphs: tokens are
transformers' on a CPU."""

from __future__ import annotations

import pytest
import torch

from app.records.request import EngineRequest
from tests.engine.core_driver import run
from tests.models.multimodal.test_t5 import PARAMS, TEXTS, TOKENS
from tests.models.multimodal.test_whisper_gpu import core_of
from tests.models.multimodal.text_models import FAMILIES, LENGTH, judged_answer, tiny_text_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("chunk", [7, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers(family: str, chunk: int) -> None:
    core = core_of(str(tiny_text_model(family)), max_model_len=LENGTH, max_num_batched_tokens=chunk)
    try:
        for _ in range(2):
            found = run(core, [EngineRequest(f"r{i}", text, PARAMS) for i, text in enumerate(TEXTS)]).tokens
            expected = [judged_answer(family, text, TOKENS) for text in TEXTS]
            assert [found[f"r{i}"] for i in range(len(TEXTS))] == expected
    finally:
        core.shutdown()
