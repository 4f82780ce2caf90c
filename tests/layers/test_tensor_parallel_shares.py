"""Weight loaders take the right share for any rank, and read no more of the checkpoint than that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from app.checkpoints.tensors.leaf import Dim, Leaf, Share
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.layers.context import BuildContext
from app.layers.linear import ColumnLinear, Linear, MergedColumnLinear, QKVLinear, RowLinear
from app.layers.vocab import LMHead
from app.layers.weight import ShapeMismatch
from app.quantization.plain import PlainMethod
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")


@dataclass
class Recorded:
    """A checkpoint tensor that remembers how much was read."""

    data: torch.Tensor
    read: int = 0
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = tuple(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def reshaped(self, *shape: int) -> Recorded:
        return Recorded(self.data.reshape(shape))

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        assert start + length <= self.shape[dim]
        part = self.data.narrow(dim, start, length)
        self.read += part.numel()
        return part

    def read_into(self, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        target.copy_(self.narrow(dim, start, target.shape[dim]))


def context(rank: int, size: int) -> BuildContext:
    # No collective is called here, so any object will do for a process group.
    tp = RankGroup(rank, size, cast("Any", object()) if size > 1 else None)
    return BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups(tp=tp))


def test_column_shares_are_the_rows_of_the_whole() -> None:
    whole, bias, x = torch.randn(12, 8), torch.randn(12), torch.randn(3, 8)
    outputs = []
    for rank in range(4):
        layer, weight = ColumnLinear(context(rank, 4), 8, 12, bias=True), Recorded(whole)
        layer.weight.weight_loader(weight)
        assert layer.bias is not None
        layer.bias.weight_loader(Recorded(bias))
        assert weight.read == whole.numel() // 4
        outputs.append(layer(x))
    torch.testing.assert_close(torch.cat(outputs, dim=1), F.linear(x, whole, bias))


def test_row_shares_add_up_to_the_whole() -> None:
    whole, bias, x = torch.randn(8, 12), torch.randn(8), torch.randn(3, 12)
    total = torch.zeros(3, 8)
    for rank in range(3):
        layer, weight = RowLinear(context(rank, 3), 12, 8, bias=True), Recorded(whole)
        layer.weight.weight_loader(weight)
        assert layer.bias is not None
        layer.bias.weight_loader(Recorded(bias))
        assert weight.read == whole.numel() // 3
        total += F.linear(x[:, rank * 4 : rank * 4 + 4], layer.weight, layer.bias)
    torch.testing.assert_close(total, F.linear(x, whole, bias))


def test_merged_columns_keep_gate_and_up_apart() -> None:
    gate, up, x = torch.randn(6, 8), torch.randn(6, 8), torch.randn(3, 8)
    parts: list[list[torch.Tensor]] = [[], []]
    for rank in range(2):
        layer = MergedColumnLinear(context(rank, 2), 8, {"gate_proj": 6, "up_proj": 6}, bias=False)
        layer.weight.weight_loader(Recorded(up), "up_proj")
        layer.weight.weight_loader(Recorded(gate), "gate_proj")
        for kept, part in zip(parts, layer(x).chunk(2, dim=1), strict=True):
            kept.append(part)
    torch.testing.assert_close(torch.cat(parts[0], dim=1), F.linear(x, gate))
    torch.testing.assert_close(torch.cat(parts[1], dim=1), F.linear(x, up))


@pytest.mark.parametrize(("size", "heads_of_rank"), [(1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])])
def test_ranks_share_kv_heads_where_there_are_too_few(size: int, heads_of_rank: list[list[int]]) -> None:
    d = 4
    query, key, value = torch.randn(8 * d, 6), torch.randn(2 * d, 6), torch.randn(2 * d, 6)
    for rank, heads in enumerate(heads_of_rank):
        layer = QKVLinear(context(rank, size), 6, d, num_heads=8, num_kv_heads=2, bias=False)
        for tensor, part in ((query, "q_proj"), (key, "k_proj"), (value, "v_proj")):
            layer.weight.weight_loader(Recorded(tensor), part)
        q, k, v = layer.weight.split([layer.num_heads * d, layer.num_kv_heads * d, layer.num_kv_heads * d])
        share = 8 // size * d
        assert torch.equal(q, query[rank * share : (rank + 1) * share])
        assert torch.equal(k, torch.cat([key[head * d : head * d + d] for head in heads]))
        assert torch.equal(v, torch.cat([value[head * d : head * d + d] for head in heads]))


def test_vocabulary_that_does_not_divide_is_padded_with_zeros() -> None:
    whole = torch.randn(7, 5)
    shares = []
    for rank in range(4):
        head = LMHead(context(rank, 4), 7, 5)
        head.weight.data.fill_(float("nan"))
        head.weight.weight_loader(Recorded(whole))
        shares.append(head.weight)
    together = torch.cat(list(shares))
    assert torch.equal(together[:7], whole)
    assert (together[7:] == 0).all()


def test_wrong_shapes_are_refused() -> None:
    layer = QKVLinear(context(0, 4), 6, 4, num_heads=8, num_kv_heads=2, bias=False)
    with pytest.raises(ShapeMismatch, match=r"\[16, 6\], the model expects \[8, 6\]"):
        layer.weight.weight_loader(Recorded(torch.zeros(16, 6)), "k_proj")
    with pytest.raises(AssertionError, match="does not divide"):
        ColumnLinear(context(0, 3), 8, 10, bias=False)


class Grouped(PlainMethod):
    """A scale for each 4 inputs, and half a weight for each input."""

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        return (
            Leaf("codes", torch.uint8, (Dim("output"), Dim("input", 2))),
            Leaf("scales", torch.float32, (Dim("output"), Dim("input", 4))),
            Leaf("order", torch.int32, (Dim("input"),)),
            Leaf("factor", torch.float32, (Dim("output"), Dim("unit"))),
        )


def loaded(layer: Linear, tensors: dict[str, torch.Tensor], part: str = "") -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        layer.get_parameter(name).weight_loader(Recorded(tensor), part)  # type: ignore[attr-defined]
    return {name: layer.get_parameter(name).data for name in tensors}


def test_stored_tensors_are_split_where_the_layer_splits_their_axis() -> None:
    codes = torch.randint(0, 256, (8, 8), dtype=torch.uint8)
    stored = {
        "codes": codes, "scales": torch.randn(8, 4), "order": torch.arange(16, dtype=torch.int32),
        "factor": torch.randn(8, 1),
    }  # fmt: skip
    for rank in range(2):
        ctx = context(rank, 2)
        column, row = ColumnLinear(ctx, 16, 8, bias=False), RowLinear(ctx, 16, 8, bias=False)
        for layer in (column, row):
            layer.store({"": Grouped()})
        rows, half = slice(rank * 4, rank * 4 + 4), slice(rank * 8, rank * 8 + 8)
        found = loaded(column, stored)
        assert torch.equal(found["codes"], codes[rows])
        assert torch.equal(found["scales"], stored["scales"][rows])
        assert torch.equal(found["order"], stored["order"])
        assert torch.equal(found["factor"], stored["factor"][rows])
        found = loaded(row, stored)
        assert torch.equal(found["codes"], codes[:, rank * 4 : rank * 4 + 4])
        assert torch.equal(found["scales"], stored["scales"][:, rank * 2 : rank * 2 + 2])
        assert torch.equal(found["order"], stored["order"][half])
        assert torch.equal(found["factor"], stored["factor"])


def test_a_rank_whose_share_begins_within_a_group_reads_the_groups_around_it() -> None:
    scales, codes = torch.randn(8, 6), torch.randint(0, 256, (8, 12), dtype=torch.uint8)
    for rank, groups in enumerate([slice(0, 2), slice(1, 3), slice(3, 5), slice(4, 6)]):  # of 6 inputs: 4 a group
        layer = RowLinear(context(rank, 4), 24, 8, bias=False)
        layer.store({"": Grouped()})
        found = loaded(layer, {"scales": scales, "codes": codes})
        assert torch.equal(found["scales"], scales[:, groups])
        assert torch.equal(found["codes"], codes[:, rank * 3 : rank * 3 + 3])


def test_parts_whose_entries_do_not_fit_together_lie_apart() -> None:
    """A scale for 4 outputs: those of a part of 6 end within one."""

    class Blocks(PlainMethod):
        def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
            return (Leaf("scales", torch.float32, (Dim("output", 4),)), Leaf("factor", torch.float32, (Dim("part"),)))

    method = Blocks()
    layer = MergedColumnLinear(context(0, 1), 16, {"a": 8, "b": 8}, bias=False)
    layer.store({"a": method, "b": method})
    found = loaded(layer, {"scales": torch.ones(2), "factor": torch.tensor(3.0)}, "b")
    assert [len(x) for x in found.values()] == [4, 2]
    assert found["factor"][1] == 3.0

    layer = MergedColumnLinear(context(1, 2), 16, {"a": 12, "b": 16}, bias=False)
    layer.store({"a": method, "b": method})
    stored = torch.randn(3)
    layer.get_parameter("a_scales").weight_loader(Recorded(stored), "a")  # type: ignore[attr-defined]
    assert torch.equal(layer.get_parameter("a_scales"), stored[1:])  # rows 6 to 12
    assert [weight.shares.outputs[0] for weight in layer.stored] == [Share(0, 6, 6, 12), Share(0, 8, 8, 16)]


def test_codes_are_not_converted() -> None:
    layer = ColumnLinear(context(0, 1), 16, 8, bias=False)
    layer.store({"": Grouped()})
    with pytest.raises(ShapeMismatch, match="holds float32, the model expects uint8"):
        loaded(layer, {"codes": torch.zeros(8, 8)})
