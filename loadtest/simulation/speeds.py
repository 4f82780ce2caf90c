"""How long the steps of a modelled replica take. The defaults were measured on an H200 on 2026-11-20."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

# Llama-8B shape on one H200, bf16: (decodes in a step, milliseconds), short contexts.
H200_DECODE_MS = ((1, 8.69), (32, 9.08), (256, 15.77))


@dataclass(slots=True, frozen=True)
class Speeds:
    """Seconds of a step from what is in it.

    Prefill: `n` tokens behind `c` others take n * (token_s + pair_s * (c + n / 2)); the two constants go through the
    measured 58.7 ms for 2,048 tokens and 262.2 ms for 8,192. Decode: the table, linear between its points, and the
    reading of the resident context: 0.274 ms a layer for 64 x 4,096 tokens, 32 layers. A step takes at least as long
    as a decode of one request (the weights are read); a mixed one takes both parts.
    """

    token_s: float = 2.755e-5
    pair_s: float = 1.088e-9
    resident_token_s: float = 32 * 0.274e-3 / (64 * 4096)
    decode_ms: tuple[tuple[int, float], ...] = H200_DECODE_MS

    def slowed(self, factor: float) -> Speeds:
        """A device whose steps take so many times as long."""
        decode_ms = tuple((count, factor * ms) for count, ms in self.decode_ms)
        return Speeds(factor * self.token_s, factor * self.pair_s, factor * self.resident_token_s, decode_ms)

    def prefill_s(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds for `num_tokens` prompt tokens of one request with `num_before` tokens computed or cached."""
        return num_tokens * (self.token_s + self.pair_s * (num_before + num_tokens / 2))

    def decode_s(self, num_decodes: int, resident_tokens: float) -> float:
        """Seconds of one token for each of `num_decodes` requests with that many tokens of context in all."""
        table = self.decode_ms
        at = min(max(bisect_right(table, (num_decodes, float("inf"))), 1), len(table) - 1)
        (low, low_ms), (high, high_ms) = table[at - 1], table[at]
        ms = low_ms + (high_ms - low_ms) * (num_decodes - low) / (high - low)
        return ms / 1e3 + resident_tokens * self.resident_token_s

    def step_s(self, prefill_s: float, num_decodes: int, resident_tokens: float) -> float:
        """Seconds of a step with this much prefill beside its decodes."""
        if num_decodes:
            return prefill_s + self.decode_s(num_decodes, resident_tokens)
        return max(prefill_s, self.decode_ms[0][1] / 1e3)
