"""RMSNorm and the gated MLP against transformers' modules."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi.modeling_phi import PhiMLP

from app.distributed.parallel_groups import ParallelGroups
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
