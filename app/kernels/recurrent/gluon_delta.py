"""Gated delta nets over many tokens on Hopper GPUs: launches of `gluon_delta_chunks` and `gluon_delta_scan`."""

from __future__ import annotations

from dataclasses import replace

import torch

from app.kernels.kernel_table import Kernel
from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, StateStep
from app.kernels.recurrent.delta_tiles import DeltaTiles
from app.kernels.recurrent.gluon_delta_chunks import descriptor, solve_chunks
from app.kernels.recurrent.gluon_delta_scan import scan_chunks
from app.kernels.recurrent.triton_gated_norm import write_gated_norm

_ALIGNED = 16  # bytes: the copy engine's


def serves(mixed: torch.Tensor, heads: DeltaHeads) -> bool:
    """True if the shapes suit: 16 bits, heads of whole panels, rows where the copy engine finds them."""
    return (
        mixed.dtype in (torch.bfloat16, torch.float16)
        and heads.key_dim == 128
        and heads.value_dim in (64, 128)
        and mixed.stride(0) * mixed.element_size() % _ALIGNED == 0
        and mixed.data_ptr() % _ALIGNED == 0
    )


def delta_chunks(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
    out: torch.Tensor,
) -> None:
    """The same as `triton_delta_chunks.delta_chunks`, where `serves` agrees."""
    base = step.num_short * step.short_len
    found = DeltaTiles.of(mixed, heads, step)
    rows, tiles = descriptor(mixed), descriptor(found.tiles)
    results = out[base:].view(-1, heads.num_values, heads.value_dim)
    solve_chunks(rows, tiles, found.factors, heads, gates, step)
    scan_chunks(rows, tiles, found.factors, heads, states, step, results)
    write_gated_norm(results, replace(norm, gate=norm.gate[base:]), results)


KERNEL = Kernel(serves, delta_chunks)
