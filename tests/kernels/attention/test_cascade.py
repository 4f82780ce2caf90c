"""Shared-prefix decode against float64 attention, and its lists against a search in plain Python.

In Triton's interpreter on a CPU, for real on a GPU.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from app.kernels.attention import triton_decode, triton_shared_splits, triton_splits
from app.kernels.attention.triton_cascade import CascadeTile
from app.kernels.attention.triton_decode import DecodeTile
from app.kernels.attention.triton_ops import OPS, TritonPlan
from app.kernels.attention.triton_shared_splits import SharedSplits, share_splits
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Two groups of which one splits further on; lengths of several classes; requests of their own between them; a prefix
# that ends inside a split; one as long as all of a request but its last token; too short to share; a prefill.
DECODE_LENS = [170, 171, 1, 165, 97, 169, 130, 20, 120, 161, 30]
LENS = [(1, length) for length in DECODE_LENS] + [(9, 60)]
PREFIX_OF = {1: (0, 160), 3: (0, 96), 5: (3, 160), 6: (1, 128), 8: (4, 64), 9: (4, 96), 10: (0, 16), 11: (0, 48)}


@pytest.fixture
def _small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_splits, "MAX_SPLITS", 16)
    monkeypatch.setattr(triton_decode, "choose_tile", lambda *_: DecodeTile(keys=32, num_warps=4, num_stages=2))
    monkeypatch.setattr(triton_decode, "_MERGE_ELEMENTS", 256)


@pytest.fixture(autouse=True)
def _unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial result that no kernel writes shows up as NaN."""
    made_empty = torch.empty

    def empty(*arguments: object, **options: object) -> torch.Tensor:
        tensor: torch.Tensor = made_empty(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", empty)


def run(batch: Batch, *, cascade: bool = True, is_static: bool = False, **options: float | int | None) -> torch.Tensor:
    """The step's attention; asserts that some split was shared if that was asked for."""
    meta = dataclasses.replace(batch.meta, cascade=cascade, is_static=is_static, plan=None)
    if is_static:
        meta = dataclasses.replace(meta, max_seq_len=4096)
    _, _, num_kv_heads, block_size, head_dim = batch.kv_cache.shape
    heads = batch.query.shape[1]
    OPS.prepare(meta, num_heads=heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    out = OPS.paged_attention(batch.query, batch.kv_cache, meta, scale=head_dim**-0.5, **options)
    assert isinstance(meta.plan, TritonPlan)
    if cascade and options.get("sliding_window") is None:
        assert meta.plan.scratch.shared
        assert all(int(shared.count) > 0 for shared in meta.plan.scratch.shared.values())
    return out


def check(batch: Batch, **options: float | int | bool | None) -> None:
    masks = {name: value for name, value in options.items() if name in ("sliding_window", "soft_cap")}
    expected = contiguous_attention(batch, scale=batch.query.shape[2] ** -0.5, **masks)
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(run(batch, **options).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (2, 2, 64, 16, torch.float32),
        (4, 2, 128, 16, torch.float32),
        (4, 1, 80, 16, torch.float16),
        (7, 1, 256, 16, torch.float32),
        (8, 1, 64, 32, torch.float16),
    ],
)
def test_mixed_groups(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    prefix_of = {r: (other, n // block_size * block_size) for r, (other, n) in PREFIX_OF.items()}
    batch = make_batch(
        LENS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
        device=DEVICE, prefix_of=prefix_of,
    )  # fmt: skip
    check(batch, is_static=head_dim >= 128, soft_cap=5.0 if head_dim % 64 else None)


@pytest.mark.usefixtures("_small_splits")
def test_layers_with_a_window_read_for_themselves() -> None:
    check(make_batch(LENS, num_kv_heads=1, device=DEVICE, prefix_of=PREFIX_OF), sliding_window=70)


def brute_force(batch: Batch, tile_keys: int) -> dict[tuple[int, int], frozenset[int]]:
    """(request, whole split) -> who shares it, from the tables alone."""
    lens, table = batch.meta.seq_lens.tolist(), batch.meta.block_table.tolist()
    block_size = batch.kv_cache.shape[3]

    def split_of(length: int) -> int:
        count = min(triton_splits.MAX_SPLITS, math.ceil(length / triton_splits.SPLIT_KEYS))
        return math.ceil(math.ceil(length / count) / tile_keys) * tile_keys

    chains: dict[tuple[int, int], tuple[int, ...]] = {}
    for request in range(batch.meta.num_decodes):
        split = split_of(lens[request])
        for index in range((lens[request] - 1) // split):
            blocks = math.ceil((index + 1) * split / block_size)
            chains[request, index] = (split, index, *table[request][:blocks])
    return {key: frozenset(r for (r, _), other in chains.items() if other == chain) for key, chain in chains.items()}


def served(made: SharedSplits) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """(request, split) -> the runs' members that serve it; () for a single."""
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for item in made.singles.items[: int(made.singles.count)].tolist():
        found.setdefault(divmod(item & 0xFFFFFFFF, triton_splits.MAX_SPLITS), []).append(())
    for words, group_slots in zip(made.runs[: int(made.count)].tolist(), made.members.tolist(), strict=False):
        first, end, split, count = words
        members = tuple(group_slots[:count])
        assert split == 32
        for request in members:
            for split in range(first, end):
                found.setdefault((request, split), []).append(members)
    return found


@pytest.mark.usefixtures("_small_splits")
@pytest.mark.parametrize(
    ("group_slots", "run_splits", "tile"), [(2, 1, 4096), (3, 3, 512), (16, 1, 256), (16, 3, 4096)]
)
def test_every_split_is_served_once_by_those_who_share_it(
    monkeypatch: pytest.MonkeyPatch, group_slots: int, run_splits: int, tile: int
) -> None:
    monkeypatch.setattr(triton_shared_splits, "_GROUP_ELEMENTS", tile)
    batch = make_batch(LENS, num_kv_heads=1, device=DEVICE, prefix_of=PREFIX_OF)
    made = share_splits(batch.meta, 16, 32, 16, group_slots, run_splits)
    found, expected = served(made), brute_force(batch, 32)
    every = {(r, s) for r, length in enumerate(DECODE_LENS) for s in range(math.ceil(length / 32))}
    assert set(found) == every
    assert all(len(by) == 1 for by in found.values())
    shared = 0
    for key in every:
        members = found[key][0] or (key[0],)
        group = sorted(expected.get(key, {key[0]}))
        place = group.index(key[0]) // group_slots * group_slots
        assert list(members) == group[place : place + group_slots], key
        shared += len(members) > 1
    assert shared > 12
    assert int((made.runs[:, 1] - made.runs[:, 0])[: int(made.count)].max()) == run_splits


@pytest.mark.usefixtures("_small_splits")
def test_a_block_at_another_place_is_not_shared() -> None:
    """Only chains count: nobody trusts that a block's number means its place."""
    batch = make_batch([(1, 100), (1, 100), (1, 100)], num_kv_heads=1, device=DEVICE)
    table = batch.meta.block_table
    table[1, 2:4], table[2, 4:6] = table[0, 0:2], table[0, 4:6]
    made = share_splits(batch.meta, 16, 32, 16, 16, 2)
    assert int(made.count) == 0
    assert int(made.singles.count) == 12


@pytest.mark.usefixtures("_small_splits")
def test_neighbours_change_a_result_by_rounding_at_most() -> None:
    batch = make_batch(LENS[:7], num_heads=2, num_kv_heads=1, device=DEVICE, prefix_of=PREFIX_OF)
    found = run(batch)
    torch.testing.assert_close(found, run(batch, cascade=False), atol=2e-6, rtol=2e-6)
    assert torch.equal(found, run(batch, is_static=True))


@pytest.mark.usefixtures("_small_splits")
def test_rows_that_pad_a_static_step_and_nothing_to_share() -> None:
    """Padding rows have one token and row 0's table; a step may have asked in vain."""
    batch = make_batch([(1, 200), (1, 200), (1, 1), (1, 1)], device=DEVICE, prefix_of={1: (0, 192)})
    batch.meta.block_table[2:] = batch.meta.block_table[0]
    expected = contiguous_attention(batch, scale=batch.query.shape[2] ** -0.5)
    torch.testing.assert_close(run(batch, is_static=True)[:2].double(), expected[:2], atol=2e-5, rtol=2e-5)
    alone = make_batch([(1, 200), (1, 150)], device=DEVICE)
    alone.meta.cascade = True
    OPS.prepare(alone.meta, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
    found = OPS.paged_attention(alone.query, alone.kv_cache, alone.meta, scale=32**-0.5)
    judge = contiguous_attention(alone, scale=32**-0.5)
    torch.testing.assert_close(found.double(), judge, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size"),
    [(64, 1, 16), (64, 7, 64), (80, 4, 32), (128, 4, 16), (128, 8, 64), (256, 2, 16)],
)
def test_large_groups_on_the_gpu(dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    lens = [(1, 1030 + 37 * i) for i in range(24)] + [(1, 5), (1, 700)]
    prefix_of = dict.fromkeys(range(1, 18), (0, 960)) | dict.fromkeys(range(19, 24), (18, 512))
    batch = make_batch(
        lens, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype,
        device=DEVICE, prefix_of=prefix_of,
    )  # fmt: skip
    check(batch)
    check(batch, is_static=True, soft_cap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("run_splits", [1, 2, 4])
def test_tiles_on_the_gpu(monkeypatch: pytest.MonkeyPatch, rows: int, run_splits: int) -> None:
    """And contexts whose splits are longer than the shortest."""
    tile = CascadeTile(rows, 64, run_splits, 8 if rows == 128 else 4, 3)
    monkeypatch.setattr(triton_decode, "choose_cascade_tile", lambda *_: tile)
    lens = [(1, 17_000 + 100 * i) for i in range(8)]
    batch = make_batch(
        lens, num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, device=DEVICE,
        prefix_of=dict.fromkeys(range(1, 8), (0, 16_384)),
    )  # fmt: skip
    check(batch)
