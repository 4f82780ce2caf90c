"""Packed weights of few bits: what is stored in tiles (stored.py), and its products.

A GPU multiplies few rows by the codes themselves; so does a CPU by those of which it has a kernel (`TILED_KERNELS`),
which wants them in an order of its own. Elsewhere, and for many rows, some rows of the weight at a time are turned into
numbers for a plain product, so that no whole copy of them is made (but for plain_bytes.py's).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from app.kernels.gemm import LinearOps, PackedInputs, PackedWeight, materialize
from app.kernels.gemm.stored import StoredTiles
from app.kernels.kernel_table import HOST, TRITON, Candidate, KernelTable

# Numbers made at a time: what stays in the caches until they are multiplied.
_ELEMENTS = {"cpu": 1 << 20}
_MOST_ELEMENTS = 1 << 24
# A GPU's parts have a multiple of so many rows: products of fewer leave multiprocessors idle. Llama-8B's down
# projection of 4 bits took 444 us in parts of 1,168 rows, 391 in parts of 2,048 (2,048 tokens; 8,192: 1,490, 1,419).
_ROWS = {"cpu": 16}
_GPU_ROWS = 2048

TILED_OPS: KernelTable[LinearOps[Any]] = KernelTable(
    "products of packed weights", Candidate("app.kernels.gemm.triton_packed_ops:OPS", TRITON)
)  # where there are none, what follows a product is a launch of its own
# (weight, first row, row behind the last, type) -> those rows [n, K]
Dequantize = Callable[[StoredTiles, int, int, torch.dtype], torch.Tensor]
DEQUANTIZE: KernelTable[Dequantize] = KernelTable(
    "dequantized weights",
    Candidate("app.kernels.gemm.triton_dequantize:dequantized", TRITON),
    Candidate("app.kernels.gemm.tiled:dequantized"),
)


def dequantized(stored: StoredTiles, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows start..stop in plain PyTorch."""
    return stored.dequantize(start, stop).to(dtype)


def linear(
    x: torch.Tensor, stored: StoredTiles, bias: torch.Tensor | None, dequantize: Dequantize = dequantized
) -> torch.Tensor:
    """x [T, K] -> x W^T + bias, [T, N], in the dtype of x, by plain products."""
    out = torch.empty(len(x), len(stored.words), dtype=x.dtype, device=x.device)
    for start, stop in parts(stored):
        torch.mm(x, dequantize(stored, start, stop, x.dtype).t(), out=out[:, start:stop])
    return out if bias is None else out.add_(bias)


def parts(stored: StoredTiles) -> Iterator[tuple[int, int]]:
    """First row and row behind the last of what is made into numbers at a time."""
    columns, size = stored.shape
    device = stored.words.device.type
    rows = _ROWS.get(device, _GPU_ROWS)
    step = max(1, round(_ELEMENTS.get(device, _MOST_ELEMENTS) / (size * rows))) * rows
    for start in range(0, columns, step):
        yield start, min(columns, start + step)


class TiledWeight(PackedWeight):
    """A `PackedWeight` of stored tiles."""

    __slots__ = ()

    @property
    @abstractmethod
    def stored(self) -> StoredTiles:
        """Its codes and scales."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.stored.shape

    def ops_on(self, device: torch.device) -> LinearOps[Any] | None:
        """Those of the device, if it has any."""
        return next(iter(TILED_OPS.all_on(device)), None)

    @property
    def keeps_inputs(self) -> bool:
        """True if its columns lie in the order of x's."""
        return True

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] with its columns as the stored weight has them."""
        return x

    def linear(self, x: PackedInputs, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N], in the dtype of x; any number of rows."""
        return linear(self.inputs(materialize(x)), self.stored, bias, DEQUANTIZE.on(x.device))

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32 [N, K]: the truth."""
        return self.stored.dequantize()


# A weight in the order of a library's products, for a model that computes in a type; None: see gemm.Pack.
PackStored = Callable[[PackedWeight, torch.dtype], PackedWeight | None]
TILED_KERNELS: KernelTable[PackStored] = KernelTable(
    "packed products of stored weights",
    Candidate("app.kernels.gemm.onednn_int8:pack", HOST),
    Candidate("app.kernels.gemm.aten_int4:pack", HOST),
    Candidate("app.kernels.gemm.plain_bytes:pack", HOST),
)


def fastest(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    """The weight for the first kernel that serves it; as it is where none does."""
    if not isinstance(weight, TiledWeight):
        return weight
    packed = (pack(weight, dtype) for pack in TILED_KERNELS.all_on(weight.stored.words.device))
    return next((one for one in packed if one is not None), weight)
