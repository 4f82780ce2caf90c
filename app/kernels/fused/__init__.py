"""Fused elementwise kernels of a decoder layer: the contract that every device keeps.

On a GPU a layer is a handful of large products and attention, and what lies between them is bound by launches in a
small batch and by memory in a large one; each function here is one launch that reads and writes every value once.
Arithmetic is in fp32 and each result is rounded once. Nothing depends on a value on the device or waits for it, so all
of it can be captured in a CUDA graph. `reference.py` is the plain PyTorch truth and the CPU path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from app.kernels.attention import HeadNorm
from app.kernels.kernel_table import HOST, TRITON, Candidate, KernelTable

# GELU (Hendrycks and Gimpel, 2016) exactly, and by its approximation with tanh.
GatedActivation = Literal["silu", "gelu", "gelu_tanh"]
PlainActivation = GatedActivation | Literal["relu2"]  # of a layer without a gate; relu2: max(x, 0)^2 (So et al., 2021)


@dataclass(slots=True, frozen=True)
class LatentRotation:
    """Holds what a step's latents and the rotating part of its queries go through (multi-head latent attention)."""

    cos: torch.Tensor  # [T, 1, Dr]
    sin: torch.Tensor  # [T, 1, Dr], the first half negated
    interleaved: bool  # the dimensions that rotate together lie in pairs; what comes out has them in halves
    norm_weight: torch.Tensor  # [R], of the RMS norm of the latents
    eps: float


@dataclass(slots=True, frozen=True)
class RankBoxes:
    """One rank's end of the boxes in which the ranks of a host leave each other their parts of sums."""

    rank: int
    addresses: torch.Tensor  # int64 [ranks], of every rank's boxes, as this process has them mapped
    words: torch.Tensor  # this rank's boxes, int64 [sets, ranks, words of a box], zero at first
    clock: torch.Tensor  # int32 [2], zero at first: sums so far, and programs that are done with the current one
    mapped: tuple[torch.Tensor, ...] = ()  # all ranks' boxes, which must stay mapped

    @property
    def num_ranks(self) -> int:
        """The ranks."""
        return self.words.shape[1]


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    keeps_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """PyTorch's own of the sum."""
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total if keeps_sum else None


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """PyTorch's own product of x and a gate's sigmoid."""
    return x * torch.sigmoid(gate)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """PyTorch's own."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class AddLayerNorm(Protocol):
    """The residual stream between two blocks whose norms are layer norms."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        *,
        keeps_sum: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x, residual [T, C], weight and bias [C] -> (layer_norm(s) * weight + bias, s), s = x + residual, rounded;
        without `keeps_sum` None in its place."""


class AddRMSNorm(Protocol):
    """The residual stream between two blocks."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        input_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, C], weights [C] -> (rms_norm(s) * weight, s) with s = x + residual; without a weight (s, s).

        With an `input_weight` x is normed first, and rounded: s = rms_norm(x) * input_weight + residual.
        """


SumAddNorm = Callable[
    [RankBoxes, torch.Tensor, torch.Tensor, torch.Tensor, float], "tuple[torch.Tensor, torch.Tensor] | None"
]


@dataclass(slots=True, frozen=True)
class FusedOps:
    """One implementation."""

    add_rms_norm: AddRMSNorm
    # (heads [T, Hq + 2 Hkv, D], cos [T, 1, Dr], sin [T, 1, Dr], norm, kv_cache [B, 2, Hkv, S, D], slots int64 [T],
    # kv_scales) -> queries [T, Hq, D]. `heads` holds a token's queries, keys and values side by side. Queries and keys
    # are normalised (norm None: not), then their first Dr dimensions are rotated: x * cos + roll(x, Dr / 2) * sin, so
    # the first half of sin is negated. Keys and values go into the cache at the tokens' slots; a slot of -1 stores
    # nothing. A quantized cache comes with kv_scales fp32 [2, Hkv] (see app/kernels/attention), another with None.
    rotate_and_write: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, HeadNorm | None, torch.Tensor, torch.Tensor, torch.Tensor | None],
        torch.Tensor,
    ]
    # (heads [T, H, D], cos, sin, norm, number of queries): rotates them in place, as above; the first are queries, the
    # others keys.
    rotate_heads: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadNorm | None, int], None]
    # (query [T, H, Dr], latent [T, R + Dr], rotation, cache [B, S, R + Dr], slots int64 [T], scale, out [T, H, Dr]).
    # Queries are rotated into `out`, which may be `query` itself. The first R numbers of a latent are normalised, the
    # others rotated as one more head; it goes into the cache at the token's slot, where -1 stores nothing. A quantized
    # cache comes with a scale fp32 [1], another with None.
    rotate_and_write_latent: Callable[
        [
            torch.Tensor,
            torch.Tensor,
            LatentRotation,
            torch.Tensor,
            torch.Tensor,
            torch.Tensor | None,
            torch.Tensor,
        ],
        None,
    ]
    # gate and up side by side [T, 2 I] -> activation(gate) * up [T, I]
    act_and_mul: Callable[[torch.Tensor, GatedActivation], torch.Tensor]
    # (x [..., C], weight [C] in the type of x or fp32, eps) -> x / rms(x) * weight, in the type of x
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    # Functions of every number of a tensor; PyTorch's own, where nobody asks what a neighbour changes.
    sigmoid: Callable[[torch.Tensor], torch.Tensor] = torch.sigmoid
    tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    # (x [T, N], gate [T, N]) -> x * sigmoid(gate), rounded before the product, too
    times_sigmoid: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = times_sigmoid
    add_layer_norm: AddLayerNorm = add_layer_norm
    # (x [T, C], weight [C], bias [C] or None, eps) -> layer_norm(x) * weight + bias
    layer_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor] = layer_norm
    # (boxes, y [T, C] of which each rank has a part, residual [T, C], weight [C], eps) -> add_rms_norm of their sum, in
    # one launch; None: not such a y. Collective. None: there is no such kernel.
    sum_add_norm: SumAddNorm | None = None
    # The activation of every number, where a neighbour must not tell; None: PyTorch's own does.
    activate: Callable[[torch.Tensor, PlainActivation], torch.Tensor] | None = None


FUSED_OPS: KernelTable[FusedOps] = KernelTable(
    "fused kernels",
    Candidate("app.kernels.fused.exact:OPS", HOST, is_exact=True),
    Candidate("app.kernels.fused.triton_ops:OPS", TRITON, is_exact=True),
    Candidate("app.kernels.fused.triton_ops:OPS", TRITON),
    Candidate("app.kernels.fused.reference:OPS"),
)
