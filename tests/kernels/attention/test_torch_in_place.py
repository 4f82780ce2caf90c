"""When decodes read the cache in place, how they are grouped, and that nothing unseen is read.

Results are judged in test_reference.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from app.kernels.attention import torch_in_place
from app.kernels.attention.torch_in_place import attend, plan_groups, serves
from tests.kernels.attention.cases import make_batch

needs_operators = pytest.mark.skipif(not torch_in_place._works(), reason="this build of PyTorch lacks an operator")


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    torch_in_place._works.cache_clear()
    yield
    torch_in_place._works.cache_clear()


@needs_operators
@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [([7], [1]), ([20, 3, 30], [3]), ([500, 9, 520, 10], [2, 2]), ([1000, 1100] * 40, [59, 21])],
)
def test_groups_are_of_like_length_and_bounded(lengths: list[int], sizes: list[int]) -> None:
    kv_cache = torch.zeros(80, 2, 2, 16, 8)
    table = torch.zeros(len(lengths), 80, dtype=torch.int64)
    groups = plan_groups([(0, length) for length in lengths], table, kv_cache, num_heads=8)
    assert [group.matrix.shape[0] // 8 for group in groups] == sizes
    rows = [list(range(len(lengths))) if group.rows is None else group.rows.tolist() for group in groups]
    assert sorted(request for members in rows for request in members) == list(range(len(lengths)))
    for group, members in zip(groups, rows, strict=True):
        longest = max(lengths[request] for request in members)
        assert group.matrix.values().numel() == len(members) * 8 * longest
        assert (group.hidden is None) == (len({lengths[request] for request in members}) == 1)


@needs_operators
def test_only_what_a_request_sees_is_read() -> None:
    kv_cache = torch.full((4, 2, 1, 4, 8), float("nan"))
    kv_cache[2, :, :, 2:] = torch.randn(2, 1, 2, 8)  # positions 6 and 7 of a request on blocks 3, 2
    kv_cache[1, :, :, 0] = torch.randn(2, 1, 8)  # position 0 of another
    table = torch.tensor([[3, 2], [1, 0]])
    (group,) = plan_groups([(6, 8), (0, 1)], table, kv_cache, num_heads=2)
    query = torch.randn(2, 2, 8)
    out = attend(query, kv_cache, group, 0.3, None)
    key, value = kv_cache[2, :, 0, 2:]
    torch.testing.assert_close(out[0], torch.softmax(query[0] @ key.T * 0.3, dim=-1) @ value)
    torch.testing.assert_close(out[1], kv_cache[1, 1, :, 0].expand(2, 8))


@needs_operators
def test_a_layer_of_nan_does_not_spoil_the_next() -> None:
    batch = make_batch([(1, 20)])
    (group,) = plan_groups([(0, 20)], batch.meta.block_table.long(), batch.kv_cache, batch.query.shape[1])
    clean = attend(batch.query, batch.kv_cache, group, 1.0, None)
    assert attend(torch.full_like(batch.query, float("nan")), batch.kv_cache, group, 1.0, None).isnan().all()
    assert torch.equal(attend(batch.query, batch.kv_cache, group, 1.0, None), clean)


def test_other_types_and_strided_caches_are_gathered() -> None:
    query, kv_cache = torch.zeros(1, 2, 8), torch.zeros(4, 2, 2, 4, 8)
    assert not serves(query.bfloat16(), kv_cache.bfloat16())
    assert not serves(query, kv_cache.transpose(2, 3))


def test_a_missing_operator_means_gathering(fresh_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("not built with this operator")

    monkeypatch.setattr(torch.sparse, "sampled_addmm", missing)
    assert not serves(torch.zeros(1, 2, 8), torch.zeros(4, 2, 2, 4, 8))
