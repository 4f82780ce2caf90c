"""Products of few rows with plain weights on Hopper GPUs: which are this kernel's, and their results on one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from app.config.engine import EngineConfig
from app.kernels.gemm import DeferredNorm, plain, triton_small
from app.kernels.gemm.plain import MOST_ROWS, PlainTile, plain_linear, plain_tile
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.launch import cdiv
from app.worker.graphs.cuda_graphs import graph_sizes, telling_sizes
from app.worker.warmup.plan import generation_plan
from tests.kernels.noted_launches import as_compiled, noted_launches
from tests.kernels.stub_gpu import as_on

EPS, TOLERANCE = 1e-6, 8e-3


@pytest.fixture(autouse=True)
def _many_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as an H200 has."""
    monkeypatch.setattr(plain, "multiprocessors", lambda _: 132)


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm over norm."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def deferred(x: torch.Tensor, parts: int) -> DeferredNorm:
    """x, with the sums of its squares in so many parts."""
    return DeferredNorm(x, x.double().square().unflatten(1, (parts, -1)).sum(2).float(), EPS)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    return F.rms_norm(x.double(), weight.shape, weight.double(), EPS)


def zeros(*shape: int) -> torch.Tensor:
    """Memory that nobody touches, in bf16."""
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(("columns", "size"), [(2560, 4096), (2560, 9216), (2560, 10240), (2560, 4800)])
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
def test_a_product_that_is_added_has_programs_for_all_multiprocessors(rows: int, columns: int, size: int) -> None:
    with as_on(9):
        tile = plain_tile(zeros(rows, size), zeros(columns, size), splits_up=True)
    assert tile is not None
    assert size % (tile.splits * tile.boxes * 64) == 0
    assert 64 <= cdiv(columns, tile.columns) * tile.splits <= 264
    assert 4 <= tile.stages <= 12


def test_others_have_what_it_does_not_serve() -> None:
    weight = zeros(4096, 2560)
    with as_on(9):
        assert plain_tile(zeros(4, 2560), weight) is not None
        assert plain_tile(zeros(MOST_ROWS + 1, 2560), weight) is None
        assert plain_tile(zeros(0, 2560), weight) is None
        assert plain_tile(zeros(4, 2560).half(), weight.half()) is None  # a norm of it is not deferred
        assert plain_tile(zeros(4, 2560), zeros(64, 2560)) is None  # too small to wait for
        assert plain_tile(zeros(4, 4096), zeros(6144, 4096)) is None  # slower, or not measured
        assert plain_tile(zeros(4, 2561)[:, 1:], weight) is None  # the copy engine wants rows at multiples of 16 bytes
        assert plain_tile(zeros(4, 5120)[:, ::2], weight) is None
        assert plain_tile(zeros(4, 2560), zeros(2560, 4096).t()) is None
        assert plain_tile(zeros(4, 2560), zeros(65_536, 2560)) is None  # a vocabulary
        assert plain_tile(zeros(4, 4104), zeros(2560, 4104), splits_up=True) is None  # no box divides it
        assert plain_tile(zeros(20, 2560), zeros(4096, 2560)) is None  # too few programs


def test_what_it_does_not_serve_is_computed_elsewhere() -> None:
    torch.manual_seed(0)
    x, weight, residual, norm, ones = (
        one.to("cuda" if torch.cuda.is_available() else "cpu")  # Triton's kernels run where they are compiled for
        for one in (
            torch.randn(3, 128),
            torch.randn(64, 128) / 11,
            torch.randn(3, 64),
            torch.randn(64),
            torch.ones(128),
        )
    )
    normed, total = plain.OPS.linear_add_norm(x, weight, None, residual, norm, EPS, True)
    assert relative_error(total, F.linear(x, weight) + residual) < 1e-5
    assert isinstance(normed, torch.Tensor)
    assert relative_error(normed, rms_norm(total, norm)) < 1e-5
    truth = rms_norm(x, ones) @ weight.double().t()
    assert relative_error(plain.OPS.linear(deferred(x, 4), weight, None), truth) < 1e-5
    gate, up = truth.chunk(2, 1)
    assert relative_error(plain.OPS.gated_linear(deferred(x, 4), weight, None, "silu"), F.silu(gate) * up) < 1e-5


def test_beside_adapters_rows_have_the_bits_of_steps_without() -> None:
    assert plain.OPS.beside_adapters is triton_small.OPS


def test_none_is_compiled_in_the_midst_of_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "plain_linear_kernel", as_compiled(plain.plain_linear_kernel))
    hidden, projected, attended, intermediate = 2560, 12352, 4096, 9216
    weights = (
        zeros(projected, hidden),
        zeros(hidden, attended),
        zeros(2 * intermediate, hidden),
        zeros(hidden, intermediate),
    )
    norm = zeros(hidden)

    def layer(tokens: int) -> None:
        if tokens > MOST_ROWS:
            return
        x, residual = plain.linear_add_norm(
            zeros(tokens, attended), weights[1], None, zeros(tokens, hidden), norm, EPS, True
        )
        h = plain.gated_linear(x, weights[2], None, "silu")
        x, _ = plain.linear_add_norm(h, weights[3], None, residual, norm, EPS, True)
        plain.linear(x, weights[0], None)

    config = EngineConfig(model="m", max_num_batched_tokens=8192)
    plan = generation_plan(config, 1 << 15, on_gpu=True, compiles=True)
    with as_on(9), noted_launches() as noted:
        for tokens in {*telling_sizes(graph_sizes(config)), *(sum(step.counts) for step in plan.compile)}:
            layer(tokens)
        at_start = Counter(noted.compiled)
        for tokens in range(1, MOST_ROWS + 1):
            layer(tokens)
    assert at_start.total() > 3
    assert Counter(noted.compiled) == at_start


def gpu_tensors(rows: int, columns: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a weight and a bias."""
    torch.manual_seed(rows + columns)
    x, weight = torch.randn(rows, size, device="cuda").bfloat16(), torch.randn(columns, size, device="cuda") / size**0.5
    return x, weight.bfloat16(), torch.randn(columns, device="cuda").bfloat16()


TILES = [PlainTile(64, 2, 4), PlainTile(128, 1, 5), PlainTile(128, 2, 2), PlainTile(64, 1, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 17, 32, 50, 64, 100, 128])
def test_on_a_gpu(rows: int) -> None:
    for columns, size in ((1000, 512), (12352, 2560)):
        x, weight, bias = gpu_tensors(rows, columns, size)
        wide = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :size]
        for tile in TILES:
            truth = F.linear(x.double(), weight.double(), bias.double())
            assert relative_error(plain_linear(wide, weight, bias, tile)[0], truth) < TOLERANCE
            truth = F.linear(rms_norm(x, torch.ones(size, device="cuda")), weight.double(), bias.double())
            assert relative_error(plain_linear(deferred(x, 8), weight, bias, tile)[0], truth) < TOLERANCE
            if tile.columns == 128 and columns % 2 == 0:
                gate, up = truth.chunk(2, dim=-1)
                found, _ = plain_linear(deferred(x, 8), weight, bias, tile, activation="silu")
                assert relative_error(found, F.silu(gate) * up) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 31, 64, 128])
def test_sums_on_a_gpu(rows: int) -> None:
    for columns, size, tile in (
        (1000, 512, PlainTile(64, 1, 3)),
        (2560, 4096, PlainTile(64, 2, 4, 4)),
        (2560, 9216, PlainTile(128, 1, 4, 8)),
    ):
        x, weight, bias = gpu_tensors(rows, columns, size)
        residual = torch.randn(rows, columns + 8, device="cuda").bfloat16()[:, :columns] * 5
        norm = torch.randn(columns, device="cuda").bfloat16()
        total, normed = plain_linear(x, weight, bias, tile, residual=residual, norm=(norm, EPS))
        truth = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
        assert relative_error(total, truth) < TOLERANCE
        assert normed is not None
        assert torch.equal(normed.rows, total * norm)
        torch.testing.assert_close(normed.squares.double().sum(1), total.double().square().sum(1), rtol=1e-5, atol=0)
        assert not arrival_counters(x.device).any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_a_chain_gives_the_same_bits_launch_after_launch(rows: int) -> None:
    """Launches begin before others have ended, in memory that is used again."""
    x, back, _ = gpu_tensors(rows, 2560, 4096)
    _, gate_up, _ = gpu_tensors(rows, 2 * 4096, 2560)
    residual, norm = torch.randn(rows, 2560, device="cuda").bfloat16(), torch.ones(2560, device="cuda").bfloat16()

    def run() -> torch.Tensor:
        h, total = x, residual
        for _ in range(20):
            normed, total = plain.linear_add_norm(h, back, None, total, norm, EPS, True)
            h = plain.gated_linear(normed, gate_up, None, "silu")
        return total

    first = run()
    h, total = x, residual
    for _ in range(20):
        normed, total = triton_small.linear_add_norm(h, back, None, total, norm, EPS, True)
        h = triton_small.gated_linear(normed, gate_up, None, "silu")
    assert relative_error(first, total) < 3e-2
    for _ in range(30):
        assert torch.equal(run(), first)
