"""Calls of products, as models' layers make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from app.kernels.gemm import (
    DeferredNorm,
    NumberKind,
    plain,
    triton_dequantize,
    triton_packed_ops,
    triton_quantize,
    triton_small,
    wide,
)
from app.kernels.gemm.gluon_int8 import wide_int8_product
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.stored import StoredTiles, bits_of, block_for
from app.kernels.gemm.triton_int8 import Int8Tile, int8_product
from tests.kernels.target_gpu import IS_AMD, zeros


def linear(hidden: int, attended: int, projected: int, intermediate: int) -> None:
    """A layer's products of few rows, as `linear_add_norm` chains them; gate and up of normal rows, biases, a head."""
    for rows in (1, 32, 64):
        for out, size in ((hidden, attended), (hidden, intermediate)):
            x, weight = zeros(rows, size), zeros(out, size)
            deferred, total = triton_small.linear_add_norm(x, weight, None, zeros(rows, out), weight[:, 0], 1e-6, True)
            triton_small.linear_add_norm(x, weight, weight[0, :1].expand(out), total, weight[:, 0], 1e-6, False)
            assert isinstance(deferred, DeferredNorm)
        triton_small.linear(deferred, zeros(projected, hidden), None)
        triton_small.linear(deferred, zeros(1, hidden), None)  # the gate of a shared expert
        triton_small.linear(deferred, zeros(projected, hidden), zeros(projected))
        triton_small.gated_linear(deferred, zeros(2 * intermediate, hidden), None, "silu")
        triton_small.gated_linear(total, zeros(2 * intermediate, hidden), None, "silu")
        triton_small.activated_linear(deferred, zeros(intermediate, hidden), None, "relu2")
        triton_small.linear(total, zeros(151_936, hidden), None)
    triton_small.gated_linear(zeros(128, hidden), zeros(2 * intermediate, hidden), None, "silu")
    triton_small.activated_linear(zeros(128, hidden), zeros(intermediate, hidden), None, "relu2")


def early_linear(hidden: int, attended: int, projected: int, intermediate: int) -> None:
    """The same of large weights, whose first blocks come before their rows, of all heights."""
    with mock.patch.object(plain, "multiprocessors", return_value=132):
        for rows in (1, 9, 32):
            x, norm = zeros(rows, attended), zeros(hidden)
            normed, total = plain.linear_add_norm(
                x, zeros(hidden, attended), None, zeros(rows, hidden), norm, 1e-6, True
            )
            gated = plain.gated_linear(normed, zeros(2 * intermediate, hidden), None, "silu")
            bias = zeros(hidden)
            normed, _ = plain.linear_add_norm(gated, zeros(hidden, intermediate), bias, total, norm, 1e-6, True)
            plain.linear(normed, zeros(projected, hidden), zeros(projected))


def quantizing() -> None:
    """Activations of products of 8 bits, as a norm's numbers too; and those products of many rows."""
    for kind, by_blocks in (("e4m3", False), ("e4m3", True), ("int8", False)):
        triton_quantize.quantize(zeros(4, 14336), kind, by_blocks=by_blocks)
        x, numbers = zeros(4, 4096), NumberKind(kind, by_blocks)
        triton_quantize.add_norm_quantize(x, x, x[0], 1e-6, numbers)
    quantized = torch.zeros(4, 4096, dtype=torch.int8)
    weight = Int8Weight.of(torch.zeros(64, 4096, dtype=torch.int8), torch.ones(64, 1))
    if not IS_AMD:
        for tile in (Int8Tile(128, 256, 128, 8, 4), Int8Tile(64, 128, 128, 4, 4)):
            int8_product(quantized, torch.zeros(4, 1), weight, None, torch.bfloat16, tile)
        wide_int8_product(quantized, torch.zeros(4, 1), weight, zeros(64), torch.bfloat16)


def packed(form: str, size: int, group: int, *, is_zero_based: bool = False, scale_rows: int = 1) -> None:
    """Products of few rows with weights of a form, as a layer chains them."""
    columns, block = 2048, block_for(form, group)
    words = torch.zeros(columns, size * bits_of(form) // 16, dtype=torch.int16)
    scales = zeros(max(1, size // group), columns // scale_rows)
    table = zeros(16) if form == "table" else None
    offsets = scales if is_zero_based else None
    weight = StoredTiles(form, words, scales, offsets, table, size, block, group, scale_rows)
    for shape in ((16, 8, 8), (32, 4, 2)) if not IS_AMD and bits_of(form) == 4 else ():
        x, streamed = zeros(1, size), triton_packed_ops.StreamedTile(*shape)
        norm = (zeros(columns), 1e-6)
        triton_packed_ops.packed_linear(x, weight, None, streamed, residual=zeros(1, columns), norm=norm)
        deferred = DeferredNorm(x, torch.zeros(1, 64), 1e-6)
        triton_packed_ops.packed_linear(deferred, weight, zeros(columns), streamed, activation="silu")
    for rows in (1, 32, 64, *((256, 512) if form == "nibble" and not is_zero_based else ())):
        x = zeros(rows, size)
        tile = triton_packed_ops.tile_for(rows, weight)
        assert tile is not None
        how = {"residual": zeros(rows, columns), "norm": (zeros(columns), 1e-6)}
        triton_packed_ops.packed_linear(x, weight, None, tile, **how)
        deferred = DeferredNorm(x, torch.zeros(rows, 64), 1e-6)
        triton_packed_ops.packed_linear(deferred, weight, zeros(columns), tile, activation="silu")
        triton_packed_ops.packed_linear(deferred, weight, None, tile, is_beside=True)
    if not IS_AMD and wide.serves(weight):
        for tall in (wide.WideTile(64, 3, 2), wide.WideTile(256, 2)):
            x = zeros(200, size)
            residual, norm = zeros(200, columns), (zeros(columns), 1e-6)
            wide.wide_linear(x, weight, zeros(columns), tall, residual=residual, norm=norm)
            wide.wide_linear(DeferredNorm(x, torch.zeros(200, 64), 1e-6), weight, None, tall, activation="silu")
    triton_dequantize.dequantized(weight, 0, 64, torch.bfloat16)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    found: list[Callable[[], None]] = [
        partial(linear, 1024, 2048, 4096, 3072),
        partial(linear, 4096, 4096, 6144, 14336),
        quantizing,
        partial(packed, "nibble", 4096, 128, is_zero_based=True),
        partial(packed, "nibble", 4096, 32),
        partial(packed, "e2m1", 2048, 16),
        partial(packed, "table", 2048, 64),
        partial(packed, "int8", 4096, 4096),
        partial(packed, "e4m3", 4096, 128, scale_rows=128),
    ]
    if not IS_AMD:
        found += [partial(early_linear, 2560, 4096, 12_352, 9216), partial(early_linear, 2560, 4800, 16_384, 5760)]
    return found
