"""Processors of the families other than Qwen's, judged by transformers': pixels after its rescaling and normalising,
tokens by its processors' rules."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.errors import CheckpointError, InvalidRequestError, UnsupportedError
from app.media.processors import PROCESSORS
from app.media.processors.base import Layout, Processor
from tests.media.pictures import picture

CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
CLIP_EYES = {"vision_config": {"image_size": 56, "patch_size": 14}}
SQUARE = {"size": {"height": 48, "width": 48}}
PARTS = {
    **{**SQUARE, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20, "pan_and_scan_max_num_crops": 3},
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
TILES = {"size": {"height": 32, "width": 32}, "max_patches": 6}
EYES = {"vision_config": {"image_size": 32, "patch_size": 16}}
CHAT = {**EYES, "max_dynamic_patch": 6, "dynamic_image_size": True, "use_thumbnail": True}
SMOL = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
ONE_VISION = {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 32], [32, 64], [64, 64], [96, 32]]}
NEXT = {
    **{"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32]],
}
# Family, transformers' module and class, the processor's own settings, config.json, options of the judge's call.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "aya_vision": ("got_ocr2", "GotOcr2ImageProcessorPil", TILES, {}, {"crop_to_patches": True}),
    "clip": ("clip", "CLIPImageProcessorPil", CLIP, {}, {}),
    "clip padded": ("llava", "LlavaImageProcessorPil", {**CLIP, "do_pad": True}, {}, {}),
    "siglip": ("siglip", "SiglipImageProcessorPil", {**SQUARE, "do_center_crop": False, "resample": 3}, {}, {}),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil", SQUARE, {"mm_tokens_per_image": 4}, {}),
    "gemma3 parts": ("gemma3", "Gemma3ImageProcessorPil", PARTS, {"mm_tokens_per_image": 4}, {}),
    "gemma3n": ("siglip", "SiglipImageProcessorPil", {**SQUARE, "resample": 2}, {}, {}),
    "pixtral": ("pixtral", "PixtralImageProcessorPil", {"size": {"longest_edge": 96}}, {}, {"patch_size": 16}),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil", TILES, {}, {"crop_to_patches": True}),
    "internvl_chat": ("got_ocr2", "GotOcr2ImageProcessorPil", TILES, CHAT, {"crop_to_patches": True}),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil", SMOL, {}, {}),
    "llava_next": ("llava_next", "LlavaNextImageProcessorPil", NEXT, {"vision_config": {"image_size": 32}}, {}),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionImageProcessorPil", ONE_VISION, {}, {}),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil", SMOL, {}, {}),
}
OURS = {"clip padded": "clip", "gemma3 parts": "gemma3", "siglip": "clip", "smolvlm": "idefics3"}
SIZES = [(48, 48), (97, 31), (20, 75), (3, 200), (300, 170)]


def made(name: str, own: Mapping[str, Any], hf: Mapping[str, Any]) -> Processor:
    family = PROCESSORS.load(OURS.get(name, name))
    texts = {token: f"<{token}>" for token in family.tokens}
    return family({**family.settings_of(own, hf), **texts, "placeholder": "<image>"})


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_are_transformers(name: str) -> None:
    module, kind, own, hf, call = FAMILIES[name]
    judge = getattr(importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), kind)(**own)
    processor = made(name, own, hf)
    mean, std = (np.asarray(one, np.float64).reshape(3, 1, 1) for one in (judge.image_mean, judge.image_std))
    for i, size in enumerate(SIZES):
        image = picture(*size, seed=i)
        expected = np.asarray(judge(image, return_tensors="np", **call)["pixel_values"])
        layout = processor.layout(size)
        found = processor.pixels(np.asarray(image), layout)
        expected = expected.reshape(-1, *expected.shape[-3:])
        assert found.shape == expected.shape, (name, size)
        np.testing.assert_allclose((found / 255 - mean) / std, expected, atol=1e-5, err_msg=f"{name} {size}")


def written(layout: Layout) -> str:
    return "".join(text * count for text, count in layout.runs)


def test_tokens_are_those_of_transformers_rules() -> None:
    one = "<image>"
    assert written(made("clip", CLIP, CLIP_EYES).layout((9, 9))) == one * 16
    full = made("clip", CLIP, {**CLIP_EYES, "vision_feature_select_strategy": "full"})
    assert written(full.layout((9, 9))) == one * 17
    gemma = made("gemma3", SQUARE, {"mm_tokens_per_image": 4})
    begin, end = gemma.around
    assert begin + written(gemma.layout((9, 9))) + end == f"\n\n<begin>{one * 4}<end>\n\n"
    judge = importlib.import_module("transformers.models.gemma3.processing_gemma3").Gemma3Processor
    parts = made("gemma3", PARTS, {"mm_tokens_per_image": 4})
    shown = SimpleNamespace(full_image_sequence=begin + one * 4 + end)
    for size in SIZES:
        layout = parts.layout(size)
        expected = judge.replace_image_token(shown, {"num_crops": [layout.grid[0] - 1]}, 0)
        assert layout.before + begin + written(layout) + end == expected
    assert [parts.layout(size).grid[0] for size in SIZES] == [1, 4, 4, 1, 3]
    pixtral = made("pixtral", {"size": {"longest_edge": 96}}, {"spatial_merge_size": 2})
    assert written(pixtral.layout((70, 40))) == f"{one * 3}[IMG_BREAK]{one * 3}[IMG_END]"
    assert pixtral.layout((70, 40)).grid == (1, 4, 6)
    tiled = made("internvl", {**TILES, "image_seq_length": 2}, {}).layout((64, 32))
    assert written(tiled) == f"<img>{one * 6}</img>"
    assert tiled.grid[0] == 3
    aya = made("aya_vision", {**TILES, "patch_size": 8, "img_size": 32}, TILE_EYES)
    judge = importlib.import_module("transformers.models.aya_vision.processing_aya_vision").AyaVisionProcessor
    names = SimpleNamespace(
        **{"img_size": 32, "patch_size": 8, "tile_token": "TILE", "tile_global_token": "TILE_GLOBAL"},
        **{"img_patch_token": one, "start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>"},
    )
    for size in SIZES:
        layout = aya.layout(size)
        assert written(layout) == judge.replace_image_token(names, {"num_patches": [layout.grid[0]]}, 0)
    assert aya.written == "<image>"
    plain = made("internvl_chat", {}, {**CHAT, "use_thumbnail": False})
    assert written(plain.layout((64, 32))) == f"<img>{one * 2}</img>"
    assert (plain.written, plain.layout((64, 32)).grid[0]) == ("<image>", 2)
    assert made("internvl_chat", {}, {**CHAT, "dynamic_image_size": False}).layout((64, 32)).grid[0] == 1
    assert made("internvl_chat", {}, EYES).layout((64, 32)).grid[0] == 1
    usual = made("internvl_chat", {}, {**EYES, "dynamic_image_size": True, "max_dynamic_patch": None})
    assert usual.layout((32 * 12, 32)).grid[0] == 6
    smol = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    own = made("smolvlm", {**SMOL, "image_seq_len": 2}, {})
    names = ("<fake_token_around_image>", one, "<global-img>")
    for size, rows, columns in (((300, 170), 3, 4), ((1000, 30), 1, 4)):
        assert written(own.layout(size)) == smol.get_image_prompt_string(rows, columns, 2, *names)
    low = type(own)(own.low()).layout((300, 170))
    assert written(low) == smol.get_image_prompt_string(0, 0, 2, *names)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="200 times the other"):
        made("clip", CLIP, {}).layout((1, 201))
    with pytest.raises(CheckpointError, match="crop_size 99 is more than size 56"):
        made("clip", {**CLIP, "crop_size": 99}, {})
    with pytest.raises(CheckpointError, match="hold 72 tiles of 32; at most 64"):
        made("llava_onevision", {**ONE_VISION, "image_grid_pinpoints": [[288, 256]]}, {})
    for family in ("llava_next", "llava_onevision"):
        with pytest.raises(CheckpointError, match="image_grid_pinpoints is no list"):
            made(family, {**NEXT, "image_grid_pinpoints": []}, {"vision_config": {"image_size": 32}})
    with pytest.raises(CheckpointError, match="image_grid_pinpoints is"):
        made("llava_onevision", {**ONE_VISION, "image_grid_pinpoints": [[31, 32]]}, {})
    with pytest.raises(UnsupportedError, match="pad2square"):
        made("internvl_chat", {}, {**CHAT, "pad2square": True})
    with pytest.raises(CheckpointError, match="max_dynamic_patch"):
        made("internvl_chat", {}, {**CHAT, "max_dynamic_patch": 0})
    with pytest.raises(UnsupportedError, match="anyres_max_N is supported"):
        made("llava_onevision", {**ONE_VISION, "vision_aspect_ratio": "pad"}, {})


TILE_EYES = {"vision_config": {"image_size": 32, "patch_size": 4}}
CONTRADICTIONS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("clip", {**CLIP, "num_additional_image_tokens": 0}, CLIP_EYES, "num_additional_image_tokens is 0"),
    ("clip", CLIP, {"vision_config": {"image_size": 336}}, "the side of pictures is 56, .*image_size, 336"),
    ("clip", CLIP, {"vision_config": {"patch_size": 14}}, "image_size, 224"),
    (
        "clip",
        {**CLIP, "vision_feature_select_strategy": "full"},
        {"vision_feature_select_strategy": "default"},
        "vision_feature_select_strategy is full",
    ),
    ("gemma3", SQUARE, {"vision_config": {"image_size": 32}}, r"the size of pictures is \[48, 48\]"),
    ("gemma3", {**SQUARE, "image_seq_length": 9}, {"mm_tokens_per_image": 4}, "image_seq_length is 9"),
    ("gemma3n", {"image_seq_length": 9}, {"vision_soft_tokens_per_image": 256}, "image_seq_length is 9"),
    ("internvl", {**TILES, "image_seq_length": 9}, TILE_EYES, "image_seq_length is 9, .* 16"),
    ("internvl", {"size": 16}, TILE_EYES, "the side of tiles is 16"),
    ("llava_next", {**NEXT, "crop_size": 16}, {"vision_config": {"image_size": 32}}, "crop_size is 16"),
    ("llava_next", NEXT, {"vision_config": {"image_size": 64}}, "the side of tiles is 32"),
    ("internvl_chat", {"size": 16}, CHAT, "the side of tiles is 16"),
    ("idefics3", {**SMOL, "image_seq_len": 9}, TILE_EYES, "image_seq_len is 9, .* 16"),
    ("idefics3", {"max_image_size": {"longest_edge": 64}}, TILE_EYES, "the side of tiles is 64"),
]


@pytest.mark.parametrize(("name", "own", "hf", "says"), CONTRADICTIONS)
def test_files_that_contradict_the_encoder_are_refused(
    name: str, own: dict[str, Any], hf: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        made(name, own, hf)
