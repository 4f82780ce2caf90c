"""The time that memory and tensor cores allow: formulas and constants of one H200, for shapes of benchmarks/shapes.py.

Linear layers cost the larger of their bytes over BANDWIDTH and their products over FLOPS (twice that where both sides
have 8 bits); keys and values are read beside them. BANDWIDTH is what a device copy reaches, FLOPS what an 8192^3 bf16
product does.
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
# A weight of linear layers with its share of the scales, by the format of the checkpoint; others count as bf16.
# GPTQ: 4 bits, a scale and a zero for 128 inputs; compressed-tensors: int8, as in shapes.py.
WEIGHT_BYTES = {"fp8": 1, "compressed-tensors": 1, "gptq": 0.5 + 2.5 / 128}
EIGHT_BITS = ("fp8", "compressed-tensors")  # on both sides of a product


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
    weight_bytes: float = BYTES  # of one parameter of `layer_weights`
    flops: float = FLOPS  # of the layers' products

    @classmethod
    def of(cls, shape: str, kv_cache_dtype: str = "auto") -> Floor:
        """`kv_cache_dtype` as in EngineConfig."""
        s = SHAPES[shape]
        hidden, heads = s["hidden_size"], s["num_attention_heads"]
        attention, cached, width = _attention(s)
        attends, recurrent, feeds = _layers(s)
        of_recurrent, state_bytes = _recurrent(s) if recurrent else (0, 0)
        sparse = _layers_of_experts(s)
        shared = s.get("n_shared_experts", 0) * s.get("moe_intermediate_size", 0)
        shared += s.get("shared_expert_intermediate_size", 0)
        wide = (feeds - sparse) * s["intermediate_size"] + sparse * shared
        kv_bytes = attends * cached * (1 if kv_cache_dtype == "fp8" else BYTES)
        form = s.get("quantization_config", {}).get("quant_method", "")
        weight_bytes = WEIGHT_BYTES.get(form, BYTES)
        return cls(
            attends * attention + recurrent * of_recurrent + (2 if "mlp_hidden_act" in s else 3) * hidden * wide,
            hidden * s["vocab_size"],
            kv_bytes,
            attends * heads * width,
            sparse * 3 * hidden * s.get("moe_intermediate_size", s["intermediate_size"]),
            _num_experts(s),
            s.get("num_experts_per_tok", 0),
            MXFP4_BYTES if form == "mxfp4" else weight_bytes,
            recurrent * state_bytes,
            weight_bytes,
            2 * FLOPS if form in EIGHT_BITS else FLOPS,
        )

    def read_experts(self, tokens: float) -> float:
        """Experts of a layer that so many tokens go to, where routing is even: those are read."""
        if not self.num_experts:
            return 0.0
        return float(self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens))

    def linear_s(self, tokens: int, head: bool = False) -> float:
        """All linear layers, with the head besides."""
        more = self.head_weights if head else 0
        read = self.layer_weights * self.weight_bytes + more * BYTES
        read += self.read_experts(tokens) * self.expert_weights * self.expert_bytes
        used = self.layer_weights + self.experts_per_token * self.expert_weights
        return max(read / BANDWIDTH, 2 * tokens * (used / self.flops + more / FLOPS))

    def decode_s(self, batch: int, context: float) -> float:
        """A step of `batch` requests with `context` tokens each."""
        return self.linear_s(batch, head=True) + sum(self.request_s(batch, context).values())

    def request_s(self, batch: int, context: float) -> dict[str, float]:
        """What a step reads, and writes, of its requests' own."""
        of_states = 2 * batch * self.state_bytes / BANDWIDTH
        return {"states": of_states, "attention": batch * context * self.kv_bytes / BANDWIDTH}

    def decode_parts_s(self, batch: int, context: float) -> dict[str, float]:
        """The same, part by part."""
        experts = self.read_experts(batch) * self.expert_weights * self.expert_bytes / BANDWIDTH
        products = self.linear_s(batch, head=True) - experts
        return {**self.request_s(batch, context), "experts": experts, "products": products}

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
        kv_heads, dim = s["num_key_value_heads"], s.get("head_dim", hidden // heads)
        of_queries = 3 if "linear_num_key_heads" in s else 2  # with a gate
        return of_queries * hidden * heads * dim + 2 * hidden * kv_heads * dim, 2 * kv_heads * dim, dim
    latent, rope, nope, value = (
        s[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    weights = hidden * heads * (nope + rope + value) + hidden * (latent + rope) + heads * latent * (nope + value)
    return weights, latent + rope, (nope + rope + value) / 2


def _layers(s: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many layers attend, keep a state, and feed forward."""
    if marks := s.get("hybrid_override_pattern"):
        return marks.count("*"), marks.count("M"), marks.count("-")
    recurrent = s.get("layer_types", []).count("linear_attention")
    return s["num_hidden_layers"] - recurrent, recurrent, s["num_hidden_layers"]


def _recurrent(s: Mapping[str, Any]) -> tuple[int, int]:
    """(weights, bytes of a state) of a layer of gated delta net, or of Mamba 2."""
    if "mamba_num_heads" in s:
        heads, size, states = s["mamba_num_heads"], s["mamba_head_dim"], s["ssm_state_size"]
        mixed = heads * size + 2 * s["n_groups"] * states
        weights = s["hidden_size"] * (mixed + 2 * heads * size + heads)
        return weights, 4 * heads * size * states + BYTES * mixed * (s["conv_kernel"] - 1)
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key_dim, value_dim = (s[name] for name in names)
    mixed = 2 * keys * key_dim + values * value_dim
    weights = s["hidden_size"] * (mixed + 2 * values * value_dim + 2 * values)
    return weights, 4 * values * value_dim * key_dim + BYTES * mixed * (s["linear_conv_kernel_dim"] - 1)


def _num_experts(s: Mapping[str, Any]) -> int:
    return int(next((s[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in s), 0))


def _layers_of_experts(s: Mapping[str, Any]) -> int:
    return s["num_hidden_layers"] - s.get("first_k_dense_replace", 0) if _num_experts(s) else 0
