# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Deals a step's attention to latents to programs: equal shares of all tiles of keys, made on the device.

A request's (token, head) pairs are rows, cut into jobs of BM rows; a job meets the tiles of keys that its last token
sees. The jobs' tiles in a row are cut into equal shares, one for each program, so that any mix of lengths takes all
programs equally long, and a captured graph serves them all (as FlashMLA's scheduler does). A program's share begins
within one job and ends within another: what it finds of these two are partial results, joined in the order of the
programs; jobs between are whole. Of jobs hardly longer than a share each is a program's own: cutting them would cost
more than programs that wait for the longest.

Where a job is cut depends on the batch around it: sums are rounded otherwise. In fp32 no job is cut (I6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata
from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch

FIELDS = tl.constexpr(8)  # int32 numbers of a job: see `load_job`
_LIST_TILE = 256


@dataclass(slots=True, frozen=True)
class AttendTile:
    """Tile sizes and launch options."""

    rows: int  # BM
    keys: int  # BN
    num_warps: int
    num_stages: int
    programs: int  # for each multiprocessor


@dataclass(slots=True, frozen=True)
class Partials:
    """Holds what the programs of a layer leave of jobs that are cut: two places for each program."""

    result: torch.Tensor  # fp32 [2 * programs, BM, R]
    log_sum: torch.Tensor  # fp32 [2 * programs, BM], base 2

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> Partials:
        """Uninitialised memory; shape: of the results."""
        return cls(*(torch.empty(size, dtype=torch.float32, device=device) for size in (shape, shape[:2])))


@dataclass(slots=True, frozen=True)
class Shares:
    """The jobs of a step and how they are dealt."""

    tile: AttendTile
    jobs: torch.Tensor  # int32 [most jobs, FIELDS]
    first: torch.Tensor  # int32 [programs], the job in which a program's share begins
    totals: torch.Tensor  # int32 [3]: tiles of a share, of all jobs, how many jobs there are
    programs: int
    most_rows: int  # of a request
    partials: Partials  # empty where no job is cut

    @property
    def is_whole(self) -> bool:
        """No job is cut: each is a program's."""
        return len(self.partials.result) == 0


@triton.jit
def load_job(p_jobs, job):
    """int32 (request, its first row, its first token in the step, its tokens, its length, where it begins among all
    tiles, its own, where the next one begins)."""
    p = p_jobs + job * FIELDS
    return (
        tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3), tl.load(p + 4), tl.load(p + 5), tl.load(p + 6),
        tl.load(p + 7),
    )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["R", "H", "P"])
def deal_kernel(
    p_starts, p_lens, p_jobs, p_first, p_totals, R, H, P,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Grid (1,): the jobs of R requests of H heads, request by request, dealt to P programs."""
    num_jobs, total, longest = 0, 0, 0
    for i_r in range(0, R, BR):
        o_r = i_r + tl.arange(0, BR)
        m_r = o_r < R
        b_start = tl.load(p_starts + o_r, mask=m_r, other=0)
        b_count = tl.where(m_r, tl.load(p_starts + o_r + 1, mask=m_r, other=0) - b_start, 0)
        b_len = tl.load(p_lens + o_r, mask=m_r, other=0)
        b_jobs = tl.cdiv(b_count * H, BM)
        o_first = num_jobs + tl.cumsum(b_jobs, 0) - b_jobs
        for i in range(0, tl.max(b_jobs, 0)):
            m = i < b_jobs
            last = tl.minimum((i + 1) * BM, b_count * H) - 1
            b_tiles = tl.cdiv(b_len - b_count + last // H + 1, BN)
            p = p_jobs + (o_first + i) * FIELDS
            tl.store(p, o_r, mask=m)
            tl.store(p + 1, tl.zeros([BR], tl.int32) + i * BM, mask=m)
            tl.store(p + 2, b_start, mask=m)
            tl.store(p + 3, b_count, mask=m)
            tl.store(p + 4, b_len, mask=m)
            tl.store(p + 6, b_tiles, mask=m)
            total += tl.sum(tl.where(m, b_tiles, 0), 0)
            longest = tl.maximum(longest, tl.max(tl.where(m, b_tiles, 0), 0))
        num_jobs += tl.sum(b_jobs, 0)
    share = tl.cdiv(total, P)
    # Jobs hardly longer than a share are not cut: each has a share as long as the longest, which it may not fill.
    is_apart = (num_jobs <= P) & (longest <= share + share // 16 + 1)
    share = tl.where(is_apart, longest, share)
    tl.store(p_totals, share)
    tl.store(p_totals + 1, tl.where(is_apart, num_jobs * longest, total))
    tl.store(p_totals + 2, num_jobs)
    tl.debug_barrier()  # other threads wrote what is read now
    before = 0
    for i_j in range(0, num_jobs, BR):
        o_j = i_j + tl.arange(0, BR)
        m_j = o_j < num_jobs
        b_tiles = tl.load(p_jobs + o_j * FIELDS + 6, mask=m_j, other=0)
        b_tiles = tl.where(is_apart & m_j, longest, b_tiles)
        b_before = before + tl.cumsum(b_tiles, 0) - b_tiles
        tl.store(p_jobs + o_j * FIELDS + 5, b_before, mask=m_j)
        tl.store(p_jobs + o_j * FIELDS + 7, b_before + b_tiles, mask=m_j)
        # Programs whose shares begin within the job.
        o_begin, o_end = tl.cdiv(b_before, share), tl.cdiv(b_before + b_tiles, share)
        for i in range(0, tl.max(o_end - o_begin, 0)):
            tl.store(p_first + o_begin + i, o_j, mask=o_begin + i < o_end)
        before += tl.sum(b_tiles, 0)


def most_jobs(num_requests: int, num_tokens: int, num_heads: int, tile_rows: int) -> int:
    """Jobs of a step of so many requests and tokens, at most."""
    return min(num_tokens * cdiv(num_heads, tile_rows), num_requests + num_tokens * num_heads // tile_rows)


def deal(
    meta: AttentionMetadata, shape: tuple[int, int, int], tile: AttendTile, programs: int, *, is_whole: bool
) -> Shares:
    """Deal a step's jobs to so many programs; is_whole: to as many as there may be. `shape`: T, H, R of the result. One
    small launch, no synchronisation."""
    num_tokens, num_heads, latent_size = shape
    num_requests, device = meta.seq_lens.shape[0], meta.seq_lens.device
    num_jobs = most_jobs(num_requests, num_tokens, num_heads, tile.rows)

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.int32, device=device)

    programs = num_jobs if is_whole else programs
    partials = Partials.empty(0 if is_whole else 2 * programs, tile.rows, latent_size, device=device)
    most_rows = meta.max_query_len * num_heads
    made = Shares(tile, empty(num_jobs, FIELDS.value), empty(programs), empty(3), programs, most_rows, partials)
    deal_kernel[(1,)](
        meta.query_start_loc, meta.seq_lens, made.jobs, made.first, made.totals, num_requests, num_heads, programs,
        BM=tile.rows, BN=tile.keys, BR=_LIST_TILE, num_warps=4,
    )  # fmt: skip
    return made
