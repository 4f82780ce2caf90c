"""Attention of encoders: every token of a text sees all of it, or a window on both sides; or those before it alone, of
decoders that keep nothing. There is no cache.

`plan_encoder` once a step, `attend` of the plan in every layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from app.kernels.kernel_table import HOPPER, TRITON, Candidate, Kernel, KernelTable

# What is added to scaled scores: of queries and keys [n, H, L, D] -> [n or 1, H, L, L].
ScoreBias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class EncoderPlan(ABC):
    """One step's texts, as a kernel wants them: text r has the tokens starts[r] .. starts[r + 1] - 1."""

    @abstractmethod
    def __init__(self, starts: list[int], device: torch.device, *, is_causal: bool = False) -> None:
        """`is_causal`: all its layers attend so."""

    @abstractmethod
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
        """Attention within each text: query [T, H, D], key and value [T, Hkv, D] -> [T, H, D].

        With a `window`, a token sees only those fewer than `window` places away, on both sides; where it `is_causal`,
        none behind itself; `bias` gives what is added to the scores of a group of texts; `seen` [T], bool: tokens
        without it are no keys (one of each text has it).
        """


class TiledPlan(EncoderPlan):
    """A plan that is a list of tiles on the device, which in a captured step may be any step's."""

    tiles: torch.Tensor  # int32 [tiles, 3]: a text's first row, its length, the tile's first token; zeros pad


@dataclass(slots=True, frozen=True)
class Sight:
    """Says which keys a token sees, and how its scores are scaled."""

    scale: float
    window: int | None = None  # fewer places away, on both sides
    seen: torch.Tensor | None = None  # bool [T]: tokens without it are no keys
    is_causal: bool = False  # none behind the token itself


# (query, key, value, out, tiles, sight): writes out [T, H, D] of the texts that `tiles` lists; it serves (query, key,
# value, sight).
TileKernel = Kernel[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sight],
    bool,
    Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sight], None],
]
TILE_KERNELS: KernelTable[TileKernel] = KernelTable(
    "attention within texts by tiles",
    Candidate("app.kernels.attention.gluon_texts:KERNEL", HOPPER),
    Candidate("app.kernels.attention.triton_encoder:KERNEL"),
)

ENCODER_PLANS: KernelTable[type[EncoderPlan]] = KernelTable(
    "attention of encoders",
    Candidate("app.kernels.attention.triton_encoder:TilePlan", TRITON),
    Candidate("app.kernels.attention.encoder_groups:GroupPlan"),
)


def plan_encoder(starts: list[int], device: torch.device, *, is_causal: bool = False) -> EncoderPlan:
    """The plan of a step by the best kernel of the device."""
    return ENCODER_PLANS.on(device)(starts, device, is_causal=is_causal)


def naive_encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: list[int],
    scale: float,
    window: int | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """The same as `attend` of a plan, text by text in fp32: tests compare with it."""
    out = torch.empty_like(query)
    for start, end in pairwise(starts):
        q, k, v = (x[start:end].float().transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(1, 2) * scale
        places = torch.arange(end - start, device=q.device)
        apart = places[:, None] - places
        if window is not None:
            scores = scores.masked_fill(apart.abs() >= window, float("-inf"))
        if is_causal:
            scores = scores.masked_fill(apart < 0, float("-inf"))
        probs = scores.softmax(-1)
        out[start:end] = (probs @ v).transpose(0, 1).to(query.dtype)
    return out
