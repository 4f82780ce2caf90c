"""Attention of encoders: every token of a text sees all of it. There is no cache, and no position matters.

`plan_encoder` once a step, `encoder_attention` in every layer. Texts of similar length are padded to the longest of
them and go through one call of PyTorch's own kernel, on a CPU and on a GPU alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

# A group ends where its shortest text would be padded by more than a quarter of itself and a few tokens, or where it
# has so many padded tokens.
MOST_PADDING, FREE_PADDING, GROUP_TOKENS = 0.25, 8, 8192


@dataclass(slots=True, frozen=True)
class EncoderGroup:
    """n texts, padded to L tokens."""

    tokens: torch.Tensor  # int64 [n * L], rows of the step's tensors; padding repeats a text's last token
    shape: tuple[int, int]  # n, L
    mask: torch.Tensor | None  # bool [n, 1, 1, L], True = a token of the text; None: no padding
    kept: torch.Tensor | None  # int64, which of `tokens` are no padding
    targets: torch.Tensor  # int64, the rows that they stand for


@dataclass(slots=True, frozen=True)
class EncoderPlan:
    """One step's texts in groups."""

    groups: tuple[EncoderGroup, ...]


def plan_encoder(starts: list[int], device: torch.device) -> EncoderPlan:
    """Texts of a step: text r has the tokens starts[r] .. starts[r + 1] - 1."""
    lengths = [end - start for start, end in pairwise(starts)]
    groups: list[list[int]] = []
    for text in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[text]
        if groups:
            shortest, size = lengths[groups[-1][0]], len(groups[-1]) + 1
            if length <= shortest * (1 + MOST_PADDING) + FREE_PADDING and length * size <= GROUP_TOKENS:
                groups[-1].append(text)
                continue
        groups.append([text])
    return EncoderPlan(tuple(_group([(starts[text], lengths[text]) for text in texts], device) for texts in groups))


def _group(texts: list[tuple[int, int]], device: torch.device) -> EncoderGroup:
    """`texts` = (first token, length), the longest last."""
    longest = texts[-1][1]
    firsts, lengths = torch.tensor(texts).unsqueeze(2).unbind(1)  # [n, 1]
    offsets = torch.arange(longest)
    tokens = (firsts + torch.minimum(offsets, lengths - 1)).view(-1)
    if texts[0][1] == longest:
        return EncoderGroup(tokens.to(device), (len(texts), longest), None, None, tokens.to(device))
    real = offsets < lengths
    kept = real.view(-1).nonzero().squeeze(1)
    mask = real[:, None, None].to(device)
    return EncoderGroup(tokens.to(device), (len(texts), longest), mask, kept.to(device), tokens[kept].to(device))


def encoder_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: EncoderPlan, scale: float
) -> torch.Tensor:
    """Attention within each text: query [T, H, D], key and value of the same shape -> [T, H, D]."""
    out = torch.empty_like(query)
    for group in plan.groups:
        q, k, v = (_padded(x, group) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        rows = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
        out.index_copy_(0, group.targets, rows if group.kept is None else rows.index_select(0, group.kept))
    return out


def naive_encoder_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: list[int], scale: float
) -> torch.Tensor:
    """The same as `encoder_attention`, text by text in fp32: tests compare with it."""
    out = torch.empty_like(query)
    for start, end in pairwise(starts):
        q, k, v = (x[start:end].float().transpose(0, 1) for x in (query, key, value))
        probs = (q @ k.transpose(1, 2) * scale).softmax(-1)
        out[start:end] = (probs @ v).transpose(0, 1).to(query.dtype)
    return out


def _padded(x: torch.Tensor, group: EncoderGroup) -> torch.Tensor:
    """[T, H, D] -> [n, H, L, D]."""
    return x.index_select(0, group.tokens).view(*group.shape, *x.shape[1:]).transpose(1, 2)
