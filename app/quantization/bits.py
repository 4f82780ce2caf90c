"""Codes of 1 to 8 bits that lie in words one behind the other, lowest bits first, without a gap."""

from __future__ import annotations

import torch

WORD = 32


def words_of(bits: int) -> tuple[int, int]:
    """(codes, words) of the shortest run of whole words that holds whole codes: `per` and `entries` of a Dim."""
    return (WORD // bits, 1) if WORD % bits == 0 else (WORD, bits)


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., W] -> uint8 [..., W * 32 / bits]: the codes of each run of words, those that fill it up included.
    Bytes (uint8) hold a fourth as many, of 2, 4 or 8 bits."""
    if bits in (2, 4, 8):
        # A row of one word may have any stride, and yet counts as contiguous; as bytes it must have none but 1.
        flat = words.contiguous().as_strided((words.numel(),), (1,))
        numbers = flat.view(torch.uint8).view(*words.shape[:-1], words.itemsize * words.shape[-1])
        shifts = range(0, 8, bits)
        return numbers if bits == 8 else torch.stack([numbers >> s & (1 << bits) - 1 for s in shifts], -1).flatten(-2)
    per, entries = words_of(bits)
    padded = torch.nn.functional.pad(words, (0, -words.shape[-1] % entries))
    runs = padded.reshape(*words.shape[:-1], -1, entries).long() & 0xFFFFFFFF
    first = torch.arange(per, device=words.device) * bits
    low = runs[..., first // WORD] >> first % WORD
    high = runs[..., (first // WORD + 1).clamp(max=entries - 1)] << WORD - first % WORD
    codes: torch.Tensor = (low | high) & (
        1 << bits
    ) - 1  # a code within one word has what follows above it, which is cut off
    return codes.to(torch.uint8).flatten(-2)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The same back, for codes that fill bytes: uint8 [..., K] -> int32 [..., K * bits / 32]; K in whole words."""
    assert WORD % bits == codes.shape[-1] * bits % WORD == 0
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    numbers = (codes.view(*codes.shape[:-1], -1, 8 // bits) << shifts).sum(-1, dtype=torch.uint8)
    return numbers.view(torch.int32)
