"""Estimates the memory that a model takes, from its JSON files and the headers of its weights: nothing is loaded."""

from __future__ import annotations

import math
from pathlib import Path

from app.checkpoints.hub import commit_of
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.safetensors_header import SafetensorsHeader
from app.checkpoints.weight_files import format_of, weight_files
from app.config.engine import EngineConfig
from app.models.implementation import runs_natively

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def compute_dtype(config: EngineConfig, info: ModelInfo, on_gpu: bool) -> str:
    """The type that weights and KV cache will have."""
    if config.dtype != "auto":
        return config.dtype
    return info.dtype if on_gpu else "float32"


def weights_bytes(info: ModelInfo, dtype: str, load_format: str = "auto") -> int:
    """Bytes of all weights in `dtype`; 0 of random ones, and of a hub's, which workers download where they run.
    CheckpointError names a file that is missing or damaged."""
    if commit_of(info.directory) is not None:
        return 0
    kind, item_bytes = format_of(info.directory, load_format), ITEM_BYTES.get(dtype, 2)
    if kind == "safetensors":
        return sum(_num_elements(file) for file in weight_files(info.directory, kind)) * item_bytes
    if kind == "pt":  # its files are read by torch alone
        stored = sum(file.stat().st_size for file in weight_files(info.directory, kind))
        return stored * item_bytes // ITEM_BYTES.get(info.dtype, 2)
    if kind == "sharded_state":
        return sum(_num_elements(file) for file in info.directory.glob("model-rank-*.safetensors")) * item_bytes
    if kind == "gguf":
        return sum(file.stat().st_size for file in info.directory.glob("*.gguf"))
    return 0


def kv_bytes_per_token(info: ModelInfo, dtype: str) -> int:
    """Counts the bytes that are cached of one token over all layers: keys and values, or latents."""
    return info.num_caches * _cached_width(info) * ITEM_BYTES.get(dtype, 2)


def _cached_width(info: ModelInfo) -> int:
    """Numbers of a layer. Through transformers, latents are cached as the heads' keys and values, in one width."""
    hf = info.hf_config
    if "kv_lora_rank" not in hf:
        return 2 * info.num_kv_heads * info.head_dim
    if runs_natively(info):
        return int(hf["kv_lora_rank"]) + int(hf["qk_rope_head_dim"])
    key_dim = int(hf["qk_nope_head_dim"]) + int(hf["qk_rope_head_dim"])
    return 2 * info.num_heads * max(key_dim, int(hf.get("v_head_dim", 0)))


def _num_elements(file: Path) -> int:
    return sum(math.prod(entry.shape) for entry in SafetensorsHeader.read(file).tensors.values())
