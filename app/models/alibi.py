"""ALiBi's slopes (Press et al., "Train Short, Test Long", 2022): by how much each position further lowers a score."""

from __future__ import annotations


def alibi_slopes(num_heads: int) -> list[float]:
    """2^(-8 i / n) for the i-th of n heads; where n is no power of two, those of the power below it, and between them
    every second one of the power above."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
