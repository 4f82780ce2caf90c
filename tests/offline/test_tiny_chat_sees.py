"""The built-in model that sees: transformers' tokens from the same checkpoint, tiny-chat's where there is no picture,
and right answers about pictures that training never drew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from app import LLM, SamplingParams
from app.checkpoints.built_in import built_in_directory
from tools.tiny_chat.sees import drawing, evaluate, scenes

OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 512, "num_blocks": 128}
PER_FAMILY, LEAST = 2, 0.85
IMAGE = 190


@pytest.fixture(scope="module")
def sees() -> Iterator[LLM]:
    with LLM("tiny-chat-sees", **OPTIONS) as llm:
        yield llm


def test_answers_are_transformers_own(sees: LLM) -> None:
    path = built_in_directory("tiny-chat-sees")
    judge, told = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    processor = CLIPImageProcessorPil.from_pretrained(path)
    rng = random.Random(3)
    for kind in ("shapes", "number", "chart"):
        picture = drawing.draw(rng, scenes.scene(rng, True, kind), (150, 120))
        chat = evaluate.said(picture, "Describe the picture.")
        (output,) = sees.chat(chat, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        pixels = processor(picture, return_tensors="pt")["pixel_values"]
        one = [{"role": "user", "content": [{"type": "text", "text": "Describe the picture."}, {"type": "image"}]}]
        written = tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(written.replace("<image>", "<image>" * 64), return_tensors="pt")["input_ids"]
        assert output.prompt_token_ids == ids[0].tolist()
        found = judge.generate(
            input_ids=ids, pixel_values=pixels, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24
        )[0, ids.shape[1] :].tolist()
        assert output.outputs[0].token_ids == found
        assert len(found) > 4


def test_without_a_picture_all_is_as_tiny_chat_has_it(sees: LLM) -> None:
    asked = ["What is 17 + 25?", "Reverse the word 'lantern'.", "Grüße ÿ <image> 東京", "Tell me a story."]
    chats = [[{"role": "user", "content": one}] for one in asked]
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=40, logprobs=5)
    with LLM("tiny-chat", **OPTIONS) as llm:
        plain = llm.chat(chats, params, use_tqdm=False)
    for one, other in zip(plain, sees.chat(chats, params, use_tqdm=False), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_pictures_that_training_never_drew_are_answered_right(sees: LLM) -> None:
    right = {family: evaluate.right_of(sees, family, PER_FAMILY, "test") for family in scenes.FAMILIES}
    assert sum(right.values()) >= LEAST * PER_FAMILY * len(right), right


def test_a_second_question_reads_the_picture_from_the_cache(sees: LLM) -> None:
    picture = drawing.draw(random.Random(5), scenes.Scene("number", number="58"), (224, 224))
    chat = evaluate.said(picture, "What number is this?")
    (first,) = sees.chat(chat, evaluate.GREEDY, use_tqdm=False)
    chat += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "Is it a number?"}]
    (second,) = sees.chat(chat, evaluate.GREEDY, use_tqdm=False)
    assert second.num_cached_tokens >= 64
