"""Ranks that leave each other parts of sums, as processes: every sum is that of torch, in eager steps and in graphs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from app.distributed.parallel_groups import RankGroup
from app.distributed.process_groups import connect_store, join_groups
from app.distributed.rank_boxes import empty_boxes, make_boxes
from app.kernels.fused.reference import add_rms_norm
from benchmarks.all_reduce import run_ranks

EPS, COLUMNS = 1e-5, 1536


def whole(group: RankGroup, y: torch.Tensor) -> torch.Tensor:
    """The sum in the order of the ranks."""
    parts = [torch.empty_like(y) for _ in range(group.size)]
    dist.all_gather(parts, y, group=group.handle)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(y.dtype)


def sum_up(rank: int, ranks: int, device_type: str, address: tuple[str, int], results: Any) -> None:
    """One rank: how many numbers were wrong."""
    from app.kernels.fused.triton_ranks import sum_add_norm  # Triton, compiled
    from app.kernels.gemm.triton_small_sum import linear_sum_norm

    is_shared = torch.cuda.device_count() < ranks
    if is_shared:  # as benchmarks/one_gpu.py does
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device(device_type, 0 if is_shared else rank)
    torch.cuda.set_device(device)
    group = join_groups(connect_store(address, ranks), rank, ranks, 1, device, address[0]).tp
    boxes = make_boxes(group, empty_boxes(group, device, 16 * COLUMNS))
    assert group.agree(True, device)
    own, same = torch.Generator(device).manual_seed(rank), torch.Generator(device).manual_seed(99)
    wrong = 0

    def randn(*shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    for rows in (1, 3, 16, 2, 16):
        y = randn(rows, COLUMNS, generator=own)
        residual, weight = randn(rows, COLUMNS, generator=same), randn(COLUMNS, generator=same)
        normed, total = add_rms_norm(whole(group, y), residual, weight, EPS)
        found = sum_add_norm(boxes, y, residual, weight, EPS)
        assert found is not None
        wrong += int((found[1] != total).sum()) + int((found[0] - normed).abs().max() > 0.05 * normed.abs().max())
    for rows in (1, 16):
        x, weights = randn(rows, 512, generator=own) / 8, randn(COLUMNS, 512, generator=own) / 8
        residual = randn(rows, COLUMNS, generator=same)
        normed, total = add_rms_norm(whole(group, F.linear(x, weights)), residual, weight, EPS)
        product = linear_sum_norm(boxes, x, weights, None, residual, weight, EPS)
        assert product is not None
        for got, expected in ((product[1], total), (product[0].materialize(), normed)):
            wrong += int((got - expected).float().norm() > 0.01 * expected.float().norm())

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            found = sum_add_norm(boxes, x, residual, weight, EPS)
            assert found is not None
            x = found[0]
        return x

    y = randn(16, COLUMNS, generator=own)
    eager = chain(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = chain(y)
    for _ in range(5):
        graph.replay()
        wrong += int((eager != replayed).sum())
    counts = group.all_reduce(torch.tensor([wrong], device=device))
    if rank == 0:
        results.put(int(counts))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "shared", [pytest.param(True, marks=pytest.mark.gpu), pytest.param(False, marks=pytest.mark.multi_gpu)]
)
def test_sums_of_processes(shared: bool, ranks: int) -> None:
    """Where ranks share a GPU they take turns on it."""
    if not shared and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    assert run_ranks(sum_up, ranks, "cuda") == 0
