"""Random tiny models that see, in Hugging Face layout, pictures for them, and transformers' answers."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from app.media.processors.llava_next import LlavaNextProcessor
from app.media.processors.llava_onevision import LlavaOnevisionProcessor
from app.media.processors.phi4 import Phi4Processor
from app.records.media import MediaAsk, MediaItem
from tests.tiny_internvl import JUDGE, write_internvl_chat
from tests.tiny_kimi import write_kimi
from tests.tiny_models import _root

IMAGE = 300  # the placeholder of every tiny model
VOCAB = 331
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
    "tie_word_embeddings": False,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5]}
QWEN_EYES = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_EYES = {
    **{**QWEN_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 36},
    **{"deepstack_visual_indexes": [0, 2], "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.2},
}
QWEN3_TEXT = {**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}


Layout = tuple[tuple[int, ...], tuple[int, int, int], int]  # shape of the pixels, grid, placeholders


@dataclass(frozen=True)
class Tiny:
    """A family's tiny configuration, and how a picture of it is told transformers."""

    kind: str
    config: dict[str, Any]
    judge: Callable[[Sequence[MediaItem]], dict[str, torch.Tensor]]
    layout: Callable[[int, int], Layout]  # of a picture of so many rows and columns of patches
    types: str = "mm_token_type_ids"  # the argument that tells it which tokens are pictures; "": it wants none
    has_breaks: bool = False  # a token of text behind each row
    is_text_class: bool = False  # transformers has it among models of text
    seed: int = 0  # one with which no answer holds a picture's token
    write: Callable[[PreTrainedModel, Path], Any] = PreTrainedModel.save_pretrained
    files: Mapping[str, Any] = field(default_factory=dict)  # what its processor's file says beside
    published: str = ""  # the model type under which it is published, where transformers has another


def normalized(item: MediaItem) -> torch.Tensor:
    """Pixels as transformers' models read them, channels in the second place."""
    pixels = torch.from_numpy(np.frombuffer(item.pixels, np.uint8).reshape(item.shape).copy()).float() / 255
    shape = (1, 3, *[1] * (pixels.ndim - 2))
    mean, std = (torch.tensor(one).view(shape) for one in (MEAN, STD))
    return (pixels - mean) / std


MEAN, STD = [0.48, 0.45, 0.4], [0.27, 0.25, 0.3]


def _qwen(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    rows = [normalized(item).unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1) for item in items]
    return {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor([item.grid for item in items])}


def _qwen_layout(rows: int, columns: int) -> Layout:
    return (rows * columns, 3, 4, 4), (1, rows, columns), rows * columns // 4


def _tiles(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.cat([normalized(item) for item in items])}


def _tile_layout(each: int, *, several: bool) -> Callable[[int, int], Layout]:
    """Of `each` placeholders a tile."""

    def layout(rows: int, columns: int) -> Layout:
        tiles = 1 + (rows + columns) % 3 if several else 1
        return (tiles, 3, 16, 16), (tiles, 4, 4), tiles * each

    return layout


def _of_any_size(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    sizes = [item.shape[2:] for item in items]
    pixels = torch.zeros(len(items), 3, *(max(side) for side in zip(*sizes, strict=True)))
    for own, item, (height, width) in zip(pixels, items, sizes, strict=True):
        own[:, :height, :width] = normalized(item)[0]
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def _any_layout(merge: int) -> Callable[[int, int], Layout]:
    def layout(rows: int, columns: int) -> Layout:
        return (1, 3, rows * 4, columns * 4), (1, rows, columns), rows * columns // merge**2

    return layout


DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24},
    **{
        "num_hidden_layers": 4,
        "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
    },
}
LLAMA = {**TEXT, "model_type": "llama"}


# Sizes of pictures by grid and tiles, which transformers wants to know for LLaVA-OneVision, and shapes of tiles.
_SIZES: dict[tuple[tuple[int, int, int], int], tuple[int, int]] = {}
SHAPES = [[16, 16], [16, 32], [32, 16], [32, 32], [16, 48]]
NEXT_SHAPES = {side: [[side, side], [side, 2 * side], [2 * side, side]] for side in (8, 10)}


def remember_size(grid: tuple[int, int, int], num_tiles: int, height: int, width: int) -> None:
    """A picture's size, which the judge of LLaVA-OneVision is told."""
    _SIZES[grid, num_tiles] = (height, width)


def _next_layout(side: int) -> Callable[[int, int], Layout]:
    """Of tiles of a side that patches of 4 or 8 need not fill."""

    def layout(rows: int, columns: int) -> Layout:
        hf = {"vision_config": {"image_size": side, "patch_size": 4}, "image_grid_pinpoints": NEXT_SHAPES[side]}
        own = LlavaNextProcessor({**LlavaNextProcessor.settings_of({}, hf), "placeholder": "x"})
        found = own.layout((columns * 9, rows * 5))
        tiles = 1 + found.size[0] * found.size[1] // side**2
        remember_size(found.grid, tiles, rows * 5, columns * 9)
        return (tiles, 3, side, side), found.grid, found.num_tokens

    return layout


def _one_vision_layout(rows: int, columns: int) -> Layout:
    hf = {"vision_config": {"image_size": 16, "patch_size": 8}, "vision_aspect_ratio": "anyres_max_2"}
    settings = LlavaOnevisionProcessor.settings_of({"image_grid_pinpoints": SHAPES}, hf)
    own = LlavaOnevisionProcessor({**settings, "placeholder": "x"}).layout((columns * 9, rows * 5))
    tiles = 1 + own.size[0] * own.size[1] // 256
    remember_size(own.grid, tiles, rows * 5, columns * 9)
    return (tiles, 3, 16, 16), own.grid, own.num_tokens


def _phi4_layout(rows: int, columns: int) -> Layout:
    own = Phi4Processor({"side": 16, "patch_size": 4, "dynamic_hd": 4, "placeholder": "x"}).layout(
        (columns * 5 + 3, rows * 5)
    )
    return (own.size[0] * own.size[1] // 256, 3, 16, 16), own.grid, own.num_tokens


def _phi4(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """Tiles, all of a picture in one before them, and which of their patches show something."""
    most = 1 + max(item.shape[0] for item in items)
    pixels, masks, sizes = torch.zeros(len(items), most, 3, 16, 16), torch.ones(len(items), most, 4, 4), []
    for own, mask, item in zip(pixels, masks, items, strict=True):
        high, rows, columns = item.grid
        wide, tiles = item.shape[0] // high, normalized(item)
        laid = tiles.view(high, wide, 3, 16, 16).permute(2, 0, 3, 1, 4).reshape(3, high * 16, wide * 16)
        own[0] = F.interpolate(laid[None], (16, 16), mode="bicubic", align_corners=False)[0]
        own[1 : 1 + len(tiles)] = tiles
        shown = torch.zeros(high * 4, wide * 4)
        shown[:rows, :columns] = 1
        mask[1 : 1 + len(tiles)] = shown.view(high, 4, wide, 4).transpose(1, 2).reshape(-1, 4, 4)
        sizes.append([high * 16, wide * 16])
    return {"image_pixel_values": pixels, "image_attention_mask": masks, "image_sizes": torch.tensor(sizes)}


def _one_vision(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    pixels = torch.zeros(len(items), max(item.shape[0] for item in items), *items[0].shape[1:])
    for own, item in zip(pixels, items, strict=True):
        own[: item.shape[0]] = normalized(item)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([_SIZES[item.grid, item.shape[0]] for item in items])}


def _gemma4(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """Patches with channels last, not normalised; places of those that pad are -1."""
    most = 4 * 25
    patches, places = torch.zeros(len(items), most, 48), torch.full((len(items), most, 2), -1)
    for i, item in enumerate(items):
        pixels = torch.from_numpy(np.frombuffer(item.pixels, np.uint8).reshape(item.shape).copy()).float() / 255
        _, rows, columns = item.grid
        cut = pixels[0].view(3, rows, 4, columns, 4).permute(1, 3, 2, 4, 0).reshape(rows * columns, 48)
        row, column = np.divmod(np.arange(rows * columns), columns)
        patches[i, : len(cut)] = cut
        places[i, : len(cut)] = torch.from_numpy(np.stack((column, row), 1))
    return {"pixel_values": patches, "image_position_ids": places}


def _row_by_row(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """Patches in the order of rows, where ours lie token by token."""
    rows = []
    for item in items:
        _, height, width = item.grid
        cut = normalized(item).view(height // 2, width // 2, 2, 2, 3, 4, 4)
        rows.append(cut.transpose(1, 2).reshape(-1, 3, 4, 4))
    return {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor([item.grid for item in items])}


def _lfm2_layout(rows: int, columns: int) -> Layout:
    """Two tiles of 4 x 4 patches before the whole, or none."""
    tiles = 2 * ((rows + columns) % 4 == 0)
    return (tiles * 16 + rows * columns, 3, 4, 4), (tiles, rows, columns), tiles * 4 + rows * columns // 4


def _lfm2(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """Each tile padded to the most patches, in the order of rows, channels last."""
    rows, shapes = [], []
    for item in items:
        patches, done = normalized(item), 0
        tiles, *shape = item.grid
        for high, wide in [(4, 4)] * tiles + [tuple(shape)]:
            own = patches[done : (done := done + high * wide)].view(high // 2, wide // 2, 2, 2, 3, 4, 4)
            rows.append(own.transpose(1, 2).reshape(-1, 3, 4, 4).permute(0, 2, 3, 1).flatten(1))
            shapes.append((high, wide))
    most = max(len(one) for one in rows)
    masks = torch.stack([torch.arange(most) < len(one) for one in rows]).int()
    pixels = torch.stack([F.pad(one, (0, 0, 0, most - len(one))) for one in rows])
    return {"pixel_values": pixels, "spatial_shapes": torch.tensor(shapes), "pixel_attention_mask": masks}


EYES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
PIXTRAL = {**EYES, "model_type": "pixtral", "head_dim": 16}
FULL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
GRANITE = {
    **{"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 4.0},
    **{"residual_multiplier": 0.6, "attention_multiplier": 0.2},
}
GEMMA4_EYES = {
    **{**EYES, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2, "position_embedding_size": 24},
    "initializer_range": 0.2,
}
GEMMA4_TEXT = {
    **{**TEXT, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"sliding_window": 9, "global_head_dim": 48, "num_key_value_heads": 2},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
}
GEMMA4_IDS = {
    **{"image_token_id": IMAGE, "video_token_id": 301, "audio_token_id": 305, "boi_token_id": 302},
    **{"eoi_token_id": 303, "tie_word_embeddings": True},
}
KIMI_TEXT = {
    **{name: value for name, value in TEXT.items() if name not in ("head_dim", "num_key_value_heads")},
    **{"model_type": "deepseek_v3", "num_key_value_heads": 2, "moe_intermediate_size": 24, "n_routed_experts": 4},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16},
    **{"q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16},
}
GLM_TEXT = {name: value for name, value in TEXT.items() if name != "head_dim"}
HALF_TURNED = {"partial_rotary_factor": 0.5}
GLM4V_EYES = {
    **{**QWEN_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "image_size": 24},
    "initializer_range": 0.2,
}
LLAMA4_TEXT = {
    **{**TEXT, "intermediate_size": 48, "intermediate_size_mlp": 112, "num_local_experts": 4, "num_hidden_layers": 4},
    **{"num_experts_per_tok": 1, "attention_chunk_size": 512, "floor_scale": 16},
}
QWEN25_EYES = {**QWEN_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16}
MODELS: dict[str, Tiny] = {
    "qwen2_vl": Tiny(
        "qwen2_vl",
        {
            **QWEN_IDS,
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {
                **QWEN_EYES,
                "embed_dim": 32,
                "hidden_size": 64,
                "mlp_ratio": 2,
                "initializer_range": 0.2,
            },
        },
        _qwen,
        _qwen_layout,
    ),
    "qwen2_5_vl": Tiny(
        "qwen2_5_vl",
        {
            **QWEN_IDS,
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {**QWEN25_EYES, "fullatt_block_indexes": [1], "initializer_range": 0.2},
        },
        _qwen,
        _qwen_layout,
    ),
    "qwen3_vl": Tiny(
        "qwen3_vl", {**QWEN_IDS, "text_config": QWEN3_TEXT, "vision_config": QWEN3_EYES}, _qwen, _qwen_layout
    ),
    "qwen3_vl_moe": Tiny(
        "qwen3_vl_moe",
        {
            **QWEN_IDS,
            "text_config": {**QWEN3_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "vision_config": QWEN3_EYES,
        },
        _qwen,
        _qwen_layout,
    ),
    "qwen3_5": Tiny(
        "qwen3_5",
        {**QWEN_IDS, "text_config": {**TEXT, **DELTA}, "vision_config": QWEN3_EYES | {"deepstack_visual_indexes": []}},
        _qwen,
        _qwen_layout,
    ),
    "llava": Tiny(
        "llava",
        {
            "image_token_index": IMAGE,
            "text_config": LLAMA,
            "vision_config": {**EYES, "model_type": "clip_vision_model"},
        },
        _tiles,
        _tile_layout(16, several=False),
        types="",
    ),
    "pixtral": Tiny(
        "llava",
        {
            **{"image_token_index": IMAGE, "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": PIXTRAL},
            **FULL,
        },
        _of_any_size,
        _any_layout(1),
        types="",
        has_breaks=True,
    ),
    "mistral3": Tiny(
        "mistral3",
        {
            **{"image_token_index": IMAGE, "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": PIXTRAL},
            "spatial_merge_size": 2,
        },
        _of_any_size,
        _any_layout(2),
        types="",
        has_breaks=True,
    ),
    "llava-siglip": Tiny(
        "llava",
        {
            **{"image_token_index": IMAGE, "text_config": LLAMA, **FULL},
            "vision_config": {**EYES, "model_type": "siglip_vision_model"},
        },
        _tiles,
        _tile_layout(16, several=False),
        types="",
    ),
    "llava_onevision": Tiny(
        "llava_onevision",
        {
            **{"image_token_index": IMAGE, "video_token_index": 301, "image_grid_pinpoints": SHAPES},
            **{"vision_aspect_ratio": "anyres_max_2", "text_config": {**TEXT, "model_type": "qwen2"}},
            "vision_config": {**EYES, "model_type": "siglip_vision_model", "patch_size": 8},
        },
        _one_vision,
        _one_vision_layout,
        types="",
    ),
    "llava_next": Tiny(
        "llava_next",
        {
            **{"image_token_index": IMAGE, "image_grid_pinpoints": NEXT_SHAPES[8]},
            **{"text_config": {**TEXT, "model_type": "mistral"}},
            "vision_config": {**EYES, "model_type": "clip_vision_model", "image_size": 8},
        },
        _one_vision,
        _next_layout(8),
        types="",
    ),
    "granite_vision": Tiny(
        "llava_next",
        {
            **{"image_token_index": IMAGE, "image_grid_pinpoints": NEXT_SHAPES[10], **FULL},
            **{"vision_feature_layer": [-3, 1, -1], "text_config": {**TEXT, **GRANITE}},
            "vision_config": {**EYES, "model_type": "siglip_vision_model", "image_size": 10},
        },
        _one_vision,
        _next_layout(10),
        types="",
    ),
    "phi4_multimodal": Tiny(
        "phi4_multimodal",
        {
            **{name: value for name, value in TEXT.items() if name != "head_dim"},
            "vision_config": {**EYES, "crop_size": 16, "image_token_id": IMAGE, "feature_layer": -2},
            "audio_config": {
                **{"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2},
                **{"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16},
            },
        },
        _phi4,
        _phi4_layout,
        types="",
        is_text_class=True,
    ),
    "lfm2_vl": Tiny(
        "lfm2_vl",
        {
            **{"image_token_id": IMAGE, "projector_hidden_size": 40, "tie_word_embeddings": False},
            "text_config": {
                **{**GLM_TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
                **{"block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
            },
            "vision_config": {**EYES, "model_type": "siglip2_vision_model", "num_patches": 36},
        },
        _lfm2,
        _lfm2_layout,
        types="",
        files={"tile_size": 16, "encoder_patch_size": 4},
    ),
    "aya_vision": Tiny(
        "aya_vision",
        {
            **{"image_token_index": IMAGE, "alignment_intermediate_size": 48},
            "text_config": {
                **{**GLM_TEXT, "model_type": "cohere2", "sliding_window": 9, "logit_scale": 0.25},
                **{"num_hidden_layers": 4, "head_dim": 32, "num_attention_heads": 2, "tie_word_embeddings": True},
            },
            "vision_config": {**EYES, "model_type": "siglip_vision_model"},
        },
        _tiles,
        _tile_layout(4, several=True),
        types="",
    ),
    "cohere2_vision": Tiny(
        "cohere2_vision",
        {
            **{"image_token_id": IMAGE, "alignment_intermediate_size": 48},
            "text_config": {
                **{**GLM_TEXT, "model_type": "cohere2", "sliding_window": 9, "num_hidden_layers": 4, "head_dim": 32},
                "tie_word_embeddings": True,
            },
            "vision_config": {**EYES, "model_type": "siglip_vision_model"},
        },
        _tiles,
        _tile_layout(4, several=True),
        types="",
    ),
    "lighton_ocr": Tiny(
        "lighton_ocr",
        {
            **{"image_token_id": IMAGE, "text_config": {**TEXT, "model_type": "qwen3"}, "vision_config": PIXTRAL},
            "spatial_merge_size": 2,
        },
        _of_any_size,
        _any_layout(2),
        types="",
        seed=1,
    ),
    "glm_ocr": Tiny(
        "glm_ocr",
        {
            **{**QWEN_IDS, "image_start_token_id": 302, "image_end_token_id": 303},
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {**QWEN_EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64},
        },
        _qwen,
        _qwen_layout,
    ),
    "glm4v": Tiny(
        "glm4v",
        {
            **QWEN_IDS,
            "text_config": {**GLM_TEXT, "rope_parameters": {**SECTIONS, "mrope_section": [3, 3, 2], **HALF_TURNED}},
            "vision_config": GLM4V_EYES,
        },
        _qwen,
        _qwen_layout,
    ),
    "glm4v_moe": Tiny(
        "glm4v_moe",
        {
            **QWEN_IDS,
            "text_config": {
                **{**TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1},
                "rope_parameters": {**SECTIONS, "mrope_section": [3, 3, 2], **HALF_TURNED},
            },
            "vision_config": {**GLM4V_EYES, "attention_bias": True},
        },
        _qwen,
        _qwen_layout,
    ),
    "paddleocr_vl": Tiny(
        "paddleocr_vl",
        {
            **{**QWEN_IDS, "text_config": {**TEXT, "rope_parameters": SECTIONS}},
            "vision_config": {**EYES, "image_size": 24, "initializer_range": 0.2},
        },
        _row_by_row,
        _qwen_layout,
    ),
    "kimi_k25": Tiny(
        "kimi_k25",
        {
            **{"image_token_id": IMAGE, "video_token_id": 301, "projection_hidden_size": 32},
            **{"tie_word_embeddings": False, "text_config": KIMI_TEXT},
            "vision_config": {**EYES, "pos_emb_height": 6, "pos_emb_width": 6},
        },
        _row_by_row,
        _qwen_layout,
        types="",
        write=write_kimi,
    ),
    "llama4": Tiny(
        "llama4",
        {
            **{"image_token_index": IMAGE, "boi_token_index": 302, "eoi_token_index": 303, "text_config": LLAMA4_TEXT},
            "vision_config": {
                **{**EYES, "intermediate_size": 128, "projector_input_dim": 40, "projector_output_dim": 40},
                "vision_output_dim": 40,
            },
        },
        _tiles,
        _tile_layout(4, several=True),
        types="",
    ),
    "gemma4": Tiny(
        "gemma4",
        {
            **{**GEMMA4_IDS, "text_config": {**GEMMA4_TEXT, "num_kv_shared_layers": 2}},
            "vision_config": {**GEMMA4_EYES, "use_clipped_linears": True},
        },
        _gemma4,
        _any_layout(2),
    ),
    "gemma4-whole": Tiny(
        "gemma4",
        {
            **{**GEMMA4_IDS, "vision_soft_tokens_per_image": 16},
            "text_config": {**GEMMA4_TEXT, "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
            "vision_config": {**GEMMA4_EYES, "standardize": True, "num_key_value_heads": 1},
        },
        _gemma4,
        _any_layout(2),
    ),
    "gemma3": Tiny(
        "gemma3",
        {
            **{"image_token_index": IMAGE, "mm_tokens_per_image": 4, "tie_word_embeddings": True},
            "text_config": {**TEXT, "num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 3},
            "vision_config": EYES,
        },
        _tiles,
        _tile_layout(4, several=False),
        types="token_type_ids",
    ),
    "internvl": Tiny(
        "internvl",
        {
            "image_token_id": IMAGE,
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**EYES, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True},
        },
        _tiles,
        _tile_layout(4, several=True),
        types="",
    ),
    "internvl-6b": Tiny(
        "internvl",
        {
            "image_token_id": IMAGE,
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {
                **{**EYES, "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True},
                **{"norm_type": "rms_norm", "use_mean_pooling": False},
            },
        },
        _tiles,
        _tile_layout(4, several=True),
        types="",
    ),
    "internvl_chat": Tiny(
        "internvl",
        {
            **{"image_token_id": IMAGE, "tie_word_embeddings": False},
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {**EYES, "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True},
        },
        _tiles,
        _tile_layout(4, several=True),
        types="",
        write=write_internvl_chat,
        published="internvl_chat",
    ),
    "internvl_chat-6b": Tiny(
        "internvl",
        {
            **{"image_token_id": IMAGE, "tie_word_embeddings": False},
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                **{**EYES, "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True},
                "norm_type": "rms_norm",
            },
        },
        _tiles,
        _tile_layout(4, several=True),
        types="",
        write=write_internvl_chat,
        published="internvl_chat",
    ),
    "smolvlm": Tiny(
        "smolvlm",
        {"image_token_id": IMAGE, "scale_factor": 2, "text_config": LLAMA, "vision_config": EYES},
        lambda items: {"pixel_values": _tiles(items)["pixel_values"].unsqueeze(0)},
        _tile_layout(4, several=True),
        types="",
    ),
    "idefics3": Tiny(
        "idefics3",
        {"image_token_id": IMAGE, "scale_factor": 2, "text_config": LLAMA, "vision_config": EYES},
        lambda items: {"pixel_values": _tiles(items)["pixel_values"].unsqueeze(0)},
        _tile_layout(4, several=True),
        types="",
    ),
}


@functools.cache
def tiny_media_model(name: str, seed: int = 0) -> Path:
    """Directory of a random model that sees."""
    tiny = MODELS[name]
    config = AutoConfig.for_model(tiny.kind, **tiny.config)
    torch.manual_seed(seed + tiny.seed)
    model = (AutoModelForCausalLM if tiny.is_text_class else AutoModelForImageTextToText).from_config(config)
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in own or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "embed_tokens" in own:
                parameter[0] = torch.randn_like(parameter[0]) * 0.2  # the padding token's, which Gemma 4 reads
        for own, buffer in model.named_buffers():  # Gemma 4's: bounds of products, and what pooled tokens are scaled by
            if own.endswith(("_min", "_max")):
                buffer.fill_(-0.7 if own.endswith("_min") else 0.8)
            elif own.endswith((".std_bias", ".std_scale")):
                buffer.uniform_(0.5, 1.5)
        # No placeholder is ever the likeliest token: the judge would look for a picture there.
        model.get_output_embeddings().weight[[IMAGE, IMAGE + 1]] = 0.0
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root()))
    tiny.write(model, directory)
    (directory / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": STD, **tiny.files})
    )
    return directory


@functools.cache
def media_judge(directory: Path) -> PreTrainedModel:
    """The same weights in transformers."""
    if (directory / JUDGE).is_dir():
        directory = directory / JUDGE
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    is_text_class = any(tiny.is_text_class for tiny in MODELS.values() if tiny.kind == kind)
    model: PreTrainedModel = (AutoModelForCausalLM if is_text_class else AutoModelForImageTextToText).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def picture(name: str, rows: int, columns: int, offset: int, seed: int = 0) -> tuple[MediaItem, list[int]]:
    """A random picture of so many patches, as the family's processor leaves it, and its tokens."""
    tiny = MODELS[name]
    shape, grid, count = tiny.layout(rows, columns)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8).tobytes()
    digest = blake2b(pixels + bytes((rows, columns)), digest_size=16).digest()
    tokens = [IMAGE] * count
    if tiny.has_breaks:
        width = next(one for one in range(1, count + 1) if count % one == 0 and one * rows == columns * (count // one))
        tokens = ([IMAGE] * width + [304]) * (count // width)
    return MediaItem("image", digest, offset, len(tokens), grid, shape, pixels), tokens


def prompt_of(name: str, parts: Sequence[list[int] | tuple[int, int, int]]) -> tuple[list[int], MediaAsk]:
    """A prompt of token ids and of pictures (rows, columns, seed), in this order."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        item, own = picture(name, part[0], part[1], len(tokens), part[2])
        items.append(item)
        tokens += own
    return tokens, MediaAsk(tuple(items))


def judged(name: str, tokens: list[int], ask: MediaAsk, max_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits [T, V] of the prompt, and its greedy continuation, each token from the whole text: its own
    `generate` goes on at other positions behind a prompt that ends with a picture."""
    model, answer = media_judge(tiny_media_model(name)), list[int]()
    seen = MODELS[name].judge(ask.items) if ask.items else {}
    first: torch.Tensor | None = None
    for _ in range(max_tokens):
        ids = torch.tensor([tokens + answer])
        more = {types: (ids == IMAGE).long()} if (types := MODELS[name].types) else {}
        with torch.inference_mode():
            logits = model(input_ids=ids, **seen, **more, use_cache=False).logits[0]
        first = logits if first is None else first
        ranked = logits[-1].clone()
        answer.append(int(ranked.argmax()))
        assert answer[-1] != IMAGE
    assert first is not None
    return first, answer
