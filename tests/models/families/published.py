"""Families by the layouts of their makers, which transformers has no class for: tiny random checkpoints, and what the
published code computes of them, a page each.

A reference reads the checkpoint's own names. `Page` holds what the pages share: plain matrices, no cache, no batch.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

Tensor = torch.Tensor
COMMON = {"vocab_size": 331, "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}


@dataclass
class Page:
    """A checkpoint's tensors and configuration."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def rms(self, name: str, x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.tensors[f"{name}.weight"]

    def layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], eps)


def heads(x: Tensor, dim: int) -> Tensor:
    """[T, H D] -> [H, T, D]."""
    return x.view(len(x), -1, dim).transpose(0, 1)


def angles(length: int, dim: int, theta: float, scale: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    inverse = scale(1.0 / theta ** (torch.arange(0, dim, 2).float() / dim))
    return torch.outer(torch.arange(length).float(), inverse)


def turn_halves(x: Tensor, theta: float, scale: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """[H, T, D], each dimension of the first half with that of the second."""
    angle = angles(x.shape[1], x.shape[2], theta, scale)
    one, two = x.chunk(2, -1)
    return torch.cat((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), -1)


def turn_pairs(x: Tensor, dim: int, theta: float) -> Tensor:
    """The first `dim` dimensions of [H, T, D], neighbours together."""
    angle = angles(x.shape[1], dim, theta)
    one, two = x[..., 0:dim:2], x[..., 1:dim:2]
    turned = torch.stack((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), -1)
    return torch.cat((turned.flatten(-2), x[..., dim:]), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None) -> Tensor:
    """Causal attention of [H, T, D] over [G, T, D] -> [T, H D]."""
    group, length = len(q) // len(k), q.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if slopes is not None:
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        scores = scores + slopes[:, None, None] * distance
    scores = scores + torch.full((length, length), -torch.inf).triu(1)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def llama3_scale(low: float, high: float, factor: float, original: int) -> Callable[[Tensor], Tensor]:
    def scaled(inverse: Tensor) -> Tensor:
        found = []
        for frequency in inverse.tolist():
            wavelength = 2 * math.pi / frequency
            smooth = (original / wavelength - low) / (high - low)
            if wavelength < original / high:
                found.append(frequency)
            elif wavelength > original / low:
                found.append(frequency / factor)
            else:
                found.append((1 - smooth) * frequency / factor + smooth * frequency)
        return torch.tensor(found)

    return scaled


def internlm2(p: Page, ids: Tensor) -> Tensor:
    dim = 16
    x = p.tensors["model.tok_embeddings.weight"][ids]
    for i in range(2):
        name = f"model.layers.{i}"
        fused = p.linear(f"{name}.attention.wqkv", p.rms(f"{name}.attention_norm", x, 1e-5))
        grouped = fused.view(len(ids), 2, 4, dim)  # two queries, key and value of each of two groups
        q, k, v = (heads(part.reshape(len(ids), -1), dim) for part in (grouped[:, :, :2], *grouped[:, :, 2:].unbind(2)))
        x = x + p.linear(f"{name}.attention.wo", attend(turn_halves(q, 1e6), turn_halves(k, 1e6), v))
        y = p.rms(f"{name}.ffn_norm", x, 1e-5)
        gated = F.silu(p.linear(f"{name}.feed_forward.w1", y)) * p.linear(f"{name}.feed_forward.w3", y)
        x = x + p.linear(f"{name}.feed_forward.w2", gated)
    return p.linear("output", p.rms("model.norm", x, 1e-5))


def one_layer(p: Page, name: str, x: Tensor) -> Tensor:
    gated = F.silu(p.linear(f"{name}.gate_proj", x)) * p.linear(f"{name}.up_proj", x)
    return p.linear(f"{name}.down_proj", gated)


def best_two_experts(p: Page, name: str, x: Tensor) -> Tensor:
    """Their weights are made to sum to 1."""
    scores = F.linear(x, p.tensors[f"{name}.gate.weight"]).softmax(-1)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        best = scores[token].topk(2)
        for weight, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            w1, w2, w3 = (f"{name}.experts.{expert}.w{i}" for i in (1, 2, 3))
            out[token] += weight * p.linear(w2, F.silu(p.linear(w1, x[token])) * p.linear(w3, x[token]))
    return out


def llama_like(
    p: Page,
    ids: Tensor,
    *,
    theta: float = 1e4,
    norm: str = "rms",
    scale: float = 1.0,
    added: float = 1.0,
    logits: float = 1.0,
    feed_forward: Callable[[Page, str, Tensor], Tensor] | None = None,
) -> Tensor:
    """Llama's names; what Orion, InternLM 3 and MiniCPM do otherwise comes as arguments."""
    dim = 16
    x = p.tensors["model.embed_tokens.weight"][ids] * scale
    normed = getattr(p, norm)
    for i in range(2):
        name = f"model.layers.{i}"
        y = normed(f"{name}.input_layernorm", x, 1e-5)
        q, k, v = (heads(p.linear(f"{name}.self_attn.{part}_proj", y), dim) for part in "qkv")
        out = attend(turn_halves(q, theta), turn_halves(k, theta), v)
        x = x + p.linear(f"{name}.self_attn.o_proj", out) * added
        y = normed(f"{name}.post_attention_layernorm", x, 1e-5)
        x = x + (feed_forward or one_layer)(p, f"{name}.mlp", y) * added
    x = normed("model.norm", x, 1e-5)
    if "lm_head.weight" not in p.tensors:
        return F.linear(x, p.tensors["model.embed_tokens.weight"]) * logits
    return p.linear("lm_head", x * logits)


def internlm3(p: Page, ids: Tensor) -> Tensor:
    return llama_like(p, ids, theta=5e4)


def orion(p: Page, ids: Tensor) -> Tensor:
    return llama_like(p, ids, norm="layer_norm")


def minicpm(p: Page, ids: Tensor) -> Tensor:
    return llama_like(p, ids, scale=3.0, added=1.4 / math.sqrt(2), logits=32 / 64)


def minicpm_moe(p: Page, ids: Tensor) -> Tensor:
    own = {"scale": 3.0, "added": 1.4 / math.sqrt(2), "logits": 32 / 64}
    return llama_like(p, ids, feed_forward=best_two_experts, **own)  # type: ignore[arg-type]


def chatglm(p: Page, ids: Tensor) -> Tensor:
    dim, theta = 16, 10_000.0 * p.config.get("rope_ratio", 1.0)
    x = p.tensors["transformer.embedding.word_embeddings.weight"][ids]
    for i in range(2):
        name = f"transformer.encoder.layers.{i}"
        fused = p.linear(f"{name}.self_attention.query_key_value", p.rms(f"{name}.input_layernorm", x, 1e-5))
        q, k, v = (heads(part, dim) for part in fused.split([64, 32, 32], -1))
        out = attend(turn_pairs(q, dim // 2, theta), turn_pairs(k, dim // 2, theta), v)
        x = x + p.linear(f"{name}.self_attention.dense", out)
        gate, up = p.linear(f"{name}.mlp.dense_h_to_4h", p.rms(f"{name}.post_attention_layernorm", x, 1e-5)).chunk(
            2, -1
        )
        x = x + p.linear(f"{name}.mlp.dense_4h_to_h", F.silu(gate) * up)
    return p.linear("transformer.output_layer", p.rms("transformer.encoder.final_layernorm", x, 1e-5))


def exaone3(p: Page, ids: Tensor) -> Tensor:
    dim, scale = 16, llama3_scale(1.0, 4.0, 8.0, 32)
    x = p.tensors["transformer.wte.weight"][ids]
    for i in range(2):
        name = f"transformer.h.{i}"
        y = p.rms(f"{name}.ln_1", x, 1e-5)
        q, k, v = (heads(p.linear(f"{name}.attn.attention.{part}_proj", y), dim) for part in "qkv")
        out = attend(turn_halves(q, 5e5, scale), turn_halves(k, 5e5, scale), v)
        x = x + p.linear(f"{name}.attn.attention.out_proj", out)
        y = p.rms(f"{name}.ln_2", x, 1e-5)
        x = x + p.linear(
            f"{name}.mlp.c_proj", F.silu(p.linear(f"{name}.mlp.c_fc_0", y)) * p.linear(f"{name}.mlp.c_fc_1", y)
        )
    return p.linear("lm_head", p.rms("transformer.ln_f", x, 1e-5))


def baichuan(p: Page, ids: Tensor) -> Tensor:
    dim, rotates = 16, "max_position_embeddings" in p.config
    slopes = None if rotates else torch.tensor([2.0 ** (-2 * (i + 1)) for i in range(4)])
    x = p.tensors["model.embed_tokens.weight"][ids]
    for i in range(2):
        name = f"model.layers.{i}"
        fused = p.linear(f"{name}.self_attn.W_pack", p.rms(f"{name}.input_layernorm", x, 1e-5))
        q, k, v = (heads(part, dim) for part in fused.chunk(3, -1))
        if rotates:
            q, k = turn_halves(q, 1e4), turn_halves(k, 1e4)
        x = x + p.linear(f"{name}.self_attn.o_proj", attend(q, k, v, slopes))
        y = p.rms(f"{name}.post_attention_layernorm", x, 1e-5)
        gated = F.silu(p.linear(f"{name}.mlp.gate_proj", y)) * p.linear(f"{name}.mlp.up_proj", y)
        x = x + p.linear(f"{name}.mlp.down_proj", gated)
    head = p.tensors["lm_head.weight"]
    return F.linear(p.rms("model.norm", x, 1e-5), head / head.norm(dim=1, keepdim=True))


def nemotron_nas(p: Page, ids: Tensor) -> Tensor:
    dim, scale = 16, llama3_scale(1.0, 4.0, 8.0, 32)
    x = p.tensors["model.embed_tokens.weight"][ids]
    for i, block in enumerate(p.config["block_configs"]):
        name = f"model.layers.{i}"
        if not block["attention"]["no_op"]:
            y = p.rms(f"{name}.input_layernorm", x, 1e-5)
            q, k, v = (heads(p.linear(f"{name}.self_attn.{part}_proj", y), dim) for part in "qkv")
            out = attend(turn_halves(q, 5e5, scale), turn_halves(k, 5e5, scale), v)
            x = x + p.linear(f"{name}.self_attn.o_proj", out)
        if not block["ffn"]["no_op"]:
            y = p.rms(f"{name}.post_attention_layernorm", x, 1e-5)
            gated = F.silu(p.linear(f"{name}.mlp.gate_proj", y)) * p.linear(f"{name}.mlp.up_proj", y)
            x = x + p.linear(f"{name}.mlp.down_proj", gated)
    return p.linear("lm_head", p.rms("model.norm", x, 1e-5))


def decilm(p: Page, ids: Tensor) -> Tensor:
    return llama_like(p, ids)


def _llama_shapes(
    kv: tuple[int, ...] = (32, 32), bias: tuple[str, ...] = (), norm_bias: bool = False
) -> dict[str, Any]:
    """Shapes by name; `bias`: the parts that have one."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (331, 64), "lm_head.weight": (331, 64)}
    norms = ["model.norm"]
    for i, width in enumerate(kv):
        name = f"model.layers.{i}"
        linears = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (width, 64), "self_attn.v_proj": (width, 64)}
        linears |= {"self_attn.o_proj": (64, 64), "mlp.gate_proj": (112, 64), "mlp.up_proj": (112, 64)}
        linears |= {"mlp.down_proj": (64, 112)}
        for part, shape in linears.items():
            shapes[f"{name}.{part}.weight"] = shape
            if part.rpartition(".")[2] in bias:
                shapes[f"{name}.{part}.bias"] = shape[:1]
        norms += [f"{name}.input_layernorm", f"{name}.post_attention_layernorm"]
    for one in norms:
        shapes[f"{one}.weight"] = (64,)
        if norm_bias:
            shapes[f"{one}.bias"] = (64,)
    return shapes


def _with_experts(shapes: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Shapes with experts in the place of each feed-forward layer."""
    found = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
    for name in (name for name in shapes if name.endswith(".mlp.gate_proj.weight")):
        layer = name.removesuffix(".gate_proj.weight")
        found[f"{layer}.gate.weight"] = (number, 64)
        for i in range(number):
            sizes = {"w1": (112, 64), "w3": (112, 64), "w2": (64, 112)}
            found |= {f"{layer}.experts.{i}.{part}.weight": size for part, size in sizes.items()}
    return found


def _renamed(shapes: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, shape in shapes.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name] = shape
    return found


def _fused(shapes: Mapping[str, Any], parts: tuple[str, ...], fused: str) -> dict[str, Any]:
    """Shapes with `parts` of a layer in one tensor."""
    found: dict[str, Any] = {}
    for name, shape in shapes.items():
        part = next((part for part in parts if f".{part}." in name), None)
        own = name if part is None else name.replace(f".{part}.", f".{fused}.")
        rows = found[own][0] if part is not None and own in found else 0
        found[own] = (rows + shape[0], *shape[1:])
    return found


_QKV = ("q_proj", "k_proj", "v_proj")
_INTERNLM2 = {
    **{"embed_tokens": "tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm"},
    **{"post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "self_attn": "attention"},
    **{"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"},
}
_CHATGLM = {
    **{"model.embed_tokens": "transformer.embedding.word_embeddings", "lm_head": "transformer.output_layer"},
    **{"model.norm": "transformer.encoder.final_layernorm", "model.layers": "transformer.encoder.layers"},
    **{"self_attn.o_proj": "self_attention.dense", "self_attn": "self_attention", "down_proj": "dense_4h_to_h"},
}
_EXAONE = {
    **{"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h"},
    **{"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.attention.out_proj"},
    **{"self_attn": "attn.attention", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj"},
}
_LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}
_NO_OP = {"no_op": True, "n_heads_in_group": None, "ffn_mult": None}
_BLOCKS = [
    {"attention": {"no_op": False, "n_heads_in_group": 2}, "ffn": {"no_op": False, "ffn_mult": 2.625}},
    {"attention": _NO_OP, "ffn": {"no_op": False, "ffn_mult": 6.5}},
    {"attention": {"no_op": False, "n_heads_in_group": 1}, "ffn": _NO_OP},
    {"attention": _NO_OP, "ffn": _NO_OP},
    {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"no_op": False, "ffn_mult": 1.0}},
]


def _nas_shapes() -> dict[str, Any]:
    """Widths are multiples of 256 beyond two thirds of the factor times the hidden size."""
    shapes = _llama_shapes((32, 32, 64, 32, 16))
    for i, (block, width) in enumerate(zip(_BLOCKS, (256, 512, 0, 0, 256), strict=True)):
        gone = ("self_attn", "input_layernorm") if block["attention"]["no_op"] else ()
        gone += ("mlp", "post_attention_layernorm") if block["ffn"]["no_op"] else ()
        for name in [name for name in shapes if name.startswith(f"model.layers.{i}.")]:
            if any(f".{part}." in name for part in gone):
                del shapes[name]
            else:
                shapes[name] = tuple(width if size == 112 else size for size in shapes[name])
    return shapes


_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112}
_LLAMA = {**_LAYERS, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 256, "rope_theta": 1e4}
_CHATGLM_CONFIG = {
    **{"model_type": "chatglm", "num_layers": 2, "num_attention_heads": 4, "padded_vocab_size": 331, "seq_length": 256},
    **{"kv_channels": 16, "ffn_hidden_size": 112, "multi_query_attention": True, "multi_query_group_num": 2},
    **{"add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "layernorm_epsilon": 1e-5, "vocab_size": None},
    **{"post_layer_norm": True, "apply_residual_connection_post_layernorm": False, "original_rope": True},
    "hidden_size": 64,
}
_DYNAMIC = {"type": "dynamic", "factor": 2.0}

Reference = Callable[[Page, Tensor], Tensor]
# name: (architecture, what is laid over COMMON in config.json, shapes of tensors, what they compute)
PUBLISHED: dict[str, tuple[str, dict[str, Any], dict[str, Any], Reference]] = {
    "internlm2": (
        "InternLM2ForCausalLM",
        {**_LLAMA, "model_type": "internlm2", "bias": False, "rope_theta": 1e6, "rope_scaling": _DYNAMIC},
        _renamed(_fused(_llama_shapes(), _QKV, "wqkv"), _INTERNLM2),
        internlm2,
    ),
    "internlm3": (
        "InternLM3ForCausalLM",
        {**_LLAMA, "model_type": "internlm3", "bias": False, "qkv_bias": True, "rope_theta": 5e4, "head_dim": 16},
        _llama_shapes(bias=_QKV),
        internlm3,
    ),
    "chatglm3": (
        "ChatGLMModel",
        _CHATGLM_CONFIG,
        _renamed(
            _fused(
                _fused(_llama_shapes(bias=_QKV), _QKV, "query_key_value"), ("gate_proj", "up_proj"), "dense_h_to_4h"
            ),
            _CHATGLM,
        ),
        chatglm,
    ),
    "glm4-published": (
        "ChatGLMForConditionalGeneration",
        {**_CHATGLM_CONFIG, "rope_ratio": 50.0},
        _renamed(
            _fused(
                _fused(_llama_shapes(bias=_QKV), _QKV, "query_key_value"), ("gate_proj", "up_proj"), "dense_h_to_4h"
            ),
            _CHATGLM,
        ),
        chatglm,
    ),
    "exaone3": (
        "ExaoneForCausalLM",
        {
            **{"model_type": "exaone", "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"intermediate_size": 112, "layer_norm_epsilon": 1e-5, "activation_function": "silu", "head_dim": 16},
            **{"max_position_embeddings": 256, "rope_theta": 5e5, "rope_scaling": _LLAMA3},
        },
        _renamed(_llama_shapes(), _EXAONE),
        exaone3,
    ),
    "baichuan2": (
        "BaichuanForCausalLM",
        {**_LLAMA, "model_type": "baichuan", "num_key_value_heads": None},
        _fused(_llama_shapes((64, 64)), _QKV, "W_pack"),
        baichuan,
    ),
    "baichuan2-13b": (
        "BaichuanForCausalLM",
        {
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112, "rms_norm_eps": 1e-5},
            **{"model_type": "baichuan", "hidden_act": "silu", "model_max_length": 256},
        },
        _fused(_llama_shapes((64, 64)), _QKV, "W_pack"),
        baichuan,
    ),
    "minicpm": (
        "MiniCPMForCausalLM",
        {**_LLAMA, "model_type": "minicpm", "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
        _llama_shapes(),
        minicpm,
    ),
    "minicpm-moe": (
        "MiniCPMForCausalLM",
        {
            **{**_LLAMA, "model_type": "minicpm", "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
            **{"num_experts": 4, "num_experts_per_tok": 2},
        },
        _with_experts(_llama_shapes(), 4),
        minicpm_moe,
    ),
    "orion": ("OrionForCausalLM", {**_LLAMA, "model_type": "orion"}, _llama_shapes(norm_bias=True), orion),
    "decilm": (
        "DeciLMForCausalLM",
        {**_LLAMA, "model_type": "deci", "num_key_value_heads": None, "num_key_value_heads_per_layer": [2, 1]},
        _llama_shapes((32, 16)),
        decilm,
    ),
    "nemotron-nas": (
        "DeciLMForCausalLM",
        {
            **_LLAMA,
            **{"model_type": "nemotron-nas", "num_hidden_layers": 5, "num_key_value_heads": None},
            **{"intermediate_size": None, "block_configs": _BLOCKS, "rope_theta": 5e5, "rope_scaling": _LLAMA3},
        },
        _nas_shapes(),
        nemotron_nas,
    ),
}


@cache
def published(name: str) -> Path:
    """Directory of a random checkpoint."""
    architecture, changes, shapes, _ = PUBLISHED[name]
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and tensor.endswith("weight")
        tensors[tensor] = 1.0 + 0.2 * drawn if is_norm else drawn * (0.2 if len(shape) > 1 else 0.5)
    save_file(tensors, directory / "model.safetensors")
    config = {**COMMON, "architectures": [architecture], "torch_dtype": "float32", **changes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def judge(name: str) -> Callable[[list[int]], Tensor]:
    """Maps a prompt to logits [T, V]."""
    from safetensors.torch import load_file

    directory = published(name)
    page = Page(load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text()))
    return lambda prompt: PUBLISHED[name][3](page, torch.tensor(prompt))


def greedy_tokens(logits_of: Callable[[list[int]], Tensor], prompt: list[int], count: int) -> list[int]:
    """What the reference would say."""
    found = list(prompt)
    for _ in range(count):
        found.append(int(logits_of(found)[-1].argmax()))
    return found[len(prompt) :]
