"""Logits and greedy tokens of decoders that listen equal transformers', on tiny random checkpoints: sounds of several
lengths, in chunks and batches, with text and pictures around them and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.models.multimodal import (
    audio_flamingo,
    gemma3n,
    gemma4,
    phi4_multimodal,
    qwen2_audio,
    qwen3_asr,
    qwen_omni,
    voxtral,
)
from app.models.multimodal.base import MediaModel
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import core_of, request
from tests.tiny_hearing import HEARING, TOKENS, hearing_model, judged, prompt_of, prompts_of
from tests.worker.worker_driver import Driver, Run, all_logits, decode_statically, greedy

CLASSES: dict[str, type[MediaModel]] = {
    "phi4": phi4_multimodal.Phi4MultimodalForCausalLM,
    "gemma3n": gemma3n.Gemma3nForConditionalGeneration,
    **dict.fromkeys(("gemma4", "gemma4-whole"), gemma4.Gemma4ForConditionalGeneration),
    "audio_flamingo": audio_flamingo.AudioFlamingo3ForConditionalGeneration,
    "qwen2_audio": qwen2_audio.Qwen2AudioForConditionalGeneration,
    "voxtral": voxtral.VoxtralForConditionalGeneration,
    "qwen3_asr": qwen3_asr.Qwen3ASRForConditionalGeneration,
    "qwen2_5_omni": qwen_omni.Qwen2_5OmniForConditionalGeneration,
    "qwen3_omni": qwen_omni.Qwen3OmniForConditionalGeneration,
}
# Pictures whose tokens see each other are not cut, which the trivial scheduler of these tests knows nothing of.
CHUNKS = {"gemma4-whole": 256}
# So few that requests are preempted.
FEW_BLOCKS = {
    **{"qwen2_audio": 16, "voxtral": 13, "qwen3_asr": 23, "qwen2_5_omni": 12, "qwen3_omni": 18, "gemma4": 12},
    **{"gemma4-whole": 12, "phi4": 12, "gemma3n": 20, "audio_flamingo": 16},
}


@pytest.mark.parametrize("name", HEARING)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    prompts = [prompt_of(name, parts) for parts in prompts_of(name)]
    expected = [judged(name, index) for index in range(len(prompts))]
    assert len({tuple(tokens) for _, tokens in expected}) == len(prompts)
    whole = Driver(str(hearing_model(name)), max_model_len=256, num_blocks=96)
    assert whole.worker._parts is not None
    assert isinstance(whole.worker._parts.model, CLASSES[name])
    for (tokens, ask), (logits, _) in zip(prompts, expected, strict=True):
        torch.testing.assert_close(all_logits(whole, tokens, ask), logits, atol=1e-3, rtol=1e-3)
    chunked = Driver(str(hearing_model(name)), max_model_len=256, num_blocks=96, chunk=CHUNKS.get(name, 7))
    decode_statically(chunked.worker, [1, 2, 4])
    for driver in (whole, chunked):
        runs = driver.run([Run(tokens, greedy(TOKENS), asks=(ask,)) for tokens, ask in prompts])
        assert [run.tokens for run in runs] == [tokens for _, tokens in expected]
        driver.worker.shutdown()


@pytest.mark.parametrize("name", HEARING)
@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"num_blocks": 0, "max_num_batched_tokens": 24}])
def test_a_whole_engine_says_the_same(name: str, options: dict[str, Any]) -> None:
    prompts = prompts_of(name)
    if name in CHUNKS:
        options = {**options, "max_num_batched_tokens": 24}
    few = {"num_blocks": FEW_BLOCKS[name]} if "num_blocks" in options else {}
    core, num_preemptions = core_of(str(hearing_model(name)), max_num_seqs=4, **{**options, **few}), 0
    for _ in range(2):
        asked = [request(i, *prompt_of(name, parts)) for i, parts in enumerate(prompts)]
        results = run(core, asked)
        assert [results.tokens[f"r{i}"] for i in range(len(asked))] == [
            judged(name, index)[1] for index in range(len(asked))
        ]
        num_preemptions += sum(final.num_preemptions for final in results.final.values())
    assert num_preemptions or "num_blocks" not in options
    assert_idle(core)
    core.shutdown()
