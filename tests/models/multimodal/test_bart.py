"""BART's greedy tokens equal transformers', on a tiny random checkpoint: texts of mixed lengths, chunked, preempted."""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, PreTrainedModel
from transformers import BartForConditionalGeneration as HFBart

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, PromptTooLongError
from app.models.multimodal.bart import BartForConditionalGeneration
from app.records.encoder_info import EncoderInfo
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import core_of
from tests.tiny_models import _root
from tests.worker.worker_driver import Driver, all_logits

CONFIG: dict[str, Any] = {
    **{"vocab_size": 331, "d_model": 64, "max_position_embeddings": 48, "init_std": 0.2, "scale_embedding": True},
    **{"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 96},
    **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 112},
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
}
TOKENS = 7


@functools.cache
def tiny_bart() -> Path:
    torch.manual_seed(0)
    model = HFBart(BartConfig(**CONFIG))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    directory = Path(tempfile.mkdtemp(prefix="bart-", dir=_root()))
    model.generation_config.forced_bos_token_id = 0
    model.save_pretrained(directory)
    return directory


@functools.cache
def judge() -> PreTrainedModel:
    model: PreTrainedModel = HFBart.from_pretrained(tiny_bart(), dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def judged(text: list[int]) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits [T, V] of the decoder's prompt, and its greedy continuation."""
    answer = [2, 0]
    first: torch.Tensor | None = None
    for _ in range(TOKENS):
        with torch.inference_mode():
            logits = judge()(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([answer])).logits[0]
        first = logits if first is None else first
        answer.append(int(logits[-1].argmax()))
    assert first is not None
    return first, answer[2:]


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 330) for _ in range(count)]


TEXTS = [words(count, count) for count in (1, 5, 17, 48, 5)]


def test_logits_are_those_of_transformers() -> None:
    driver = Driver(str(tiny_bart()), num_blocks=64, max_num_seqs=8)
    assert driver.worker._parts is not None
    assert isinstance(driver.worker._parts.model, BartForConditionalGeneration)
    encoder = EncoderInfo.of(ModelInfo.from_directory(str(tiny_bart())))
    assert encoder is not None
    assert encoder.start == (2, 0)
    for text in TEXTS:
        logits = all_logits(driver, [2, 0], encoder.of_text(text))
        torch.testing.assert_close(logits, judged(text)[0], atol=1e-3, rtol=1e-3)
    driver.worker.shutdown()


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 1, "max_num_seqs": 1}, {"num_blocks": 9}])
def test_a_prompt_is_what_the_encoder_reads(options: dict[str, Any]) -> None:
    core = core_of(str(tiny_bart()), **{"max_model_len": 48, "max_num_seqs": 4, **options})
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    for _ in range(2):
        results = run(core, [EngineRequest(f"r{i}", text, params) for i, text in enumerate(TEXTS)])
        assert [results.tokens[f"r{i}"] for i in range(len(TEXTS))] == [judged(text)[1] for text in TEXTS]
    assert_idle(core)
    with pytest.raises(PromptTooLongError, match="reads 48 tokens, but the prompt has 49"):
        core.add_request(EngineRequest("long", words(49, 1), params))
    core.shutdown()


def test_a_decoder_begins_somewhere() -> None:
    hf = {"model_type": "bart", "max_position_embeddings": 8}
    with pytest.raises(CheckpointError, match="lacks decoder_start_token_id"):
        EncoderInfo.of(ModelInfo(Path("x"), hf, {}))
