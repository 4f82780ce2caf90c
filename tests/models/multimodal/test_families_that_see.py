"""Logits and greedy tokens of every family that sees equal transformers', on tiny random checkpoints."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from app.models.multimodal import (
    aya_vision,
    cohere2_vision,
    gemma3,
    gemma4,
    glm4v,
    glm_ocr,
    idefics3,
    internvl,
    internvl_chat,
    kimi,
    lfm2_vl,
    lighton_ocr,
    llama4,
    llava,
    llava_onevision,
    paddleocr_vl,
    phi4_multimodal,
    pixtral,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
)
from app.models.multimodal.base import MediaModel
from tests.tiny_media import MODELS, judged, prompt_of, tiny_media_model
from tests.worker.worker_driver import Driver, Run, all_logits, decode_statically, greedy

CLASSES: dict[str, type[MediaModel]] = {
    "qwen2_vl": qwen2_vl.Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": qwen2_vl.Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": qwen3_vl.Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": qwen3_vl.Qwen3VLMoeForConditionalGeneration,
    "qwen3_5": qwen3_5.Qwen3_5ForConditionalGeneration,
    **dict.fromkeys(("llava", "llava-siglip", "pixtral"), llava.LlavaForConditionalGeneration),
    "llava_onevision": llava_onevision.LlavaOnevisionForConditionalGeneration,
    **dict.fromkeys(("llava_next", "granite_vision"), llava_onevision.LlavaNextForConditionalGeneration),
    "phi4_multimodal": phi4_multimodal.Phi4MultimodalForCausalLM,
    "aya_vision": aya_vision.AyaVisionForConditionalGeneration,
    "cohere2_vision": cohere2_vision.Cohere2VisionForConditionalGeneration,
    "lfm2_vl": lfm2_vl.Lfm2VlForConditionalGeneration,
    "lighton_ocr": lighton_ocr.LightOnOcrForConditionalGeneration,
    "glm_ocr": glm_ocr.GlmOcrForConditionalGeneration,
    "paddleocr_vl": paddleocr_vl.PaddleOCRVLForConditionalGeneration,
    "glm4v": glm4v.Glm4vForConditionalGeneration,
    "glm4v_moe": glm4v.Glm4vMoeForConditionalGeneration,
    "kimi_k25": kimi.KimiForConditionalGeneration,
    "llama4": llama4.Llama4ForConditionalGeneration,
    **dict.fromkeys(("gemma4", "gemma4-whole"), gemma4.Gemma4ForConditionalGeneration),
    "gemma3": gemma3.Gemma3ForConditionalGeneration,
    "mistral3": pixtral.Mistral3ForConditionalGeneration,
    **dict.fromkeys(("internvl", "internvl-6b"), internvl.InternVLForConditionalGeneration),
    **dict.fromkeys(("internvl_chat", "internvl_chat-6b"), internvl_chat.InternVLChatModel),
    **dict.fromkeys(("smolvlm", "idefics3"), idefics3.Idefics3ForConditionalGeneration),
}


# Pictures whose tokens see each other are not cut, which the trivial scheduler of these tests knows nothing of.
CHUNKS = {"gemma3": 256, "gemma4-whole": 256}


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 299) for _ in range(count)]


# One picture in the midst, several of odd and even sizes, first and last, none at all.
PROMPTS: list[list[Any]] = [
    [words(5, 1), (6, 8, 1), words(7, 2)],
    [(4, 4, 2), words(3, 3), (10, 6, 3), [302], (2, 2, 4), words(9, 4), (8, 6, 5)],
    [words(11, 5)],
]


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    directory = str(tiny_media_model(name))
    prompts = [prompt_of(name, parts) for parts in PROMPTS]
    expected = [judged(name, tokens, ask, 6) for tokens, ask in prompts]
    whole = Driver(directory, max_model_len=256, num_blocks=64)
    assert whole.worker._parts is not None
    assert isinstance(whole.worker._parts.model, CLASSES[name])
    for (tokens, ask), (logits, _) in zip(prompts, expected, strict=True):
        torch.testing.assert_close(all_logits(whole, tokens, ask), logits, atol=1e-3, rtol=1e-3)
    chunked = Driver(directory, max_model_len=256, num_blocks=64, chunk=CHUNKS.get(name, 7))
    decode_statically(chunked.worker, [1, 2, 4])
    for driver in (whole, chunked):
        runs = driver.run([Run(tokens, greedy(6), asks=(ask,)) for tokens, ask in prompts])
        assert [run.tokens for run in runs] == [tokens for _, tokens in expected]


# Those that transformers is told the places of by their tokens alone; chat templates of the others write text between.
@pytest.mark.parametrize("name", [name for name in MODELS if not MODELS[name].types])
def test_pictures_without_a_word_between(name: str) -> None:
    """Two that are alike, too: they are encoded once and stand in both places."""
    tokens, ask = prompt_of(name, [(4, 4, 1), (6, 8, 2), (4, 4, 1), words(3, 6)])
    driver = Driver(str(tiny_media_model(name)), max_model_len=256, num_blocks=64)
    expected, _ = judged(name, tokens, ask, 1)
    torch.testing.assert_close(all_logits(driver, tokens, ask), expected, atol=1e-3, rtol=1e-3)
