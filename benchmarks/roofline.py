"""The time that memory and tensor cores allow: formulas and constants of one H200, for shapes of benchmarks/shapes.py.

Linear layers cost the larger of their bytes over BANDWIDTH and their products over FLOPS; keys and values are read
beside them. BANDWIDTH is what a device copy reaches, FLOPS what an 8192^3 bf16 product does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import SHAPES

BANDWIDTH = 4.3e12  # bytes/s
FLOPS = 790e12
ATTENTION_FLOPS = 0.75 * FLOPS
MXFP4_BYTES = 17 / 32  # a weight with its share of the scale
BYTES = 2  # bf16: a weight, and an element of the KV cache unless that is in fp8


@dataclass(slots=True, frozen=True)
class Floor:
    """Floors of one shape, in seconds."""

    layer_weights: int  # parameters of all layers
    head_weights: int
    kv_bytes: int  # one token in all layers
    attention_width: float  # layers * query heads * head size
    expert_weights: int = 0  # parameters of one expert in each of its layers; they are not among `layer_weights`
    num_experts: int = 0
    experts_per_token: int = 0
    expert_bytes: float = BYTES  # of one parameter of an expert
    state_bytes: int = 0  # of one request, read and written by each step of it

    @classmethod
    def of(cls, shape: str, kv_cache_dtype: str = "auto") -> Floor:
        """`kv_cache_dtype` as in EngineConfig."""
        s = SHAPES[shape]
        layers, hidden, heads = (s[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        attention, cached, width = _attention(s)
        recurrent = s.get("layer_types", []).count("linear_attention")
        of_delta, state_bytes = _delta(s) if recurrent else (0, 0)
        sparse = _layers_of_experts(s)
        shared = s.get("n_shared_experts", 0) * s.get("moe_intermediate_size", 0)
        shared += s.get("shared_expert_intermediate_size", 0)
        wide = (layers - sparse) * s["intermediate_size"] + sparse * shared
        attends = layers - recurrent
        kv_bytes = attends * cached * (1 if kv_cache_dtype == "fp8" else BYTES)
        return cls(
            attends * attention + recurrent * of_delta + 3 * hidden * wide,
            hidden * s["vocab_size"],
            kv_bytes,
            attends * heads * width,
            sparse * 3 * hidden * s.get("moe_intermediate_size", s["intermediate_size"]),
            _num_experts(s),
            s.get("num_experts_per_tok", 0),
            MXFP4_BYTES if s.get("quantization_config", {}).get("quant_method") == "mxfp4" else BYTES,
            recurrent * state_bytes,
        )

    def read_experts(self, tokens: float) -> float:
        """Experts of a layer that so many tokens go to, where routing is even: those are read."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)

    def linear_s(self, tokens: int, more: int = 0) -> float:
        """All linear layers, with `more` weights besides."""
        dense = self.layer_weights + more
        read = dense * BYTES + self.read_experts(tokens) * self.expert_weights * self.expert_bytes
        used = dense + self.experts_per_token * self.expert_weights
        return max(read / BANDWIDTH, 2 * used * tokens / FLOPS)

    def decode_s(self, batch: int, context: float) -> float:
        """A step of `batch` requests with `context` tokens each."""
        of_request = context * self.kv_bytes + 2 * self.state_bytes
        return self.linear_s(batch, self.head_weights) + batch * of_request / BANDWIDTH

    def prefill_s(self, tokens: int) -> float:
        """One prompt and its first token."""
        linear = self.linear_s(tokens)
        head = self.head_weights * BYTES / BANDWIDTH
        return linear + head + 2 * self.attention_width * tokens**2 / ATTENTION_FLOPS

    def batch_s(self, pairs: list[tuple[int, int]], batch_tokens: int = 8192) -> float:
        """Ideal time of requests (prompt, output tokens) that all run at once: prefills, then decode steps."""
        prompts = sum(prompt for prompt, _ in pairs)
        attention = sum(2 * self.attention_width * prompt**2 for prompt, _ in pairs) / ATTENTION_FLOPS
        steps = -(-prompts // batch_tokens)
        seconds = steps * self.linear_s(prompts // steps) + attention
        for step in range(1, max(output for _, output in pairs)):
            live = [prompt + step for prompt, output in pairs if output > step]
            seconds += self.decode_s(len(live), sum(live) / len(live))
        return seconds


def _attention(s: Mapping[str, Any]) -> tuple[int, int, float]:
    """(weights of a layer, numbers cached of a token in it, mean size of a head's query and value)."""
    hidden, heads = s["hidden_size"], s["num_attention_heads"]
    if "kv_lora_rank" not in s:
        kv_heads, dim = s["num_key_value_heads"], s["head_dim"]
        of_queries = 3 if "linear_num_key_heads" in s else 2  # with a gate
        return of_queries * hidden * heads * dim + 2 * hidden * kv_heads * dim, 2 * kv_heads * dim, dim
    latent, rope, nope, value = (
        s[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    weights = hidden * heads * (nope + rope + value) + hidden * (latent + rope) + heads * latent * (nope + value)
    return weights, latent + rope, (nope + rope + value) / 2


def _delta(s: Mapping[str, Any]) -> tuple[int, int]:
    """(weights, bytes of a state) of a layer of gated delta net."""
    keys, values, key_dim, value_dim = (
        s[name]
        for name in ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    )
    mixed = 2 * keys * key_dim + values * value_dim
    weights = s["hidden_size"] * (mixed + 2 * values * value_dim + 2 * values)
    return weights, 4 * values * value_dim * key_dim + BYTES * mixed * (s["linear_conv_kernel_dim"] - 1)


def _num_experts(s: Mapping[str, Any]) -> int:
    return int(next((s[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in s), 0))


def _layers_of_experts(s: Mapping[str, Any]) -> int:
    return s["num_hidden_layers"] - s.get("first_k_dense_replace", 0) if _num_experts(s) else 0
