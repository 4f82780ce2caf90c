"""The time that memory and tensor cores allow: formulas and constants of one H200, for shapes of benchmarks/shapes.py.

Linear layers cost the larger of their bytes over BANDWIDTH and their products over FLOPS; keys and values are read
beside them. BANDWIDTH is what a device copy reaches, FLOPS what an 8192^3 bf16 product does.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.shapes import SHAPES

BANDWIDTH = 4.3e12  # bytes/s
FLOPS = 790e12
ATTENTION_FLOPS = 0.75 * FLOPS
BYTES = 2  # bf16: a weight, and an element of the KV cache unless that is in fp8


@dataclass(slots=True, frozen=True)
class Floor:
    """Floors of one shape, in seconds."""

    layer_weights: int  # parameters of all layers
    head_weights: int
    kv_bytes: int  # one token in all layers
    attention_width: int  # layers * query heads * head size

    @classmethod
    def of(cls, shape: str, kv_cache_dtype: str = "auto") -> Floor:
        """`kv_cache_dtype` as in EngineConfig."""
        s = SHAPES[shape]
        layers, hidden, heads, kv_heads, dim = (
            s[name]
            for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        per_layer = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim + 3 * hidden * s["intermediate_size"]
        kv_bytes = 2 * layers * kv_heads * dim * (1 if kv_cache_dtype == "fp8" else BYTES)
        return cls(layers * per_layer, hidden * s["vocab_size"], kv_bytes, layers * heads * dim)

    def decode_s(self, batch: int, context: float) -> float:
        """A step of `batch` requests with `context` tokens each."""
        weights = self.layer_weights + self.head_weights
        linear = max(weights * BYTES / BANDWIDTH, 2 * weights * batch / FLOPS)
        return linear + batch * context * self.kv_bytes / BANDWIDTH

    def prefill_s(self, tokens: int) -> float:
        """One prompt and its first token."""
        linear = max(self.layer_weights * BYTES / BANDWIDTH, 2 * self.layer_weights * tokens / FLOPS)
        head = self.head_weights * BYTES / BANDWIDTH
        return linear + head + 2 * self.attention_width * tokens**2 / ATTENTION_FLOPS

    def batch_s(self, pairs: list[tuple[int, int]], batch_tokens: int = 8192) -> float:
        """Ideal time of requests (prompt, output tokens) that all run at once: prefills, then decode steps."""
        prompts = sum(prompt for prompt, _ in pairs)
        attention = sum(2 * self.attention_width * prompt**2 for prompt, _ in pairs) / ATTENTION_FLOPS
        weights_read = -(-prompts // batch_tokens) * self.layer_weights * BYTES / BANDWIDTH
        seconds = max(weights_read, 2 * self.layer_weights * prompts / FLOPS) + attention
        for step in range(1, max(output for _, output in pairs)):
            live = [prompt + step for prompt, output in pairs if output > step]
            seconds += self.decode_s(len(live), sum(live) / len(live))
        return seconds
