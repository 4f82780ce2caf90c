"""T5's logits and greedy tokens equal transformers', on tiny random checkpoints of all three kinds, through all of the
engine's ways: chunks, preemption, static steps, drafts, host tier, a cache of 8 bits, ranks, continuation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.errors import CheckpointError, PromptTooLongError
from app.models.multimodal.t5 import T5ForConditionalGeneration
from app.models.multimodal.text_encoder import TextEncoder
from app.records.encoder_info import EncoderInfo
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests import limits
from tests.engine.core_driver import assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.engine.test_pictures import core_of
from tests.engine.test_sounds import MODES
from tests.models.families.test_families_in_parallel import LAYOUTS
from tests.models.multimodal.text_models import LENGTH, judged_answer, judged_logits, tiny_text_model, words
from tests.worker.worker_driver import Driver, all_logits

TOKENS = 24  # more than the distances that have a range of their own
TEXTS = [words(count, count) for count in (1, 5, 17, LENGTH, 5)]
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)


@functools.cache
def answers(family: str) -> list[list[int]]:
    return [judged_answer(family, text, TOKENS) for text in TEXTS]


def requests() -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", text, PARAMS) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("family", ["t5", "t5-gated", "mt5"])
def test_logits_are_those_of_transformers(family: str) -> None:
    directory = str(tiny_text_model(family))
    driver = Driver(directory, num_blocks=64, max_num_seqs=8)
    assert driver.worker._parts is not None
    assert isinstance(driver.worker._parts.model, T5ForConditionalGeneration)
    encoder = EncoderInfo.of(ModelInfo.from_directory(directory))
    assert encoder is not None
    assert encoder.start == (0,)
    for text in TEXTS:
        answer = [0, *words(40, 1)]
        logits = all_logits(driver, answer, encoder.of_text(text))
        torch.testing.assert_close(logits, judged_logits(family, text, answer), atol=1e-3, rtol=1e-3)
    driver.worker.shutdown()


@pytest.mark.parametrize("mode", [name for name in MODES if name != "all at once"])
def test_tokens_are_those_of_transformers(mode: str) -> None:
    core, num_preemptions = core_of(str(tiny_text_model("t5-gated")), **{"max_model_len": LENGTH, **MODES[mode]}), 0
    for _ in range(2):  # the second finds what the first left
        results = run(core, requests())
        same = [results.tokens[f"r{i}"] == expected for i, expected in enumerate(answers("t5-gated"))]
        assert all(same) or mode == "int8", same
        num_preemptions += sum(final.num_preemptions for final in results.final.values())
    assert num_preemptions or mode != "few blocks"
    assert_idle(core)
    core.shutdown()


def test_answers_go_on_behind_their_own_text() -> None:
    core = core_of(str(tiny_text_model("t5-gated")), max_model_len=LENGTH)
    for index, which in enumerate((3, 2, 3)):
        known = answers("t5-gated")[which][:20]
        asked = EngineRequest(f"r{index}", TEXTS[which], PARAMS, output_token_ids=known)
        results = run(core, [asked])
        assert results.tokens[f"r{index}"] == answers("t5-gated")[which][20:]
    with pytest.raises(PromptTooLongError, match=f"reads {LENGTH} tokens, but the prompt has {LENGTH + 1}"):
        core.add_request(EngineRequest("long", words(LENGTH + 1, 1), PARAMS))
    core.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(layout: str) -> None:
    config = EngineConfig(
        model=str(tiny_text_model("t5-gated")), device="cpu", executor="local_processes", max_model_len=LENGTH,
        num_threads=1, step_timeout_s=limits.patience_s(), block_size=8, num_blocks=20, max_num_seqs=4,
        max_num_batched_tokens=24, **LAYOUTS[layout],
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), ForkedExecutor(config), b"a secret for tests")
    try:
        core.start()
        results = run(core, requests())
        assert [results.tokens[f"r{i}"] for i in range(len(TEXTS))] == answers("t5-gated")
        assert_idle(core)
    finally:
        core.shutdown()


@pytest.mark.parametrize("family", ["bart", "marian", "t5"])
def test_texts_are_read_side_by_side(family: str) -> None:
    driver = Driver(str(tiny_text_model(family)), num_blocks=64, max_num_seqs=8)
    assert driver.worker._parts is not None
    encoder: Any = driver.worker._parts.model.encoder  # type: ignore[union-attr]
    assert isinstance(encoder, TextEncoder)
    texts = [torch.tensor(text, dtype=torch.int32) for text in TEXTS]
    with torch.inference_mode():
        together, apart = encoder(texts), torch.cat([encoder([text]) for text in texts])
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)
    assert len(encoder.largest()) == LENGTH
    driver.worker.shutdown()


def test_what_a_directory_is_for() -> None:
    """An answer, unless the encoder alone is asked for; whether the head is a table of its own, the weights say."""
    directory = str(tiny_text_model("t5"))
    for runner, name, layers in (("auto", "T5ForConditionalGeneration", 2), ("pooling", "T5EncoderModel", 3)):
        info = ModelInfo.of(EngineConfig(model=directory, runner=runner))
        assert (info.architecture, info.num_layers, info.head_dim) == (name, layers, 16)
        assert info.runner(runner) == ("generate" if runner == "auto" else "pooling")  # type: ignore[arg-type]
        assert (EncoderInfo.of(info) is None) == (runner == "pooling")
    tied = [T5ForConditionalGeneration.settings(_info(family)).tie_word_embeddings for family in ("t5", "mt5")]
    assert tied == [True, False]
    hf = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    with pytest.raises(CheckpointError, match="lacks decoder_start_token_id"):
        EncoderInfo.of(ModelInfo(Path("x"), hf, {}))


def _info(family: str) -> ModelInfo:
    return ModelInfo.from_directory(str(tiny_text_model(family)))
