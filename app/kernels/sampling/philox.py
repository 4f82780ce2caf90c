"""Philox-4x32-10, a counter-based generator, in torch integer operations: identical bits on every device.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Key: the 64-bit seed. Counter:
(token id // 4, absolute position, choice index, purpose); the four words of one call serve four consecutive tokens.
Words travel in int64 tensors with only the low 32 bits meaningful, since torch has no unsigned 32-bit arithmetic.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LARGEST = 1.0 - 2.0**-24  # the largest fp32 below 1

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds. `counter` and `key` hold words as int64 in [0, 2^32) and broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for step in range(_ROUNDS):
        # A product may wrap beyond 63 bits and a shift drag its sign along: the mask after the xors cleans both,
        # and c1 and c3, which only ever meet that mask, need none of their own.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (product1 >> 32).bitwise_xor(c1).bitwise_xor_(k0 + step * _KEY_STEPS[0]).bitwise_and_(_LOW)
        c2 = (product0 >> 32).bitwise_xor(c3).bitwise_xor_(k1 + step * _KEY_STEPS[1]).bitwise_and_(_LOW)
        c1, c3 = product1, product0
    return c0, c1 & _LOW, c2, c3 & _LOW


def uniform(keys: torch.Tensor, positions: torch.Tensor, vocab_size: int, purpose: int) -> torch.Tensor:
    """Uniform fp32 [N, vocab_size] in (0, 1), finest near 0.

    keys int64 [N, 2] holds (seed, choice index), positions int64 [N] the absolute position of the sampled token.
    """
    groups = torch.arange(-(-vocab_size // 4), device=keys.device)[None]
    words = philox(*_counter_and_key(keys, positions, groups, purpose))
    out = torch.empty(keys.shape[0], groups.shape[1], 4, dtype=torch.float32, device=keys.device)
    for index, word in enumerate(words):
        out[..., index] = word
    return to_unit(out).view(keys.shape[0], -1)[:, :vocab_size]


def uniform_at(keys: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, purpose: int) -> torch.Tensor:
    """The entries of `uniform` at one token id per row: token_ids int64 [N] -> fp32 [N]."""
    words = philox(*_counter_and_key(keys, positions, (token_ids >> 2)[:, None], purpose))
    table = torch.cat([word.expand(len(token_ids), 1) for word in words], dim=1)
    return to_unit(table.gather(1, (token_ids & 3)[:, None]).squeeze(1).float())


def to_unit(words: torch.Tensor) -> torch.Tensor:
    """Words as fp32 (rounded to nearest) to (0, 1), in place: at least 2^-33, at most 1 - 2^-24."""
    return words.mul_(2.0**-32).add_(2.0**-33).clamp_(max=_LARGEST)


def _counter_and_key(
    keys: torch.Tensor, positions: torch.Tensor, groups: torch.Tensor, purpose: int
) -> tuple[Words, tuple[torch.Tensor, torch.Tensor]]:
    seed, choice = keys[:, :1], keys[:, 1:2]
    counter = (groups, positions[:, None] & _LOW, choice & _LOW, torch.full_like(seed, purpose))
    return counter, (seed & _LOW, (seed >> 32) & _LOW)
