"""Attention of encoders by PyTorch: texts of similar length are padded to the longest of them, and go through one call
of its own kernel."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from app.kernels.attention.encoder import EncoderPlan, ScoreBias
from app.platforms.to_device import to_device

# A group ends where its shortest text would be padded by more than a quarter of itself and a few tokens, or where it
# has so many padded tokens.
MOST_PADDING, FREE_PADDING, GROUP_TOKENS = 0.25, 8, 8192
BANDED = 6  # times a window: of longer texts only what lies within windows is computed
BIAS_ENTRIES = 1 << 24  # most scores at a time where something is added to them


@dataclass(slots=True, frozen=True)
class EncoderGroup:
    """n texts, padded to L tokens."""

    shape: tuple[int, int]  # n, L
    # [n * L] rows of the step's tensors: those of texts of one length side by side, for which nothing is sent or
    # gathered, or int64, in which padding repeats a text's last token.
    tokens: torch.Tensor | slice
    mask: torch.Tensor | None = None  # bool [n, 1, 1, L], True = a token of the text; None: no padding
    kept: torch.Tensor | None = None  # int64, which of `tokens` are no padding; None: all of them
    targets: torch.Tensor | None = None  # int64, the rows that those stand for


class GroupPlan(EncoderPlan):
    """One step's texts in groups."""

    def __init__(self, starts: list[int], device: torch.device, *, is_causal: bool = False) -> None:
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
        self.groups = [_group([(starts[text], lengths[text]) for text in texts], device) for texts in groups]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        bias: ScoreBias | None = None,
        seen: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """See EncoderPlan."""
        out = torch.empty_like(query)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        for group in self.groups:
            q, k, v = (_padded(x, group) for x in (query, key, value))
            # What pads stands behind a text, where nobody looks who looks back.
            mask = None if is_causal and seen is None else _mask(group, seen)
            attended = _attended(q, k, v, mask, scale, window, bias, is_causal)
            rows = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
            if isinstance(group.tokens, slice):
                if len(rows) == len(query):  # all there is
                    return rows
                out[group.tokens] = rows
            else:
                assert group.targets is not None
                out.index_copy_(0, group.targets, rows if group.kept is None else rows.index_select(0, group.kept))
        return out


def _group(texts: list[tuple[int, int]], device: torch.device) -> EncoderGroup:
    """`texts` = (first token, length), the longest last."""
    longest = texts[-1][1]
    begin, shape = texts[0][0], (len(texts), longest)
    if texts[0][1] == longest and all(first == begin + n * longest for n, (first, _) in enumerate(texts)):
        return EncoderGroup(shape, slice(begin, begin + len(texts) * longest))
    firsts, lengths = torch.tensor(texts).unsqueeze(2).unbind(1)  # [n, 1]
    offsets = torch.arange(longest)
    tokens = (firsts + torch.minimum(offsets, lengths - 1)).view(-1)
    if texts[0][1] == longest:
        rows = to_device(tokens.numpy(), device)
        return EncoderGroup(shape, rows, targets=rows)
    real = offsets < lengths
    kept = real.view(-1).nonzero().squeeze(1)
    sent = (to_device(one.numpy(), device) for one in (tokens, real[:, None, None], kept, tokens[kept]))
    return EncoderGroup(shape, *sent)


def _mask(group: EncoderGroup, seen: torch.Tensor | None) -> torch.Tensor | None:
    """The keys that count, [n, 1, 1, L]; None: all of them."""
    if seen is None:
        return group.mask
    own = seen[group.tokens].view(group.shape[0], 1, 1, group.shape[1])
    return own if group.mask is None else own & group.mask


def _attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    window: int | None,
    bias: ScoreBias | None,
    is_causal: bool,
) -> torch.Tensor:
    """Padded texts [n, H, L, D] -> [n, H, L, D]."""
    length = q.shape[2]
    is_windowed = window is not None and window < length
    if is_causal and not is_windowed and mask is None and bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if is_windowed or is_causal:
        if window is not None and bias is None and not is_causal and length > BANDED * window:
            return _banded(q, k, v, mask, scale, window)
        offsets = torch.arange(length, device=q.device)
        apart = offsets[:, None] - offsets
        near = apart >= 0 if window is None else apart.abs() < window
        near = near & (apart >= 0) if is_causal else near
        mask = near if mask is None else mask & near
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out = torch.empty_like(q)
    count = max(1, BIAS_ENTRIES // (q.shape[1] * length * length))  # texts at a time, as each has scores of its own
    for first in range(0, len(q), count):
        part = slice(first, first + count)
        added = bias(q[part], k[part])
        if mask is not None:
            own = mask[part] if mask.ndim == 4 else mask
            added = added.masked_fill(~own, float("-inf"))
        out[part] = F.scaled_dot_product_attention(q[part], k[part], v[part], attn_mask=added, scale=scale)
    return out


def _banded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, window: int
) -> torch.Tensor:
    """Long texts with a small window: blocks of queries meet the keys that any of them sees, so that the work grows
    with the length alone."""
    n, heads, length, width = q.shape
    block = window
    blocks = -(-length // block)
    room, side = blocks * block, window - 1
    real = torch.zeros(n if mask is not None else 1, room + 2 * side, dtype=torch.bool, device=q.device)
    real[:, side : side + length] = True if mask is None else mask.view(n, length)
    spread = [F.pad(x, (0, 0, side, room - length + side)) for x in (k, v)]
    keys, values = (_by_block(x.unfold(2, block + 2 * side, block).transpose(3, 4)) for x in spread)
    queries = _by_block(F.pad(q, (0, 0, 0, room - length)).view(n, heads, blocks, block, width))
    places, offsets = (torch.arange(size, device=q.device) for size in (block + 2 * side, block))
    near = (places - side - offsets[:, None]).abs() < window  # [block, block + 2 side]
    seen = near & real.unfold(1, block + 2 * side, block)[:, :, None]  # [n or 1, blocks, block, block + 2 side]
    masks = seen.expand(n, -1, -1, -1).reshape(n * blocks, 1, block, block + 2 * side)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=masks, scale=scale)
    return out.view(n, blocks, heads, block, width).transpose(1, 2).reshape(n, heads, room, width)[:, :, :length]


def _by_block(x: torch.Tensor) -> torch.Tensor:
    """[n, H, blocks, L, D] -> [n * blocks, H, L, D]: PyTorch's fast kernels take four dimensions, not five."""
    return x.transpose(1, 2).flatten(0, 1)


def _padded(x: torch.Tensor, group: EncoderGroup) -> torch.Tensor:
    """[T, H, D] -> [n, H, L, D]."""
    own = x[group.tokens] if isinstance(group.tokens, slice) else x.index_select(0, group.tokens)
    return own.view(*group.shape, *x.shape[1:]).transpose(1, 2)
