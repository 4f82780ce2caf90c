"""Layers that keep a state of a request instead of its tokens: the contract that every device keeps.

A state has a fixed size, however long the request is. Each kind is one tensor per layer, [slots, ...]; a running
request's slot is its row. A request's tokens of a step go through the layer in their order, from the state that the
tokens before them left, which is overwritten with what is left behind them. There is no prefill or decode mode (I1).
Where a request begins, its state is zeros, whatever its slot holds; a row that only pads has no slot, and neither
reads nor writes any. No row's result depends on its neighbours. States of recurrences are fp32; arithmetic is
fp32 but for operands of products, which have the model's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.kernel_table import TRITON, Candidate, KernelTable
from app.platforms.to_device import to_device

CHUNK = 64  # tokens that a scan takes at a time


@dataclass(slots=True, frozen=True)
class StateStep:
    """Says where a step's T tokens and its R requests' states lie; made once for all layers."""

    starts: torch.Tensor  # int32 [R + 1], where the tokens of each begin
    slots: torch.Tensor  # int32 [R], where each one's state is left; -1: nowhere, the row pads
    sources: torch.Tensor  # int32 [R], where it is read; -1: it is zeros
    row_of_token: torch.Tensor  # int32 [T]
    num_short: int  # the first so many requests bring `short_len` tokens each, the others any number
    short_len: int
    chunks: torch.Tensor  # int32 [N, 2] the others' tokens in chunks: the first of each, and the end of its request
    # int32 [R]: only so many of each one's tokens, from the first on, at least one, go through its state, and what the
    # layer gives of the others is of no use; all requests are short ones then. None: all tokens do.
    counts: torch.Tensor | None = None
    drafts: DraftedRows | None = None  # the requests of which some of these tokens are drafts; None: there are none

    @classmethod
    def of(cls, meta: AttentionMetadata, room: DraftRoom | None = None) -> StateStep:
        """The states of a step's requests. Where drafts are among the tokens, it is not known yet how far a state is to
        go on: it is left as it is, until `DraftedRows.accepted` says so. `room`: of a stage that hears it later."""
        assert meta.rows is not None, "the step's maker names its rows"
        starts, num_tokens, num_rows = meta.query_start_loc, len(meta.slot_mapping), len(meta.seq_lens)
        counts, device = starts.diff(), starts.device
        if meta.holds_prompts:  # rows behind the last token have none
            is_live = (meta.slot_mapping[starts[:-1].clamp(max=num_tokens - 1)] >= 0) & (counts > 0)
        else:
            is_live = meta.slot_mapping.index_select(0, starts[:-1]) >= 0
        is_even = meta.is_static and not meta.holds_prompts
        short_len = meta.max_query_len if is_even else 1
        num_short = num_rows if is_even else meta.num_decodes
        if num_tokens == num_short * short_len:
            of_token = torch.arange(num_tokens, dtype=torch.int32, device=device) // short_len
        else:
            rows = torch.arange(num_rows, dtype=torch.int32, device=device)
            of_token = torch.repeat_interleave(rows, counts.long(), output_size=num_tokens)
        slots = torch.where(is_live, meta.rows, -1)
        sources = torch.where(meta.seq_lens == counts, -1, slots)
        drafts = DraftedRows.of(meta, slots, sources)
        if drafts is not None and room is not None:
            drafts = replace(drafts, places=room.places(drafts))
        return cls(
            starts=starts,
            slots=slots if drafts is None else drafts.without(slots),
            sources=sources,
            row_of_token=of_token,
            num_short=num_short,
            short_len=short_len,
            chunks=_static_chunks(meta) if meta.holds_prompts else _chunks(meta, num_short, device),
            drafts=drafts,
        )

    @property
    def ends(self) -> torch.Tensor:
        """int32 [R], behind the last token of each that goes through its state."""
        return self.starts[1:] if self.counts is None else self.starts[:-1] + self.counts

    @property
    def num_long(self) -> int:
        """Requests behind the short ones."""
        return len(self.slots) - self.num_short


def _chunks(meta: AttentionMetadata, first_row: int, device: torch.device) -> torch.Tensor:
    if first_row == len(meta.seq_lens):
        return torch.empty(0, 2, dtype=torch.int32, device=device)
    assert meta.host_starts is not None, "a step with prompts is made on the host"
    begins, ends = meta.host_starts[first_row:-1], meta.host_starts[first_row + 1 :]
    counts = -(-(ends - begins) // CHUNK)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = np.repeat(begins, counts) + CHUNK * within
    return to_device(np.stack((firsts, np.repeat(ends, counts)), axis=1).astype(np.int32), device)


def _static_chunks(meta: AttentionMetadata) -> torch.Tensor:
    """Makes as many as there can be, on the device; those behind the step's last one have no tokens."""
    starts, most = meta.query_start_loc[meta.num_decodes :], len(meta.slot_mapping) - meta.num_decodes
    counts = (starts.diff() + (CHUNK - 1)) // CHUNK
    ends = counts.cumsum(0)
    numbers = torch.arange(most // CHUNK + len(counts), device=starts.device)
    rows = torch.searchsorted(ends, numbers, right=True).clamp_(max=len(counts) - 1)
    firsts = starts[rows] + CHUNK * (numbers - (ends - counts)[rows])
    behind = starts[rows + 1]
    return torch.stack((torch.minimum(firsts, behind), behind), dim=1).int()


@dataclass(slots=True, frozen=True)
class DraftRoom:
    """Says where what goes into states of tokens with drafts is kept by rows, since other steps come before it is known
    which of them stay: each row has as many places, and one row more is that of rows that only pad."""

    num_rows: int
    each: int  # places of a row

    @property
    def num_places(self) -> int:
        """Returns how many all have."""
        return (self.num_rows + 1) * self.each

    def places(self, drafts: DraftedRows) -> torch.Tensor:
        """int64 [D * length], for the tokens of a step's requests with drafts."""
        firsts = torch.remainder(drafts.slots.long(), self.num_rows + 1) * self.each
        return (firsts[:, None] + torch.arange(drafts.length, device=firsts.device)).flatten()

    def accepted(self, rows: torch.Tensor, num_tokens: torch.Tensor) -> StateStep:
        """The step in which so many int64 [D] of the tokens of rows int64 [D] go through their states. They had drafts,
        so they had tokens before these."""
        slots = rows.int()
        return DraftedRows(slots, slots, self.each).accepted(num_tokens)


@dataclass(slots=True, frozen=True)
class DraftedRows:
    """The D requests of a step whose tokens are one that is known and drafts behind it.

    A state cannot be taken back behind a draft that was wrong. So a layer keeps what goes into its state of their
    tokens, and once it is known how many of them stay, just these go through it, from where it was (as vLLM's
    ReplaySSM, which does so a step later).
    """

    slots: torch.Tensor  # int32 [D], as of StateStep
    sources: torch.Tensor  # int32 [D], as of StateStep
    length: int  # the most tokens that one of them brings
    # int64 [D * length] those of the step's tokens that are theirs: as many for each, the last one repeated; None: all
    # tokens of the step, of which each request has `length`.
    tokens: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # int64 [D] which of the step's requests they are; None: all
    places: torch.Tensor | None = None  # int64 [D * length] where they are kept; None: one behind the other

    @classmethod
    def of(cls, meta: AttentionMetadata, slots: torch.Tensor, sources: torch.Tensor) -> DraftedRows | None:
        """Those of a step; None: no request has drafts."""
        if meta.is_static and not meta.holds_prompts:
            return cls(slots, sources, meta.max_query_len) if meta.max_query_len > 1 else None
        if meta.drafted is None:
            return None
        assert meta.host_starts is not None, "a step with prompts is made on the host"
        begins, ends = meta.host_starts[meta.drafted], meta.host_starts[meta.drafted + 1]
        length = int((ends - begins).max())
        tokens = np.minimum(begins[:, None] + np.arange(length), ends[:, None] - 1)
        rows = to_device(meta.drafted, slots.device)
        return cls(slots[rows], sources[rows], length, to_device(tokens.ravel(), slots.device), rows)

    def without(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots int32 [R] of all requests of the step: none for these."""
        if self.rows is None:
            return torch.full_like(slots, -1)
        return slots.index_fill(0, self.rows, -1)

    def accepted(self, num_tokens: torch.Tensor) -> StateStep:
        """The step in which so many int64 [D'] tokens of each of the first D' requests go through their states: each
        has `length` places for them."""
        count = len(num_tokens)
        new = partial(torch.arange, dtype=torch.int32, device=num_tokens.device)
        return StateStep(
            starts=new(count + 1) * self.length,
            slots=self.slots[:count],
            sources=self.sources[:count],
            row_of_token=new(count * self.length) // self.length,
            num_short=count,
            short_len=self.length,
            chunks=self.slots.new_empty(0, 2),
            counts=num_tokens.int(),
        )


@dataclass(slots=True, frozen=True)
class DeltaHeads:
    """The heads of a gated delta net on this rank; each key head serves Hv / Hk value heads."""

    num_keys: int  # Hk
    num_values: int  # Hv
    key_dim: int  # Dk
    value_dim: int  # Dv

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values."""
        return self.num_keys * self.key_dim, self.num_keys * self.key_dim, self.num_values * self.value_dim


@dataclass(slots=True, frozen=True)
class DeltaGates:
    """Holds what decides how much of the state a token keeps and changes, of Hv heads; in `channel_delta` a and dt_bias
    are of Hv Dk channels.

    A token's decay is exp(-exp(a_log) softplus(a + dt_bias)), its rate sigmoid(b) times `rate_scale`.
    """

    a: torch.Tensor  # [T, Hv]
    b: torch.Tensor  # [T, Hv]
    a_log: torch.Tensor  # fp32 [Hv]
    dt_bias: torch.Tensor  # fp32 [Hv]
    rate_scale: float = 1.0  # of decays by head; 2: what a token corrects may change its sign (Grazzi et al., 2024)


@dataclass(slots=True, frozen=True)
class GatedNorm:
    """An RMS norm of each head or group of D channels, and silu of a gate; `sigmoid`: the gate's sigmoid instead."""

    gate: torch.Tensor  # [T, G * D]
    weight: torch.Tensor  # [D] for all groups, or [G * D]
    eps: float
    norms_first: bool = True  # and is then gated; else what is gated is normed
    sigmoid: bool = False


@dataclass(slots=True, frozen=True)
class SpaceInputs:
    """Holds what a selective state space reads: H heads of P numbers, of which H / G share a group's B and C of N.

    The state h [P, N] of a head becomes exp(A dt) h + dt x B^T, and gives h C + D x; dt is softplus(dt + dt_bias),
    clamped to `dt_limit`, and A is -exp(a_log).
    """

    x: torch.Tensor  # [T, H, P]
    b: torch.Tensor  # [T, G, N]
    c: torch.Tensor  # [T, G, N]
    dt: torch.Tensor  # [T, H]
    a_log: torch.Tensor  # fp32 [H]
    d: torch.Tensor  # fp32 [H]
    dt_bias: torch.Tensor  # fp32 [H]
    dt_limit: tuple[float, float] = (0.0, float("inf"))


@dataclass(slots=True, frozen=True)
class ScanInputs:
    """The same where each channel is a head of its own and decays differently in each of N states (Mamba 1)."""

    x: torch.Tensor  # [T, D]
    b: torch.Tensor  # [T, N]
    c: torch.Tensor  # [T, N]
    dt: torch.Tensor  # [T, D]
    a_log: torch.Tensor  # fp32 [D, N]
    d: torch.Tensor  # fp32 [D]
    dt_bias: torch.Tensor  # fp32 [D]


@dataclass(slots=True, frozen=True)
class RecurrentOps:
    """One implementation. Rows of x lie in one piece, at any distance from each other."""

    # (x [T, C], weight [C, W], bias [C] or None, states [slots, W - 1, C], step, *, activate) -> [T, C]: each channel's
    # sum over its last W tokens, the newest last in `weight`; states hold the last W - 1 of them. `activate`: silu.
    causal_conv: Callable[..., torch.Tensor]
    # (mixed [T, 2 Hk Dk + Hv Dv]: queries, keys, values, heads, gates, norm, states fp32 [slots, Hv, Dv, Dk], step)
    # -> [T, Hv * Dv]: Gated Delta Networks (Yang et al., 2024), of normed queries and keys
    gated_delta: Callable[..., torch.Tensor]
    # The same where each key channel decays by itself, and Hk = Hv: Kimi Delta Attention (arXiv 2510.26692)
    channel_delta: Callable[..., torch.Tensor]
    # (inputs: SpaceInputs, states fp32 [slots, H, P, N], step) -> [T, H, P]: Mamba 2 (Dao and Gu, 2024)
    state_space: Callable[..., torch.Tensor]
    # (inputs: ScanInputs, states fp32 [slots, D, N], step) -> [T, D]: Mamba (Gu and Dao, 2023)
    selective_scan: Callable[..., torch.Tensor]
    # (x [T, G, D], norm: GatedNorm) -> [T, G * D] in the gate's type
    gated_norm: Callable[..., torch.Tensor]


RECURRENT_OPS: KernelTable[RecurrentOps] = KernelTable(
    "recurrent layers",
    Candidate("app.kernels.recurrent.triton_ops:OPS", TRITON),
    Candidate("app.kernels.recurrent.torch_ops:OPS"),
)
