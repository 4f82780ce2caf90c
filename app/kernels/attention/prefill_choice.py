"""Which prefill kernel runs: the first of `PREFILL_ORDER` that serves the step. `python -m benchmarks.kernels` times
them side by side; the order says what measured best."""

from __future__ import annotations

import torch

from app.kernels.attention import (
    AttentionMetadata,
    cudnn_prefill,
    gluon_prefill,
    triton_prefill,
    triton_prefill_descriptors,
)

# "paged" serves every step and comes last. To try others: ("gluon", "cudnn", "descriptors", "paged").
PREFILL_ORDER: tuple[str, ...] = ("paged",)


def prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write the rows of out [T, Hq, D] of the requests from num_decodes on."""
    for name in PREFILL_ORDER:
        if name == "gluon" and gluon_prefill.serves(query, kv_cache, sliding_window, soft_cap):
            gluon_prefill.prefill(query, kv_cache, meta, out, scale=scale)
            return
        if name == "cudnn" and cudnn_prefill.serves(query, kv_cache, meta, sliding_window, soft_cap):
            cudnn_prefill.prefill(query, kv_cache, meta, out, scale=scale)
            return
        half = query.dtype != torch.float32  # full fp32 tiles do not fit beside each other
        if name == "descriptors" and half and triton_prefill_descriptors.serves(query, kv_cache, meta):
            triton_prefill_descriptors.prefill(
                query, kv_cache, meta, out,
                scale=scale, sliding_window=sliding_window, soft_cap=soft_cap,
            )  # fmt: skip
            return
    triton_prefill.prefill(
        query, kv_cache, meta, out,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, kv_scales=kv_scales,
    )  # fmt: skip
