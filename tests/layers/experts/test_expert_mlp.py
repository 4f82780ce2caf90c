"""A layer of experts equals transformers', whole or over any number of ranks; padding goes to no expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import ConfigError, UnsupportedError
from app.kernels.attention import AttentionMetadata
from app.kernels.moe import RoutingRule
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, AddNorm
from app.layers.experts.expert_mlp import ExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.layers.experts.shared_experts import SharedAmongExperts
from app.layers.norm import RMSNorm
from app.layers.quantized_layer import QuantizedLayer
from app.layers.weight import ShapeMismatch, Weight
from app.loading.load_formats.base import targets
from app.quantization.fp8_checkpoint import Fp8Checkpoint
from app.quantization.plain import PLAIN_METHOD
from app.quantization.stored_fp8 import StoredFp8
from app.worker.attention.backend import select_attention
from tests.layers.test_tensor_parallel_shares import Recorded

CPU = torch.device("cpu")
C, W, E, K = 20, 12, 7, 3  # hidden size, width of an expert, experts, of a token
SETTINGS = ExpertSettings(
    num_experts=E,
    intermediate_size=W,
    rule=RoutingRule(top_k=K, renormalize=True),
    layers=frozenset((0,)),
    shared_size=24,
    gates_shared=True,
)


class Partial(RankGroup):
    """One rank among several, whose sum stays its own: the test sums."""

    __slots__ = ()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def context(rank: int = 0, size: int = 1, *, whole_experts: bool = False) -> BuildContext:
    tp = Partial(rank, size, cast("Any", object()) if size > 1 else None)
    groups = ParallelGroups(tp=tp)
    groups = groups.with_whole_experts() if whole_experts else groups
    return BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], groups)


def step(slots: list[int]) -> ForwardContext:
    meta = cast("AttentionMetadata", type("Meta", (), {"slot_mapping": torch.tensor(slots)}))
    return ForwardContext(torch.arange(len(slots)), [meta], [])


@pytest.fixture(scope="module")
def judge() -> Any:
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        hidden_size=C, moe_intermediate_size=W, shared_expert_intermediate_size=24, num_experts=E,
        num_experts_per_tok=K, norm_topk_prob=True,
    )  # fmt: skip
    block = Qwen2MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        parameter.data.normal_(0, 0.5)
    return block


def stored(judge: Any) -> dict[str, torch.Tensor]:
    """The block's tensors as a checkpoint has them."""
    tensors = {name: tensor.detach() for name, tensor in judge.named_parameters() if ".experts." not in f".{name}"}
    tensors = {name.replace("shared_expert.", "shared_experts."): tensor for name, tensor in tensors.items()}
    for e in range(E):
        tensors[f"experts.{e}.gate_proj.weight"] = judge.experts.gate_up_proj[e, :W].detach()
        tensors[f"experts.{e}.up_proj.weight"] = judge.experts.gate_up_proj[e, W:].detach()
        tensors[f"experts.{e}.down_proj.weight"] = judge.experts.down_proj[e].detach()
    return tensors


def filled(
    ctx: BuildContext, tensors: dict[str, torch.Tensor], settings: ExpertSettings = SETTINGS
) -> tuple[ExpertMLP, int]:
    """The layer of a rank, and how many numbers of experts' weights it read."""
    layer, read = ExpertMLP(ctx, C, "silu", settings), 0
    for name, (weight, part) in targets(layer).items():
        tensor = Recorded(tensors[name.removeprefix(".")])  # this layer has no name
        weight.weight_loader(tensor, part)
        read += tensor.read if name.startswith("experts.") else 0
    for module in layer.modules():
        if isinstance(module, QuantizedLayer):
            module.pack()
    return layer, read


@pytest.mark.parametrize(("size", "whole_experts"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
@torch.inference_mode()
def test_ranks_sum_to_the_whole(judge: Any, size: int, whole_experts: bool) -> None:
    x, tensors = torch.randn(9, C), stored(judge)
    total, read = torch.zeros(9, C), 0
    for rank in range(size):
        layer, own = filled(context(rank, size, whole_experts=whole_experts), tensors)
        total, read = total + layer(x, PLAIN, step([5] * 9)), read + own
    torch.testing.assert_close(total, judge(x[None])[0], rtol=1e-4, atol=1e-5)
    assert read == E * 3 * W * C, "each expert's weight is read once between the ranks"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("gates_shared", [False, True])
@torch.inference_mode()
def test_what_tokens_share_is_computed_among_the_experts(judge: Any, size: int, gates_shared: bool) -> None:
    """Its own gate, if it has one, is a row of the others'."""
    x, tensors, settings = torch.randn(9, C), stored(judge), replace(SETTINGS, gates_shared=gates_shared)
    total = torch.zeros(9, C)
    for rank in range(size):
        layer, _ = filled(context(rank, size), tensors, settings)
        assert isinstance(layer.shared_experts, SharedAmongExperts)
        assert all(parameter.is_meta for parameter in layer.shared_experts.parameters())
        assert layer.gate.choose(x, step([5] * 9)).ids[0, -2:].tolist() == [E, E + 1]
        total += layer(x, PLAIN, step([5] * 9))
    _, weights, ids = judge.gate(x)
    own = judge.shared_expert_gate(x).sigmoid() if gates_shared else 1.0
    expected = judge.experts(x, ids, weights) + own * judge.shared_expert(x)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def in_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight in e4m3, and what each block of 4 x 4 is multiplied by."""
    blocks = weight.unflatten(0, (-1, 4)).unflatten(2, (-1, 4))
    scale = blocks.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(4, 0).repeat_interleave(4, 1)
    return {"weight": (weight / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("order", [1, -1])
@torch.inference_mode()
def test_what_tokens_share_lies_among_experts_that_are_stored_alike(judge: Any, is_alike: bool, order: int) -> None:
    """In fp8 blocks; else it is a layer of its own. Layers are packed in any order."""
    fp8 = StoredFp8(torch.float32, (4, 4), "weight_scale_inv")
    x, tensors = torch.randn(9, C), stored(judge)
    for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):  # as wide as an expert
        whole = tensors[f"shared_experts.{name}"]
        tensors[f"shared_experts.{name}"] = whole[:, :W] if "down" in name else whole[:W]
    quantized, true = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "experts." in name and (is_alike or "shared" not in name):
            stem = name.removesuffix(".weight")
            found = in_blocks(tensor)
            quantized |= {f"{stem}.{leaf}": one for leaf, one in found.items()}
            spread = found["weight_scale_inv"].repeat_interleave(4, 0).repeat_interleave(4, 1)
            true[name] = found["weight"].float() * spread
    ctx = replace(context(), quantization=Fp8Checkpoint((4, 4), False, ()))
    layer = ExpertMLP(ctx, C, "silu", replace(SETTINGS, shared_size=W))
    for name, module in layer.named_modules():
        if isinstance(module, QuantizedLayer):
            is_fp8 = "gate" not in name.split(".") and name != "gate" and (is_alike or "shared" not in name)
            module.store(dict.fromkeys(module.quantized_parts, fp8 if is_fp8 else PLAIN_METHOD))
    for name, (weight, part) in targets(layer).items():
        weight.weight_loader(Recorded(quantized[name.removeprefix(".")]), part)
    modules = [module for module in layer.modules() if isinstance(module, QuantizedLayer)]
    for module in modules[::order]:
        module.pack()
    plain, _ = filled(context(), true, replace(SETTINGS, shared_size=W))
    expected = plain(x, PLAIN, step([5] * 9))
    found = layer(x, PLAIN, step([5] * 9))
    assert cast("SharedAmongExperts", layer.shared_experts).is_among == is_alike
    assert (E in layer.gate.choose(x, step([5] * 9)).ids[0].tolist()) == is_alike
    assert layer.experts.num_shared == is_alike, "kernels count on an expert that every token goes to"
    assert {len(tensor) for tensor in layer.experts.slot_tensors} == {E + is_alike}, "no slot for what is elsewhere"
    assert float((found - expected).norm() / expected.norm()) < 1e-3


@torch.inference_mode()
def test_experts_alone_are_packed_again_when_their_weights_change(judge: Any) -> None:
    """In fp8 blocks: there is no slot behind theirs."""
    fp8, x = StoredFp8(torch.float32, (4, 4), "weight_scale_inv"), torch.randn(9, C)
    layer = ExpertMLP(
        replace(context(), quantization=Fp8Checkpoint((4, 4), False, ())),
        C, "silu", replace(SETTINGS, shared_size=0, gates_shared=False),
    )  # fmt: skip
    for name, module in layer.named_modules():
        if isinstance(module, QuantizedLayer):
            module.store(dict.fromkeys(module.quantized_parts, PLAIN_METHOD if name == "gate" else fp8))
    found = []
    for factor in (1.0, 1.0, -2.0):  # the same once more, then others
        for module in layer.modules():
            for leaf, weight in list(module._parameters.items()):
                if isinstance(weight, Weight) and weight.is_meta:  # what is packed has left it
                    setattr(module, leaf, weight.materialize(CPU))
        tensors = dict(stored(judge))
        for name in [name for name in tensors if name.startswith("experts.")]:
            scaled = tensors[name] * (factor if "down" in name else 1.0)
            tensors |= {f"{name.removesuffix('.weight')}.{leaf}": one for leaf, one in in_blocks(scaled).items()}
        for name, (weight, part) in targets(layer).items():
            weight.weight_loader(Recorded(tensors[name.removeprefix(".")]), part)
        for module in layer.modules():
            if isinstance(module, QuantizedLayer):
                module.pack()
        found.append(layer(x, PLAIN, step([5] * 9)))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], -2.0 * found[0])


@torch.inference_mode()
def test_padding_goes_to_no_expert_and_the_sum_is_normed(judge: Any) -> None:
    layer, _ = filled(context(), stored(judge))
    x, residual, norm = torch.randn(6, C), torch.randn(6, C), RMSNorm(context(), C, 1e-5)
    slots = [3, -1, 4, 8, -1, 0]
    routed = layer.gate.choose(x, step(slots)).ids
    assert (routed < 0).all(1).tolist() == [slot < 0 for slot in slots]
    live = routed.min(1).values >= 0
    normed, total = layer(x, AddNorm(residual, norm), step(slots))
    expected = judge(x[None])[0] + residual
    torch.testing.assert_close(total[live], expected[live], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(normed, norm(total))
    scaled, _ = layer(x, AddNorm(residual, norm, 0.5), step(slots))
    torch.testing.assert_close(scaled[live], norm(residual + 0.5 * (expected - residual))[live], rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_named(judge: Any) -> None:
    layer = ExpertMLP(context(), C, "silu", SETTINGS)
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        weight, part = next(target for own, target in targets(layer).items() if own.endswith(layer_part(name)))
        with pytest.raises(ShapeMismatch, match=r"\[3, 3\]"):
            weight.weight_loader(Recorded(torch.zeros(3, 3)), part)
    with pytest.raises(ConfigError, match="tensor_parallel_size=5 does not divide the experts' width 12"):
        ExpertMLP(context(1, 5), C, "silu", SETTINGS)
    with pytest.raises(UnsupportedError, match="unknown hidden_act 'relu'"):
        ExpertMLP(context(), C, "relu", replace(SETTINGS, shared_size=0))


def layer_part(name: str) -> str:
    return {"experts.gate_up_proj": ".gate_proj.weight", "experts.down_proj": ".down_proj.weight"}[name]
