"""Logits and greedy tokens of BART's kin equal transformers', on tiny random checkpoints: texts of mixed lengths, in
steps of one token, and preempted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import UnsupportedError
from app.models.implementation import causal_model
from app.records.encoder_info import EncoderInfo
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import core_of
from tests.models.multimodal.text_models import (
    LENGTH,
    judged_answer,
    judged_logits,
    start_of,
    tiny_text_model,
    words,
)
from tests.worker.worker_driver import Driver, all_logits

TOKENS = 7
TEXTS = [words(count, count) for count in (1, 5, 17, LENGTH, 5)]


@pytest.mark.parametrize("family", ["bart", "mbart", "pegasus", "marian", "m2m100"])
def test_logits_are_those_of_transformers(family: str) -> None:
    directory = str(tiny_text_model(family))
    driver = Driver(directory, num_blocks=64, max_num_seqs=8)
    encoder = EncoderInfo.of(ModelInfo.from_directory(directory))
    assert encoder is not None
    assert list(encoder.start) == start_of(family)
    for text in TEXTS:
        answer = [*start_of(family), *words(20, 1)]
        logits, expected = all_logits(driver, answer, encoder.of_text(text)), judged_logits(family, text, answer)
        if family == "marian":  # the padding token is never said
            assert logits[:, 1].max() == -torch.inf
            logits[:, 1] = expected[:, 1]
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    driver.worker.shutdown()


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 1, "max_num_seqs": 1}, {"num_blocks": 9}])
@pytest.mark.parametrize("family", ["mbart", "pegasus", "marian", "m2m100"])
def test_tokens_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    core = core_of(str(tiny_text_model(family)), **{"max_model_len": LENGTH, "max_num_seqs": 4, **options})
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    results = run(core, [EngineRequest(f"r{i}", text, params) for i, text in enumerate(TEXTS)])
    for index, text in enumerate(TEXTS):
        assert results.tokens[f"r{index}"] == judged_answer(family, text, TOKENS)
    assert_idle(core)
    core.shutdown()


def test_two_tables_of_tokens_are_refused() -> None:
    info = ModelInfo.from_directory(str(tiny_text_model("marian")))
    info.hf_config["share_encoder_decoder_embeddings"] = False
    with pytest.raises(UnsupportedError, match="share_encoder_decoder_embeddings=false"):
        causal_model(info)(None, info)  # type: ignore[arg-type]
    assert json.loads((tiny_text_model("marian") / "config.json").read_text())["model_type"] == "marian"
