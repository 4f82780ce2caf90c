"""Logits and greedy tokens behind videos equal transformers', on tiny random checkpoints: positions by time, texts
between frames, pictures beside them, chunks."""

from __future__ import annotations

import math
from hashlib import blake2b

import numpy as np
import pytest
import torch

from app.media.processors.llava_onevision import of_video
from app.records.media import MediaAsk, MediaItem
from tests.models.multimodal.test_families_that_see import words
from tests.tiny_media import IMAGE, media_judge, normalized, picture, tiny_media_model
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

VIDEO = 301
NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "glm4v_moe")


def piece(name: str) -> int:
    """The token that stands for a piece of a video."""
    return IMAGE if name.startswith("glm") else VIDEO


def video(name: str, grid: tuple[int, int, int], offset: int, seed: int) -> tuple[MediaItem, list[int]]:
    """A random video of two frames to a patch, a second and more apart, and its tokens."""
    shape = (math.prod(grid), 3, 2, 4, 4)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8).tobytes()
    each = [piece(name)] * (grid[1] * grid[2] // 4)
    tokens: list[int] = []
    for i in range(grid[0]):  # the newer ones say before each frame when it was
        tokens += each if name.startswith("qwen2") else [*words(3, seed + i), 302, *each, 303]
    digest = blake2b(pixels, digest_size=16).digest()
    return MediaItem("video", digest, offset, len(tokens), grid, shape, pixels, 1.6 * seed), tokens


def prompt(name: str) -> tuple[list[int], MediaAsk]:
    """A video of three pairs of frames, a picture, a video of one pair at the end. transformers takes no picture beside
    a video where the same token stands for pieces of both."""
    tokens = words(5, 1)
    items = []
    for kind, grid, seed in (("video", (3, 4, 6), 1), ("image", (1, 4, 4), 2), ("video", (1, 6, 2), 3)):
        if piece(name) == IMAGE and kind == "image":
            continue
        if kind == "video":
            item, own = video(name, grid, len(tokens), seed)
        else:
            item, own = picture(name, *grid[1:], len(tokens), seed)
        items.append(item)
        tokens = [*tokens, *own, *words(2, seed)]
    return tokens, MediaAsk(tuple(items))


def judged(name: str, tokens: list[int], ask: MediaAsk, max_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits of the prompt, and its greedy continuation."""
    model, answer, first = media_judge(tiny_media_model(name)), list[int](), None
    videos = [item for item in ask.items if item.kind == "video"]
    pictures = [item for item in ask.items if item.kind == "image"]
    seen = {
        "pixel_values_videos": torch.cat([normalized(item).flatten(1) for item in videos]),
        "video_grid_thw": torch.tensor([item.grid for item in videos]),
    }
    if pictures:
        rows = [normalized(item).unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1) for item in pictures]
        seen |= {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor([item.grid for item in pictures])}
    if name == "qwen2_5_vl":
        seen["second_per_grid_ts"] = torch.tensor([item.seconds_per_frame for item in videos])
    for _ in range(max_tokens):
        ids = torch.tensor([tokens + answer])
        types = (ids == IMAGE).long()
        types[ids == piece(name)] = 2
        with torch.inference_mode():
            logits = model(input_ids=ids, **seen, mm_token_type_ids=types, use_cache=False).logits[0]
        first = logits if first is None else first
        answer.append(int(logits[-1].argmax()))
        assert answer[-1] not in (IMAGE, VIDEO), "another seed, please"
    assert first is not None
    return first, answer


@pytest.mark.parametrize("frames", [3, 9])
def test_frames_of_one_vision_are_those_of_transformers(frames: int) -> None:
    """More of them than the largest picture has tiles, too, which are encoded in parts."""
    directory = tiny_media_model("llava_onevision")
    tokens, shape = words(5, 1), (frames, 3, 16, 16)
    pixels = np.random.default_rng(frames).integers(0, 256, shape, np.uint8).tobytes()
    grid, count = of_video(frames, 2)
    item = MediaItem("video", blake2b(pixels, digest_size=16).digest(), len(tokens), count, grid, shape, pixels)
    tokens = [*tokens, *[VIDEO] * count, *words(4, 2)]
    with torch.inference_mode():
        own = {"pixel_values_videos": normalized(item)[None]}
        expected = media_judge(directory)(input_ids=torch.tensor([tokens]), **own, use_cache=False).logits[0]
    for chunk in (256, 4):
        driver = Driver(str(directory), max_model_len=256, num_blocks=64, chunk=chunk)
        found = driver.run([Run(tokens, greedy(1), asks=(MediaAsk((item,)),))])[0].tokens
        assert found == [int(expected[-1].argmax())]
    torch.testing.assert_close(all_logits(driver, tokens, MediaAsk((item,))), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    directory = str(tiny_media_model(name))
    tokens, ask = prompt(name)
    logits, answer = judged(name, tokens, ask, 5)
    whole = Driver(directory, max_model_len=256, num_blocks=64)
    torch.testing.assert_close(all_logits(whole, tokens, ask), logits, atol=1e-3, rtol=1e-3)
    chunked = Driver(directory, max_model_len=256, num_blocks=64, chunk=7)
    for driver in (whole, chunked):
        assert driver.run([Run(tokens, greedy(5), asks=(ask,))])[0].tokens == answer
