"""Products whose sums are cut into `LEAVES` parts of equal size, which are added two neighbours at a time: the bits are
the same whether one rank makes all parts or several make some of them each (`deterministic: batch_and_layout`).

A rank holds neighbouring leaves, as many as a power of two, so that what it adds up is a whole branch of the tree; the
branches of all ranks are added in the same way. Leaves are summed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.kernels.gemm.fixed_rows import linear
from app.kernels.kernel_table import HOPPER, HOST, Candidate, KernelTable

LEAVES = 4  # of a product's inputs: so many ranks may share them

# (x [T, L k], leaves [L, N, k] of a weight [N, L k], bias [N] or None, dtype) -> x W^T + bias, [T, N] in this dtype,
# rounded once: the tree over the L leaves, the bias in its first.
LeafProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]
LEAF_PRODUCTS: KernelTable[LeafProduct] = KernelTable(
    "products over leaves",
    Candidate("app.kernels.gemm.leaves:sum_leaves", HOST, is_exact=True),
    Candidate("app.kernels.gemm.triton_fixed:sum_leaves", HOPPER, is_exact=True),
)


def cut(weight: torch.Tensor, num_leaves: int) -> torch.Tensor:
    """weight [N, L k] -> its L leaves, [L, N, k] contiguous."""
    return weight.view(len(weight), num_leaves, -1).transpose(0, 1).contiguous()


def add_neighbours(parts: torch.Tensor) -> torch.Tensor:
    """fp32 [n, ...], n a power of two -> their sum [...]: two neighbours at a time, until one is left."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def sum_leaves(x: torch.Tensor, leaves: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A LeafProduct on a CPU, each leaf rounded to the dtype of x by the library that makes it."""
    parts = torch.stack([linear(rows, leaf, None) for rows, leaf in zip(x.chunk(len(leaves), 1), leaves, strict=True)])
    parts = parts.float()
    if bias is not None:
        parts[0] += bias
    return add_neighbours(parts).to(dtype)
