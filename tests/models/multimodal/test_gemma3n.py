"""Gemma 3n's pictures, beside sounds and alone, in chunks and cached: logits and tokens are transformers'."""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.errors import CheckpointError
from app.kernels.attention import reference
from app.layers.context import BuildContext
from app.loading.loader import load_model
from app.loading.weight_update import GivenTensor, WeightUpdate
from app.models.multimodal.gemma3n import Gemma3nEyes, Gemma3nForConditionalGeneration
from app.models.multimodal.vision_config import Normalization
from app.records.media import MediaAsk, MediaItem
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import core_of, request
from tests.tiny_hearing import BEGIN, END, IMAGE, SOUND, hearing_model, judge_of, sound, told, words
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

CPU = torch.device("cpu")
NAME, TOKENS, SIDE, EACH = "gemma3n", 4, 64, 256
EYES = (302, 303)  # stand around a picture; their embeddings are those of the table of pictures
Part = list[int] | tuple[str, int]
PROMPTS: list[list[Part]] = [
    [words(4, 1), ("picture", 1), words(3, 2)],
    [words(4, 1), ("picture", 1), ("sound", 57), words(2, 3)],  # begins as the first one
    [("picture", 2), [330], words(2, 4), [304, 309]],  # marks alone, too
]


def picture(seed: int, offset: int) -> MediaItem:
    pixels = np.random.default_rng(seed).integers(0, 256, (1, 3, SIDE, SIDE), np.uint8).tobytes()
    digest = blake2b(pixels, digest_size=16).digest()
    return MediaItem("image", digest, offset, EACH, (1, 16, 16), (1, 3, SIDE, SIDE), pixels)


def prompt_of(parts: list[Part]) -> tuple[list[int], MediaAsk]:
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        kind, number = part
        begin, end = EYES if kind == "picture" else (BEGIN, END)
        tokens.append(begin)
        item = picture(number, len(tokens)) if kind == "picture" else sound(NAME, number, len(tokens), number)
        items.append(item)
        tokens += [IMAGE if kind == "picture" else SOUND] * item.length + [end]
    return tokens, MediaAsk(tuple(items))


@functools.cache
def judged(index: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits [T, V] of a prompt, and its greedy continuation."""
    tokens, ask = prompt_of(PROMPTS[index])
    seen = told(NAME, [item for item in ask.items if item.kind == "audio"])
    pictures = [
        torch.from_numpy(np.frombuffer(item.pixels, np.uint8).reshape(item.shape).copy())
        for item in ask.items
        if item.kind == "image"
    ]
    seen["pixel_values"] = torch.cat(pictures).float() / 127.5 - 1  # as the files of the tiny one say nothing
    answer: list[int] = []
    first: torch.Tensor | None = None
    for _ in range(TOKENS):
        ids = torch.tensor([tokens + answer])
        with torch.inference_mode():
            given = {"attention_mask": torch.ones_like(ids), "use_cache": False, **seen}
            logits = judge_of(NAME)(input_ids=ids, **given).logits[0]
        first = logits if first is None else first
        answer.append(int(logits[-1].argmax()))
    assert first is not None
    return first, answer


def test_logits_are_those_of_transformers() -> None:
    prompts = [prompt_of(parts) for parts in PROMPTS]
    for chunk in (2048, 100):
        driver = Driver(str(hearing_model(NAME)), max_model_len=512, num_blocks=96, chunk=chunk)
        for index, (tokens, ask) in enumerate(prompts):
            torch.testing.assert_close(all_logits(driver, tokens, ask), judged(index)[0], atol=1e-3, rtol=1e-3)
        runs = driver.run([Run(tokens, greedy(TOKENS), asks=(ask,)) for tokens, ask in prompts])
        assert [run.tokens for run in runs] == [judged(index)[1] for index in range(len(prompts))]
        driver.worker.shutdown()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"do_normalize": False, "image_mean": [0.5] * 3}, Normalization((0.0,) * 3, (1.0,) * 3)),  # as published
        ({"image_mean": [0.1, 0.2, 0.3]}, Normalization((0.1, 0.2, 0.3), (0.5,) * 3)),
    ],
)
def test_pixels_are_normed_as_the_files_say(own: dict[str, Any], expected: Normalization, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(hearing_model(NAME) / "config.json")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    info = ModelInfo.from_directory(str(tmp_path))
    ctx = BuildContext(torch.float32, torch.device("meta"), 256, reference.OPS, ParallelGroups())
    assert Gemma3nEyes(ctx, info).normalization == expected
    few = replace(info, hf_config={**info.hf_config, "vision_soft_tokens_per_image": 64})
    with pytest.raises(CheckpointError, match="vision_soft_tokens_per_image is 64, not 256"):
        Gemma3nEyes(ctx, few)


def test_new_weights_give_new_rows_of_marks() -> None:
    """Where they lay before; of a part of the weights, too."""
    info = ModelInfo.from_directory(str(hearing_model(NAME)))
    model = load_model(
        info, BuildContext(torch.float32, CPU, 256, reference.OPS, ParallelGroups()), "safetensors", 0
    )  # fmt: skip
    assert isinstance(model, Gemma3nForConditionalGeneration)
    assert isinstance(model.encoder, Gemma3nEyes)
    embedder, judge = model.encoder.embedder, copy.deepcopy(judge_of(NAME).model.embed_vision)
    ids, place = torch.arange(5) + 300, embedder.rows.data_ptr()
    name, changed = "embedding_projection.weight", judge.embedding_projection.weight.detach().flip(1)
    with torch.inference_mode():
        before = judge(input_ids=ids)
        torch.testing.assert_close(embedder.rows, before, atol=1e-5, rtol=1e-5)
        judge.embedding_projection.weight.copy_(changed)
        expected = judge(input_ids=ids)
        assert not torch.allclose(before, expected, atol=1e-2)
        update = WeightUpdate(model, CPU)
        update.load({f"model.embed_vision.{name}": GivenTensor.of(name, changed)})
        update.finish(whole=False)
        torch.testing.assert_close(embedder.rows, expected, atol=1e-5, rtol=1e-5)
    assert embedder.rows.data_ptr() == place


@pytest.mark.parametrize("blocks", [96, 32])
def test_a_whole_engine_says_the_same(blocks: int) -> None:
    """Steps of fewer tokens than a picture has; what came before is found again; 32 blocks hold one prompt."""
    options = {"block_size": 16, "num_blocks": blocks, "max_model_len": 512, "max_num_batched_tokens": 64}
    core = core_of(str(hearing_model(NAME)), max_num_seqs=4, **options)
    prompts = [prompt_of(parts) for parts in PROMPTS]
    for _ in range(2):
        results = run(core, [request(i, *prompt) for i, prompt in enumerate(prompts)])
        found = [results.tokens[f"r{i}"][:TOKENS] for i in range(len(prompts))]
        assert found == [judged(index)[1] for index in range(len(prompts))]
    assert_idle(core)
    core.shutdown()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chunk", [64, 512])
def test_a_gpu_says_the_same(chunk: int) -> None:
    """Its graphs, too."""
    options = {"block_size": 16, "num_blocks": 96, "max_model_len": 512, "max_num_batched_tokens": chunk}
    core = core_of(str(hearing_model(NAME)), max_num_seqs=4, device="cuda", dtype="float32", **options)
    results = run(core, [request(i, *prompt_of(parts)) for i, parts in enumerate(PROMPTS)])
    found = [results.tokens[f"r{i}"][:TOKENS] for i in range(len(PROMPTS))]
    core.shutdown()
    assert found == [judged(index)[1] for index in range(len(PROMPTS))]
