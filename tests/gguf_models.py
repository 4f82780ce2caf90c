"""Tiny models as GGUF files, written by the `gguf` package in the way of llama.cpp's converter.

Names come from that package's own table, queries' and keys' rows are permuted and norms shifted as the converter does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from tests.gguf_experts import expert_sizes, is_plain, parts_of, stored_tensors
from tests.gguf_states import is_never_quantized, state_sizes, state_tensors
from tests.tiny_models import hf_model

Types = Callable[[str], str]  # GGUF's name of a tensor -> its type
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
_PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid")
_SHIFTED = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")


def random_blocks(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Bytes of random numbers of about 0.2, uint8 [..., bytes of a row]."""
    kind = gguf.GGMLQuantizationType[name]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    if name == "MXFP4":  # whose scales are powers of two
        raw[..., 0] = rng.integers(121, 125, raw.shape[:-1])
        return raw.reshape(*shape[:-1], -1)
    widest = float(np.abs(gguf.dequantize(_with_scales(raw.copy(), name, 1.0), kind)).max())
    factor = 0.7 / widest * rng.uniform(0.5, 1.0, (*raw.shape[:-1], 1))
    return _with_scales(raw, name, factor).reshape(*shape[:-1], -1)


def _with_scales(raw: np.ndarray, name: str, scale: Any) -> np.ndarray:
    for at in _HALVES.get(name, (208,) if name == "Q6_K" else (0,)):
        raw[..., at : at + 2] = np.broadcast_to(scale, (*raw.shape[:-1], 1)).astype(np.float16).view(np.uint8)
    return raw


def write_gguf(
    source: Path,
    file: Path,
    architecture: str,
    types: Types,
    metadata: Mapping[str, Any] | None = None,
    *,
    rope_freqs: torch.Tensor | None = None,
    shards: int = 1,
) -> PreTrainedModel:
    """`source` as a GGUF file; returns the judge, whose weights are those of the file."""
    judge = hf_model(source).requires_grad_(False)
    config = json.loads((source / "config.json").read_text())
    config.setdefault("num_hidden_layers", judge.config.num_hidden_layers)  # which a pattern of layers says, too
    writer = _writer(file, architecture, shards, sum(1 for _ in judge.named_parameters()))
    values = _sizes(config, architecture) | expert_sizes(config, architecture) | state_sizes(config)
    values |= dict(metadata or {})
    for key, value in values.items():
        if value is None:  # not as the converter has it now
            continue
        _add_value(writer, key.replace("{arch}", architecture), value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.numpy())
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tied = bool(config.get("tie_word_embeddings"))
    number = 0
    for name, parameter in stored_tensors(judge):
        module, _, leaf = name.rpartition(".")
        if tied and module == "lm_head":
            continue
        of_states = list(state_tensors(name, parameter, config, architecture))
        for own, written, restore in of_states:
            kind = "F32" if is_never_quantized(own) else types(own)
            raw, numbers = _stored(written.contiguous().numpy(), kind, number)
            writer.add_tensor(own, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
            restore(torch.from_numpy(numbers.copy()))
            number += 1
        if of_states:
            continue
        published = names.get_name(module) or names.get_name(module.replace("model.", "backbone.", 1))
        for own, values in parts_of(name, parameter, config) or [(f"{published}.{leaf}", parameter)]:
            permuted = architecture in _PERMUTED and re.search(r"[qk]_proj$", module)
            heads = config.get("num_attention_heads" if "q_proj" in module else "num_key_value_heads", 1)
            stored = _permuted(values, heads) if permuted else values
            shift = 1 if architecture in _SHIFTED and name.endswith("norm.weight") else 0
            kind = "F32" if is_plain(own, values) else types(own)
            raw, numbers = _stored((stored + shift).numpy(), kind, number)
            writer.add_tensor(own, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
            back = torch.from_numpy(numbers.copy())
            values.copy_(_restored(back, heads) if permuted else back - shift)
            number += 1
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return judge


def _writer(file: Path, architecture: str, shards: int, num_tensors: int) -> gguf.GGUFWriter:
    """Of a split model: the package numbers its files behind the name that it is given."""
    if shards == 1:
        return gguf.GGUFWriter(None, architecture)
    return gguf.GGUFWriter(None, architecture, split_max_tensors=-(-num_tensors // shards))


def _stored(values: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What is written, and the numbers that it stands for."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        raw = gguf.quantize(values, number)
    except NotImplementedError:  # types that the package reads only
        raw = random_blocks(kind, values.shape, seed)
    return raw, gguf.dequantize(raw, number).astype(np.float32)


def _permuted(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotated pairs side by side, as the original Llama had them."""
    return x.view(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _restored(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(heads, len(x) // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _sizes(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for an architecture, and no others."""
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim")
    whole = head_dim or config["hidden_size"] // config.get("num_attention_heads", 1)
    more: dict[str, Any] = {}
    if architecture in ("llama", "phi3", "granite", "granitemoe", "glm4moe", "llama4"):
        more["{arch}.rope.dimension_count"] = int(whole * rope.get("partial_rotary_factor", 1.0))
    if head_dim and architecture != "phi3":
        more |= {"{arch}.attention.key_length": head_dim, "{arch}.attention.value_length": head_dim}
    if rope.get("rope_type") == "yarn":
        more |= {
            "{arch}.rope.scaling.type": "yarn",
            "{arch}.rope.scaling.factor": float(rope["factor"]),
            "{arch}.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if rope.get("rope_type") == "linear":
        more |= {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": float(rope["factor"])}
    return {
        **more,
        "{arch}.vocab_size": config["vocab_size"],
        "{arch}.context_length": config.get("max_position_embeddings") or config.get("model_max_length"),
        "{arch}.embedding_length": config["hidden_size"],
        "{arch}.block_count": config["num_hidden_layers"],
        "{arch}.feed_forward_length": config.get("intermediate_size"),
        "{arch}.attention.head_count": config.get("num_attention_heads"),
        "{arch}.attention.head_count_kv": config.get("num_key_value_heads"),
        "{arch}.attention.layer_norm_rms_epsilon": config.get("rms_norm_eps") or config.get("norm_eps") or 1e-5,
        "{arch}.rope.freq_base": float(rope.get("full_attention", rope).get("rope_theta", 10_000.0)),
    }


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    whole = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
    add = {bool: writer.add_bool, int: whole, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add[type(value)](key, value)
