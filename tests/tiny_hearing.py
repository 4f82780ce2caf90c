"""Random tiny models that hear sounds in their prompts, some of which see as well, in Hugging Face layout; sounds for
them, and transformers' answers."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AudioFlamingo3ForConditionalGeneration,
    AutoConfig,
    Gemma4ForConditionalGeneration,
    Phi4MultimodalForCausalLM,
    PreTrainedModel,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioForConditionalGeneration,
    Qwen3ASRForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

from app.records.media import MediaAsk, MediaItem
from tests.tiny_gemma3n import GEMMA3N, Gemma3nJudge
from tests.tiny_media import IMAGE, MEAN, MODELS, QWEN3_EYES, QWEN3_TEXT, QWEN25_EYES, SECTIONS, STD, TEXT
from tests.tiny_models import _root

SOUND, MELS, POSITIONS = 306, 12, 32
BEGIN, END = 307, 308  # stand around a sound where a family's template writes something there
Sized = tuple[tuple[int, ...], tuple[int, int, int], int]  # shape of the features, grid, placeholders
Values = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Hearing:
    """A family's tiny configuration, and how its sounds are told transformers."""

    judge_class: type[PreTrainedModel]
    kind: str
    config: dict[str, Any]
    layout: Callable[[int], Sized]  # of a sound of so many windows or frames
    judge: Callable[[Sequence[MediaItem]], dict[str, torch.Tensor]]
    sizes: tuple[int, int, int, int]  # of sounds in prompts: a usual one, a short one, an odd one, a long one
    sees: str = ""  # one of the tiny models that see, whose pictures it takes too
    attention: str = "eager"
    is_apart: bool = False  # transformers' sounds beside others see what fills them up


def values_of(item: MediaItem) -> torch.Tensor:
    """Features of a sound."""
    return torch.from_numpy(np.frombuffer(item.pixels, "<f4").reshape(item.shape).copy())


def _one_window(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    heard = torch.tensor([item.grid[2] for item in items])
    mask = (torch.arange(2 * POSITIONS) < heard[:, None]).long()
    return {"input_features": torch.stack([values_of(item) for item in items]), "feature_attention_mask": mask}


def _windows(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    return {"input_features": torch.cat([values_of(item) for item in items])}


def _flamingo(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    size, heard = 2 * POSITIONS, list[int]()
    for item in items:
        heard += [*[size] * (item.grid[0] - 1), item.grid[2] - size * (item.grid[0] - 1)]
    mask = (torch.arange(size) < torch.tensor(heard)[:, None]).long()
    return {**_windows(items), "input_features_mask": mask}


def _flamingo_layout(frames: int) -> Sized:
    windows, rest = divmod(frames - 1, 2 * POSITIONS)
    tokens = windows * (POSITIONS // 2) + (rest // 2 + 1) // 2
    return (windows + 1, MELS, 2 * POSITIONS), (windows + 1, 1, frames), tokens


def _padded(items: Sequence[MediaItem], multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(item.grid[2] for item in items)
    longest = -(-longest // multiple) * multiple
    features = torch.zeros(len(items), MELS, longest)
    for own, item in zip(features, items, strict=True):
        own[:, : item.grid[2]] = values_of(item)
    return features, (torch.arange(longest) < torch.tensor([item.grid[2] for item in items])[:, None]).long()


def _omni(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    return dict(zip(("input_features", "feature_attention_mask"), _padded(items), strict=True))


def _asr(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    return dict(zip(("input_features", "input_features_mask"), _padded(items, 100), strict=True))


def _gemma4(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    features, mask = _padded(items)
    return {"input_features": features.transpose(1, 2).contiguous(), "input_features_mask": mask.bool()}


def _gemma4_layout(frames: int) -> Sized:
    return (MELS, frames), (1, 1, frames), ((frames + 1) // 2 + 1) // 2


def _gemma3n(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    features, mask = _padded(items)
    return {"input_features": features.transpose(1, 2).contiguous(), "input_features_mask": mask.bool()}


def _gemma3n_layout(frames: int) -> Sized:
    return (MELS, frames), (1, 1, frames), GEMMA3N["audio_soft_tokens_per_image"]


def _phi4(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    (item,) = items
    sizes = torch.tensor([item.length])
    return {"audio_input_features": values_of(item).T[None].contiguous(), "audio_embed_sizes": sizes}


def _phi4_layout(frames: int) -> Sized:
    return (MELS, frames), (1, 1, frames), -(-frames // 8)


def _qwen2_audio_layout(frames: int) -> Sized:
    return (MELS, 2 * POSITIONS), (1, 1, frames), ((frames - 1) // 2 + 1) // 2


def _voxtral_layout(windows: int) -> Sized:
    return (windows, MELS, 2 * POSITIONS), (windows, 1, 2 * POSITIONS), windows * POSITIONS * 32 // 128


def _omni25_layout(frames: int) -> Sized:
    return (MELS, frames), (1, 1, frames), ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _omni3_layout(frames: int) -> Sized:
    rest = frames % 100
    for _ in range(3):
        rest = (rest + 1) // 2
    return (MELS, frames), (1, 1, frames), frames // 100 * 13 + rest


EARS = {
    **{"num_mel_bins": MELS, "max_source_positions": POSITIONS, "d_model": 32, "encoder_layers": 2},
    **{"encoder_attention_heads": 2, "encoder_ffn_dim": 48},
}
VOXTRAL_EARS = {
    **{"num_mel_bins": MELS, "max_source_positions": POSITIONS, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "intermediate_size": 128},
}
OMNI25_EARS = {**EARS, "max_source_positions": 50, "n_window": 10, "output_dim": 64}
OMNI3_EARS = {**EARS, "max_source_positions": 50, "n_window_infer": 200, "downsample_hidden_size": 8, "output_dim": 64}
OMNI_IDS = {"vision_start_token_id": 302, "vision_end_token_id": 303, "tie_word_embeddings": False}
OMNI25_IDS = {
    **{"audio_token_index": SOUND, "image_token_index": IMAGE, "video_token_index": 301, "audio_start_token_id": BEGIN},
    "audio_end_token_id": END,
}
GEMMA4_EARS = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [MELS, 6]},
    **{"output_proj_dims": 40, "attention_chunk_size": 6, "attention_context_left": 7, "gradient_clipping": 3.0},
}
PHI4_EARS = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2, "input_size": MELS},
    **{"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8, "kernel_size": 3},
    **{"bias_max_distance": 6, "audio_token_id": SOUND},
}
HEARING: dict[str, Hearing] = {
    "gemma3n": Hearing(Gemma3nJudge, "gemma3n", GEMMA3N, _gemma3n_layout, _gemma3n, (40, 3, 57, 101)),
    "phi4": Hearing(
        Phi4MultimodalForCausalLM,
        "phi4_multimodal",
        {**MODELS["phi4_multimodal"].config, "audio_config": PHI4_EARS},
        _phi4_layout,
        _phi4,
        (40, 3, 57, 201),
        is_apart=True,
    ),
    "gemma4": Hearing(
        Gemma4ForConditionalGeneration,
        "gemma4",
        {
            **{**MODELS["gemma4"].config, "audio_token_id": SOUND, "boa_token_id": BEGIN, "eoa_token_index": END},
            "audio_config": GEMMA4_EARS,
        },
        _gemma4_layout,
        _gemma4,
        (40, 3, 57, 101),
        sees="gemma4",
        attention="sdpa",  # the other way takes a mask's numbers for truth (transformers 5.17)
    ),
    "gemma4-whole": Hearing(
        Gemma4ForConditionalGeneration,
        "gemma4",
        {
            **{**MODELS["gemma4-whole"].config, "audio_token_id": SOUND},
            "audio_config": {**GEMMA4_EARS, "use_clipped_linears": False},
        },
        _gemma4_layout,
        _gemma4,
        (40, 3, 57, 71),
        sees="gemma4-whole",
        attention="sdpa",
    ),
    "qwen2_audio": Hearing(
        Qwen2AudioForConditionalGeneration,
        "qwen2_audio",
        {
            **{"audio_token_index": SOUND, "audio_config": EARS, "text_config": {**TEXT, "model_type": "qwen2"}},
            "tie_word_embeddings": False,
        },
        _qwen2_audio_layout,
        _one_window,
        (64, 9, 33, 64),
    ),
    "audio_flamingo": Hearing(
        AudioFlamingo3ForConditionalGeneration,
        "audioflamingo3",
        {
            **{"audio_token_id": SOUND, "audio_config": {**VOXTRAL_EARS, "intermediate_size": 48}},
            **{"text_config": {**TEXT, "model_type": "qwen2"}, "tie_word_embeddings": False},
        },
        _flamingo_layout,
        _flamingo,
        (64, 9, 33, 150),
    ),
    "voxtral": Hearing(
        VoxtralForConditionalGeneration,
        "voxtral",
        {
            **{"audio_token_id": SOUND, "audio_config": VOXTRAL_EARS, "text_config": {**TEXT, "model_type": "llama"}},
            "tie_word_embeddings": False,
        },
        _voxtral_layout,
        _windows,
        (1, 1, 2, 3),
    ),
    "qwen3_asr": Hearing(
        Qwen3ASRForConditionalGeneration,
        "qwen3_asr",
        {
            **{"audio_token_id": SOUND, "audio_config": {**OMNI3_EARS, "max_position_embeddings": 13}},
            **{"text_config": {**TEXT, "model_type": "qwen3"}, "tie_word_embeddings": False, "eos_token_id": 2},
        },
        _omni3_layout,
        _asr,
        (150, 31, 200, 537),
    ),
    "qwen2_5_omni": Hearing(
        Qwen2_5OmniThinkerForConditionalGeneration,
        "qwen2_5_omni_thinker",
        {
            **{**OMNI_IDS, **OMNI25_IDS, "audio_config": OMNI25_EARS},
            "text_config": {**TEXT, "rope_parameters": SECTIONS},
            "vision_config": {**QWEN25_EYES, "fullatt_block_indexes": [1], "initializer_range": 0.2},
        },
        _omni25_layout,
        _omni,
        (40, 5, 57, 101),
        sees="qwen2_5_vl",
    ),
    "qwen3_omni": Hearing(
        Qwen3OmniMoeThinkerForConditionalGeneration,
        "qwen3_omni_moe_thinker",
        {
            **{**OMNI_IDS, "audio_token_id": SOUND, "image_token_id": IMAGE, "video_token_id": 301},
            **{"audio_start_token_id": BEGIN, "audio_config": OMNI3_EARS, "vision_config": QWEN3_EYES},
            "text_config": {
                **{**QWEN3_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
                **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
            },
        },
        _omni3_layout,
        _omni,
        (150, 131, 200, 437),
        sees="qwen3_vl",
    ),
}
TOKENS = 6


@functools.cache
def hearing_model(name: str) -> Path:
    """Directory of a random model that listens."""
    own = HEARING[name]
    config = AutoConfig.for_model(own.kind, **own.config)
    torch.manual_seed(0)
    model = own.judge_class(config)  # type: ignore[call-arg]
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            if parameter.ndim == 1 or "norm" in path:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root()))
    model.save_pretrained(directory)
    if own.sees:
        (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return directory


@functools.cache
def judge_of(name: str) -> PreTrainedModel:
    """The same weights in transformers."""
    model: PreTrainedModel = HEARING[name].judge_class.from_pretrained(
        hearing_model(name), dtype=torch.float32, attn_implementation=HEARING[name].attention
    )
    return model.eval()


def sound(name: str, size: int, offset: int, seed: int) -> MediaItem:
    """A random sound of so many windows or frames."""
    shape, grid, count = HEARING[name].layout(size)
    values = np.random.default_rng(seed).normal(0, 1, shape).astype("<f4").tobytes()
    digest = blake2b(values + size.to_bytes(4, "little"), digest_size=16).digest()
    return MediaItem("audio", digest, offset, count, grid, shape, values)


def picture(name: str, rows: int, columns: int, offset: int, seed: int) -> MediaItem:
    """A random picture of so many patches."""
    shape, grid, count = MODELS[HEARING[name].sees].layout(rows, columns)
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8).tobytes()
    return MediaItem("image", blake2b(values, digest_size=16).digest(), offset, count, grid, shape, values)


def words(count: int, seed: int) -> list[int]:
    """Tokens of text."""
    rng = random.Random(seed)
    return [rng.randrange(3, 299) for _ in range(count)]


def prompts_of(name: str) -> list[list[Any]]:
    """Prompts in parts: lists of tokens; sounds by size and seed; pictures by rows, columns and seed."""
    usual, short, odd, long = HEARING[name].sizes
    prompts: list[list[Any]] = [
        [words(5, 1), (usual, 1), words(4, 2)],
        [(short, 2), words(3, 3), (odd, 3), words(6, 4)],
        [words(11, 5)],
        [words(2, 6), (usual, 1), words(3, 7)],
        [words(1, 8), (long, 4), words(2, 9)],
    ]
    if HEARING[name].is_apart:
        prompts[1] = [(short, 2), words(9, 4)]
    if HEARING[name].sees:
        prompts += [[words(3, 1), (4, 6, 1), words(2, 2), (usual, 1), words(2, 3)], [(6, 4, 2), (4, 4, 3), words(3, 4)]]
    return prompts


def prompt_of(name: str, parts: list[Any]) -> tuple[list[int], MediaAsk]:
    """Token ids, and what they show."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        is_sound = len(part) == 2
        around = (BEGIN, END) if is_sound else (302, 303)
        tokens.append(around[0])
        make = sound if is_sound else picture
        item = make(name, *part[:-1], len(tokens), part[-1])
        items.append(item)
        tokens += [SOUND if is_sound else IMAGE] * item.length + [around[1]]
    return tokens, MediaAsk(tuple(items))


def told(name: str, items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """What transformers is told of a prompt's items."""
    sounds = [item for item in items if item.kind == "audio"]
    pictures = [item for item in items if item.kind == "image"]
    found = HEARING[name].judge(sounds) if sounds else {}
    return {**found, **(MODELS[HEARING[name].sees].judge(pictures) if pictures else {})}


@functools.cache
def judged(name: str, index: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits [T, V] of a prompt, and its greedy continuation, each token from the whole text."""
    tokens, ask = prompt_of(name, prompts_of(name)[index])
    model, answer, seen = judge_of(name), list[int](), told(name, ask.items)
    first: torch.Tensor | None = None
    for _ in range(TOKENS):
        ids = torch.tensor([tokens + answer])
        types = {"mm_token_type_ids": (ids == IMAGE) + 3 * (ids == SOUND)} if HEARING[name].kind == "gemma4" else {}
        with torch.inference_mode():
            options = {"attention_mask": torch.ones_like(ids), "use_cache": False, **types, **seen}
            logits = model(input_ids=ids, **options).logits[0]
        first = logits if first is None else first
        answer.append(int(logits[-1].argmax()))
        assert answer[-1] not in (SOUND, IMAGE)
    assert first is not None
    return first, answer
