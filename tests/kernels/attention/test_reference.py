"""The PyTorch paths against float64 attention over contiguous keys and values."""

from __future__ import annotations

import pytest
import torch

from app.backends import ATTENTION_BACKENDS
from app.kernels.attention import AttentionMetadata, torch_in_place, torch_plan
from app.kernels.attention.reference import OPS, naive_paged_attention, write_kv
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

MIXED = [(1, 1), (1, 16), (1, 17), (1, 300), (1, 250), (5, 5), (33, 33), (7, 100), (1, 40), (17, 64), (600, 700)]
SHAPES = [(4, 4, 32), (4, 2, 80), (7, 1, 128), (14, 2, 32)]


@pytest.fixture(params=["in place", "gathered"], autouse=True)
def decode_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to decode: where the cache is read in place (fp32), and where blocks are copied."""
    if request.param == "gathered":
        monkeypatch.setattr(torch_in_place, "serves", lambda query, kv_cache: False)
    elif not torch_in_place._works():
        pytest.skip("this build of PyTorch lacks an operator")


def run(batch: Batch, **options: float | int | None) -> torch.Tensor:
    _, _, num_kv_heads, block_size, head_dim = batch.kv_cache.shape
    OPS.prepare(
        batch.meta,
        num_heads=batch.query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    return OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=batch.query.shape[2] ** -0.5, **options)


def check(batch: Batch, tolerance: float = 5e-6, **options: float | int | None) -> None:
    scale = batch.query.shape[2] ** -0.5
    expected = contiguous_attention(batch, scale=scale, **options)
    naive = naive_paged_attention(batch.query, batch.kv_cache, batch.meta, scale=scale, **options)
    torch.testing.assert_close(naive.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(run(batch, **options).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_mixed_batch(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    check(make_batch(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("sliding_window", [1, 2, 16, 17, 50, 1000])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_sliding_window_and_soft_cap(sliding_window: int, soft_cap: float | None) -> None:
    check(make_batch(MIXED), sliding_window=sliding_window, soft_cap=soft_cap)


def test_soft_cap_alone() -> None:
    check(make_batch(MIXED), soft_cap=2.0)


def test_layers_of_different_windows_share_one_plan() -> None:
    batch = make_batch(MIXED)
    scale = batch.query.shape[2] ** -0.5
    run(batch)
    plan = batch.meta.plan
    for window in (8, None, 8, 64):
        got = OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=scale, sliding_window=window)
        expected = contiguous_attention(batch, scale=scale, sliding_window=window)
        torch.testing.assert_close(got.double(), expected, atol=5e-6, rtol=5e-6)
    assert batch.meta.plan is plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sliding_window", [None, 17])
def test_half_precision(dtype: torch.dtype, sliding_window: int | None) -> None:
    check(make_batch(MIXED, dtype=dtype), tolerance=2e-2, sliding_window=sliding_window)


@pytest.mark.parametrize("group_elements", [1 << 22, 1 << 15])
def test_many_decodes_of_all_lengths(group_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_plan, "_GROUP_ELEMENTS", group_elements)  # the smaller one: a few requests a group
    check(make_batch([(1, 1 + 37 * i % 530) for i in range(40)], block_size=16))


def test_a_plan_for_another_number_of_kv_heads_is_refused() -> None:
    batch, other = (make_batch([(3, 20)], num_heads=4, num_kv_heads=heads) for heads in (2, 1))
    run(batch)
    with pytest.raises(AssertionError, match="another number of KV heads"):
        OPS.paged_attention(other.query, other.kv_cache, batch.meta, scale=1.0)


def one_request(batch: Batch, request: int) -> Batch:
    meta = batch.meta
    first, last = meta.query_start_loc[request : request + 2].tolist()
    alone = AttentionMetadata(
        query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=meta.seq_lens[request : request + 1],
        block_table=meta.block_table[request : request + 1],
        slot_mapping=meta.slot_mapping[first:last],
        max_query_len=last - first,
        max_seq_len=int(meta.seq_lens[request]),
        num_decodes=int(last - first == 1),
    )
    return Batch(batch.query[first:last], batch.kv_cache, alone, [batch.keys[request]], [batch.values[request]])


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_decodes_whose_queries_lie_between_other_heads(sliding_window: int | None) -> None:
    batch = make_batch([(1, 70)] * 3 + [(1, 66)], num_heads=6, num_kv_heads=2, dtype=torch.bfloat16)
    wider = torch.cat((batch.query, torch.full_like(batch.query, float("nan"))), dim=1)
    apart = Batch(wider[:, :6], batch.kv_cache, batch.meta, batch.keys, batch.values)
    check(apart, tolerance=2e-2, sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_alone_as_in_a_batch(sliding_window: int | None) -> None:
    batch = make_batch([(1, 1 + 53 * i % 400) for i in range(24)] + MIXED[5:])
    together = run(batch, sliding_window=sliding_window)
    starts = batch.meta.query_start_loc.tolist()
    for request in range(len(batch.keys)):
        alone = run(one_request(batch, request), sliding_window=sliding_window)
        torch.testing.assert_close(alone, together[starts[request] : starts[request + 1]], atol=1e-6, rtol=1e-6)


def test_chunks_give_what_the_whole_gives() -> None:
    whole = make_batch([(90, 90)])
    expected = run(whole)
    for begin, end in ((0, 1), (1, 33), (33, 48), (48, 90)):
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=whole.meta.block_table,
            slot_mapping=whole.meta.slot_mapping[begin:end],
            max_query_len=end - begin,
            max_seq_len=end,
            num_decodes=int(end - begin == 1),
        )
        chunk = Batch(whole.query[begin:end], whole.kv_cache, meta, whole.keys, whole.values)
        torch.testing.assert_close(run(chunk), expected[begin:end], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("slots", [torch.tensor([3, 79, -1, 32, 16]), torch.tensor([-1, 40, 79])])
def test_write_kv_fills_its_slots_only(slots: torch.Tensor) -> None:
    kv_cache = torch.full((5, 2, 3, 16, 8), float("nan"))
    key, value = torch.randn(len(slots), 3, 8), torch.randn(len(slots), 3, 8)
    write_kv(key, value, kv_cache, slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(kv_cache[slot // 16, 0, :, slot % 16], key[token])
            assert torch.equal(kv_cache[slot // 16, 1, :, slot % 16], value[token])
    assert int((~kv_cache.isnan()).sum()) == int((slots >= 0).sum()) * 2 * 3 * 8
    write_kv(key[:0], value[:0], kv_cache, slots[:0])


def test_table_names_the_torch_backend() -> None:
    assert ATTENTION_BACKENDS.load("torch") is OPS


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_requests_with_few_queries_between_others(sliding_window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts behind decodes and between prompts: alone, in tiles, and some of each."""
    batch = make_batch([(1, 30), (4, 31), (40, 90), (2, 2), (8, 200), (1, 12), (3, 45), (5, 600)], block_size=16)
    for most in (0, 64, 1 << 12, 1 << 30):
        monkeypatch.setattr(torch_plan, "_MOST_ALONE", most)
        batch.meta.plan = None
        check(batch, sliding_window=sliding_window)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_drafts_alone(soft_cap: float | None) -> None:
    check(make_batch([(4, 20 + 3 * i) for i in range(9)], block_size=16), soft_cap=soft_cap)
