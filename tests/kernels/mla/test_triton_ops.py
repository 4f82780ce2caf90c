"""Latent attention in Triton against PyTorch's own over whole heads in float64; on a Hopper GPU in Gluon too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from app.backends import ATTENTION_BACKENDS
from app.errors import ConfigError
from app.kernels.kernel_table import HOPPER
from app.kernels.mla import gluon_few_fp8, gluon_few_rows, mla_ops, triton_attend, triton_ops
from app.kernels.mla.triton_ops import ATTEND, ATTEND_CHUNK, OPS
from app.kernels.mla.triton_schedule import AttendTile, Partials, deal, most_jobs
from tests.kernels.mla.cases import DEEPSEEK, SCALE, Sizes, Step, make_step

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}  # of norm(out - truth) / norm(truth)
LENS = [(1, 1), (1, 33), (1, 80), (3, 16), (9, 40)]
SMALL = Sizes(3)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def scratch_of_nan() -> Iterator[None]:
    """What kernels leave each other is NaN before they do."""

    def filled(*shape: int, device: torch.device) -> Partials:
        return Partials(*(torch.full(size, torch.nan, device=device) for size in (shape, shape[:2])))

    with mock.patch.object(Partials, "empty", filled):
        yield


def absorbed(step: Step, query: torch.Tensor | None = None) -> torch.Tensor:
    OPS.prepare(step.meta, num_heads=step.sizes.heads, block_size=step.cache.shape[1])
    query = step.absorbed() if query is None else query
    return OPS.attend(query, step.cache, step.meta, scale=SCALE, latent_size=step.sizes.latent, **step.more)


def expanded(step: Step, chunk: int) -> torch.Tensor:
    OPS.prepare(step.meta, num_heads=step.sizes.heads, block_size=step.cache.shape[1])
    workspace = torch.full((chunk, *step.up.shape[:2]), torch.nan, dtype=step.query.dtype, device=step.query.device)
    return OPS.attend_expanded(
        step.query, step.cache, step.meta, step.up, workspace, scale=SCALE, value_dim=step.sizes.value, **step.more
    )


def check(step: Step, found: torch.Tensor) -> None:
    assert found.dtype == step.query.dtype or found.dtype == torch.float64
    error = (found.double() - step.truth).norm() / step.truth.norm()
    assert error < TOLERANCE[step.query.dtype], error


@pytest.mark.parametrize(
    ("heads", "block_size", "chunk", "dtype", "is_fp8"),
    [(3, 16, 64, torch.float32, False), (3, 16, 37, torch.float16, False), (5, 64, 500, torch.float16, True)],
)
def test_both_ways(heads: int, block_size: int, chunk: int, dtype: torch.dtype, is_fp8: bool) -> None:
    """Lengths that end within blocks, at their ends and one behind; chunks too."""
    step = make_step(LENS, Sizes(heads), block_size=block_size, dtype=dtype, is_fp8=is_fp8, device=DEVICE)
    check(step, step.values(absorbed(step)))
    check(step, expanded(step, chunk))


def test_more_heads_than_a_tile_has_rows() -> None:
    step = make_step([(1, 50), (2, 17)], Sizes(20), dtype=torch.float16, device=DEVICE)
    check(step, step.values(absorbed(step)))


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_any_number_of_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are cut, and whole ones; shares that end within and at the end of a job; programs without any."""
    step = make_step(LENS, SMALL, dtype=torch.float16, device=DEVICE)
    tile = AttendTile(16, 16, 4, 1, programs)
    monkeypatch.setattr(triton_attend, "choose_tile", lambda *_: tile)
    monkeypatch.setattr(triton_ops, "multiprocessors", lambda _: 1)
    check(step, step.values(absorbed(step)))


def test_the_same_bits_alone_and_in_a_batch() -> None:
    """In fp32."""
    step = make_step(LENS, SMALL, device=DEVICE)
    starts = step.meta.query_start_loc.tolist()
    query = step.absorbed()
    together, parts = absorbed(step, query), expanded(step, 48)
    for request in (2, 4):
        rows = slice(*starts[request : request + 2])
        assert torch.equal(absorbed(step.alone(request), query[rows]), together[rows])
        assert torch.equal(expanded(step.alone(request), 48), parts[rows])


def test_requests_without_tokens_and_steps_without_any() -> None:
    step = make_step([(1, 20), (0, 33), (2, 17)], SMALL, dtype=torch.float16, device=DEVICE)
    check(step, step.values(absorbed(step)))
    check(step, expanded(step, 64))
    none = replace(step, query=step.query[:0], meta=replace(step.meta, query_start_loc=torch.zeros(4).int()))
    assert absorbed(none).shape == (0, 3, 40)


def test_the_longest_a_context_may_be_is_enough_to_know() -> None:
    """The host's lengths are bounds: chunks behind the last position are met by nobody."""
    step = make_step([(9, 40), (3, 16)], SMALL, dtype=torch.float16, device=DEVICE)
    exact = expanded(step, 30)
    step.meta.host_lens = step.meta.seq_lens.long().cpu().numpy() + np.array([25, 0])
    assert torch.equal(expanded(step, 30), exact)
    check(step, exact)


def test_shares_are_equal_and_take_all() -> None:
    """Each program's share is that of any other but for the last one; jobs beyond the bound are never made."""
    lens = [(1, 5000), (1, 1), (4, 700), (1, 63), (1, 64), (1, 65)]
    step = make_step(lens, Sizes(20, 16, 16, 4, 4), dtype=torch.float16, device=DEVICE)
    dealt = deal(step.meta, (9, 20, 16), AttendTile(16, 64, 4, 1, 1), 11, is_whole=False)
    share, total, num_jobs = dealt.totals.tolist()
    jobs = dealt.jobs[:num_jobs].cpu()
    expected = []  # tiles of keys that the last token of each 16 rows sees
    for count, length in lens:
        for first in range(0, count * 20, 16):
            last = min(first + 16, count * 20) - 1
            expected.append(-(-(length - count + last // 20 + 1) // 64))
    assert num_jobs == len(expected) <= most_jobs(6, 9, 20, 16)
    assert jobs[:, 6].tolist() == expected
    assert total == sum(expected)
    assert share == -(-total // 11)
    before = [sum(expected[:job]) for job in range(num_jobs)]
    assert jobs[:, 5].tolist() == before
    for program in range(-(-total // share)):
        job = int(dealt.first[program])
        assert before[job] <= program * share < before[job] + expected[job]


def test_jobs_hardly_longer_than_a_share_are_not_cut() -> None:
    """Each is a program's then, whatever its length, and writes its result itself: nothing is left to merge."""
    step = make_step([(1, 60), (1, 64), (1, 33), (1, 49)], SMALL, dtype=torch.float16, device=DEVICE)
    tile = AttendTile(16, 16, 4, 1, 5)
    with (
        mock.patch.object(triton_attend, "choose_tile", return_value=tile),
        mock.patch.object(triton_ops, "multiprocessors", return_value=1),
        mock.patch.object(triton_attend, "merge"),
    ):
        check(step, step.values(absorbed(step)))
    dealt = deal(step.meta, (4, 3, 40), tile, 5, is_whole=False)
    assert dealt.totals.tolist() == [4, 16, 4]
    assert dealt.jobs[:, 5:].tolist() == [[0, 4, 4], [4, 4, 8], [8, 3, 12], [12, 4, 16]]
    assert dealt.first[:4].tolist() == [0, 1, 2, 3]


def test_blocks_must_be_powers_of_two() -> None:
    step = make_step([(1, 5)], SMALL)
    with pytest.raises(ConfigError, match="block_size=24"):
        OPS.prepare(step.meta, num_heads=3, block_size=24)
    assert mla_ops(ATTENTION_BACKENDS.load("triton")) is OPS


GPU_LENS = [(1, 1), (1, 700), (1, 1024), (1, 3001), (5, 129), (64, 64), (170, 900)]


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("heads", [1, 10, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_deepseek_sizes_on_the_gpu(dtype: torch.dtype, heads: int, is_fp8: bool) -> None:
    for block_size in (16, 64):
        sizes = replace(DEEPSEEK, heads=heads)
        step = make_step(GPU_LENS, sizes, block_size=block_size, dtype=dtype, is_fp8=is_fp8, device=DEVICE)
        check(step, step.values(absorbed(step)))
        for chunk in (333, 1024, 8192):
            check(step, expanded(step, chunk))


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("heads", [5, 8, 16])
def test_few_rows_on_the_gpu(heads: int, is_fp8: bool) -> None:
    """Jobs that are cut into many parts, into two, and not at all; more than one token of a request."""
    module = gluon_few_fp8 if is_fp8 else gluon_few_rows
    sizes, few = replace(DEEPSEEK, heads=heads), mock.Mock(wraps=module.KERNEL.run)
    cut = [(1, 1), (1, 3001), (1, 700), (1, 64)]
    for lens in (cut, [(1, 5000)], [(1, 65)] * 300, [(1, 900)] * 128, [(16 // heads, 500), (1, 40)]):
        step = make_step(lens, sizes, dtype=torch.bfloat16, is_fp8=is_fp8, device=DEVICE)
        kernels = [replace(one, run=few) if one is module.KERNEL else one for one in ATTEND.all_on(step.query.device)]
        with mock.patch.object(ATTEND, "all_on", return_value=kernels):
            check(step, step.values(absorbed(step)))
    assert few.call_count == (5 if HOPPER.are_met(step.query.device) else 0)


@pytest.mark.gpu
def test_gluon_and_triton_agree_on_the_gpu() -> None:
    """Gluon runs where it serves, and what it does is what Triton's kernels do."""
    step = make_step(GPU_LENS, DEEPSEEK, dtype=torch.bfloat16, device=DEVICE)
    if not HOPPER.are_met(step.query.device):
        pytest.skip("needs a Hopper GPU")
    for some in (slice(0, -1), slice(-1, None)):  # all but Triton's, which is the last, and that alone
        with (
            mock.patch.object(ATTEND, "all_on", return_value=ATTEND.all_on(step.query.device)[some]),
            mock.patch.object(ATTEND_CHUNK, "all_on", return_value=ATTEND_CHUNK.all_on(step.query.device)[some]),
        ):
            check(step, step.values(absorbed(step)))
            check(step, expanded(step, 700))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_step_goes_by_the_lengths_of_its_replay(heads: int) -> None:
    """The same graph serves other lengths."""
    sizes = replace(DEEPSEEK, heads=heads)
    long = make_step([(1, 3000), (1, 900), (1, 77)], sizes, dtype=torch.bfloat16, device=DEVICE)
    query, cache, meta = long.absorbed(), long.cache, replace(long.meta, is_static=True, seq_lens=long.meta.seq_lens)
    arguments = {"scale": SCALE, "latent_size": 512}
    lens = meta.seq_lens.clone()
    meta.seq_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    for is_captured in (False, True):
        OPS.prepare(meta, num_heads=heads, block_size=16)
        if is_captured:
            with torch.cuda.graph(graph):
                out = OPS.attend(query, cache, meta, **arguments)
        else:
            OPS.attend(query, cache, meta, **arguments)
            torch.cuda.synchronize()
    meta.seq_lens.copy_(lens)
    graph.replay()
    check(long, long.values(out))
