"""RMSNorm and the gated MLP against transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi.modeling_phi import PhiMLP

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.kernels.fused import RankBoxes
from app.kernels.gemm import LINEAR_OPS, LinearOps
from app.layers.activation import ACTIVATIONS
from app.layers.context import BuildContext
from app.layers.epilogue import PLAIN, AddNorm
from app.layers.mlp import GatedMLP
from app.layers.norm import RMSNorm
from app.layers.plain_mlp import PlainMLP
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")


def context(dtype: torch.dtype = torch.float32) -> BuildContext:
    return BuildContext(dtype, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_norm(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = RMSNorm(context(dtype), 48, 1e-5), LlamaRMSNorm(48, 1e-5).to(dtype)
    weight = torch.randn(48, dtype=dtype)
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    x = (torch.randn(5, 3, 48) * 7).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@torch.inference_mode()
def test_mlp(name: str) -> None:
    theirs = LlamaMLP(
        LlamaConfig(hidden_size=24, intermediate_size=40, hidden_act=name, mlp_bias=True, num_attention_heads=2)
    )
    ours = GatedMLP(context(), 24, 40, name, bias=True)
    for part in ("weight", "bias"):
        fused = torch.cat([getattr(theirs.gate_proj, part), getattr(theirs.up_proj, part)])
        getattr(ours.gate_up_proj, part).data.copy_(fused)
        getattr(ours.down_proj, part).data.copy_(getattr(theirs.down_proj, part))
    x = torch.randn(6, 24)
    residual, norm = torch.randn(6, 24), RMSNorm(context(), 24, 1e-5)
    normed, total = ours(x, AddNorm(residual, norm))
    torch.testing.assert_close(total, theirs(x) + residual, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(normed, norm(total))
    assert all(torch.equal(out, total) for out in ours(x, AddNorm(residual, None)))
    torch.testing.assert_close(ours(x, PLAIN), total - residual, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_plain_mlp() -> None:
    theirs = PhiMLP(PhiConfig(hidden_size=24, intermediate_size=40, hidden_act="gelu_new"))
    ours = PlainMLP(context(), 24, 40, "gelu_new", bias=True)
    for mine, their in ((ours.up_proj, theirs.fc1), (ours.down_proj, theirs.fc2)):
        mine.weight.data.copy_(their.weight)
        assert mine.bias is not None
        mine.bias.data.copy_(their.bias)
    x = torch.randn(6, 24)
    torch.testing.assert_close(ours(x, PLAIN), theirs(x), rtol=1e-4, atol=1e-5)


def test_few_rows_are_summed_and_normed_by_the_kernel_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a product in one launch with it, or behind it; what neither takes is a sum, then a norm."""
    asked: list[str] = []
    norm = RMSNorm(context(), 8, 1e-5, may_defer=True)
    y, residual = torch.randn(3, 8), torch.randn(3, 8)
    expected = norm.after_add(2 * y, residual)

    def together(boxes: RankBoxes, part: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        asked.append("sum")
        return expected if len(part) == 3 else None

    def of_product(boxes: RankBoxes, x: torch.Tensor, *rest: Any) -> Any:
        asked.append("product")
        return expected if len(x) == 3 else None

    norm.fused = replace(norm.fused, sum_add_norm=together)
    monkeypatch.setattr(RankGroup, "all_reduce", lambda self, tensor, lent=False: tensor.mul_(2))
    group = RankGroup(0, 2, object(), boxes=object())  # type: ignore[arg-type]
    plain = LINEAR_OPS.on(torch.device("cpu"))
    weight, epilogue = torch.eye(8), AddNorm(residual, norm)
    assert epilogue.after_all_reduce(group, y.clone()) is expected
    assert epilogue.summed(group, plain, y, weight, None) is expected
    assert asked == ["sum", "sum"]
    assert epilogue.summed(group, replace(plain, linear_sum_norm=of_product), y, weight, None) is expected
    assert asked == ["sum", "sum", "product"]
    few = AddNorm(residual[:2], norm)
    for found in zip(
        few.summed(group, replace(plain, linear_sum_norm=of_product), y[:2], weight, None), expected, strict=True
    ):
        torch.testing.assert_close(found[0], found[1][:2])
    assert asked[3:] == ["product", "sum"]
    for found in zip(few.summed(replace(group, boxes=None), plain, y[:2], weight, None), expected, strict=True):
        torch.testing.assert_close(found[0], found[1][:2])
    assert len(asked) == 5


def test_a_norm_before_one_product_may_come_as_numbers() -> None:
    """Where the device has such a kernel, and only there."""
    norm, asked = RMSNorm(context(), 4, 1e-5), []

    def note(name: str) -> Any:
        return lambda *given: asked.append((name, given[-1])) or (given[0], given[3])

    ops: LinearOps[Any] = replace(LINEAR_OPS.on(CPU), linear_add_norm=note("norm"), linear_add_numbers=note("numbers"))
    x = torch.ones(2, 4)
    for before_product, given in ((False, ops), (True, ops), (True, replace(ops, linear_add_numbers=None))):
        norm.before_product = before_product
        norm.after_product(given, x, x, None, x)
    assert asked == [("norm", False), ("numbers", False), ("norm", False)]
