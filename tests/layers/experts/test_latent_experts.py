"""Experts over a smaller vector equal transformers', whole or over ranks."""

from __future__ import annotations

import pytest
import torch
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

from app.kernels.moe import GLU, RoutingRule
from app.layers.epilogue import PLAIN, AddNorm
from app.layers.experts.latent_experts import LatentExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.layers.norm import RMSNorm
from app.layers.quantized_layer import QuantizedLayer
from app.loading.load_formats.base import targets
from tests.layers.experts.test_expert_mlp import context, step
from tests.layers.test_tensor_parallel_shares import Recorded

C, L, W, E, K = 20, 8, 12, 6, 3  # hidden size, that of experts, their width, experts, of a token
SETTINGS = ExpertSettings(
    num_experts=E,
    intermediate_size=W,
    rule=RoutingRule(top_k=K, scoring="sigmoid", renormalize=True, scale=1.5),
    layers=frozenset((0,)),
    rounds_logits=False,
    activation=GLU("relu2"),
    corrects=True,
    shared_size=24,
)


@pytest.fixture(scope="module")
def judge() -> NemotronHMoE:
    torch.manual_seed(0)
    config = NemotronHConfig(
        hidden_size=C, moe_latent_size=L, moe_intermediate_size=W, n_routed_experts=E, num_experts_per_tok=K,
        moe_shared_expert_intermediate_size=24, routed_scaling_factor=1.5, norm_topk_prob=True,
    )  # fmt: skip
    block = NemotronHMoE(config)
    for tensor in (*block.parameters(), *block.buffers()):
        tensor.data.normal_(0, 0.5)
    return block


def filled(judge: NemotronHMoE, rank: int, size: int) -> LatentExpertMLP:
    tensors = {name: tensor.detach() for name, tensor in judge.state_dict().items()}
    for part in ("up_proj", "down_proj"):
        tensors |= {f"experts.{e}.{part}.weight": one for e, one in enumerate(tensors.pop(f"experts.{part}"))}
    layer = LatentExpertMLP(context(rank, size), C, "relu2", SETTINGS, L)
    for name, (weight, part) in targets(layer).items():
        weight.weight_loader(Recorded(tensors[name.removeprefix(".")]), part)
    for module in layer.modules():
        if isinstance(module, QuantizedLayer):
            module.pack()
    return layer


@pytest.mark.parametrize("size", [1, 2])
@torch.inference_mode()
def test_ranks_sum_to_the_whole(judge: NemotronHMoE, size: int) -> None:
    x = torch.randn(9, C)
    total = sum(filled(judge, rank, size)(x, PLAIN, step([5] * 9)) for rank in range(size))
    torch.testing.assert_close(total, judge(x), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_the_sum_is_normed(judge: NemotronHMoE) -> None:
    x, residual, norm = torch.randn(5, C), torch.randn(5, C), RMSNorm(context(), C, 1e-5)
    norm.weight.data.uniform_(0.5, 1.5)
    normed, total = filled(judge, 0, 1)(x, AddNorm(residual, norm), step([5] * 5))
    torch.testing.assert_close(total, judge(x) + residual, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(normed, norm(total), rtol=1e-4, atol=1e-5)
