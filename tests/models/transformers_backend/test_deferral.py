"""Sums and norms join the products before them, through transformers' code: the same kernels as in our own modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.kernels.attention import triton_ops
from app.kernels.fused import FUSED_OPS
from app.kernels.fused import triton_ops as fused_kernels
from app.kernels.gemm import LINEAR_OPS, DeferredNorm, small_tiles, triton_small
from app.layers.context import BuildContext
from app.loading.loader import load_model
from app.models.transformers_backend.attention import PagedAttention
from app.models.transformers_backend.deferral import Deferred, Site, Sum, tensor_of
from tests.models.families.test_triton_kernels import DEVICE, decode_launches, empty_caches, step
from tests.models.transformers_backend.architectures import ARCHITECTURES
from tests.tiny_models import hf_model, tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
# Operations that wait for the device: a step with one of them cannot be captured.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2")


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    ctx = BuildContext(dtype, DEVICE, 512, triton_ops.OPS, ParallelGroups())
    info = replace(ModelInfo.from_directory(str(tiny_model(family, **changes))), impl="transformers")
    return load_model(info, ctx, "safetensors", 0)


@pytest.fixture
def _triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FUSED_OPS, "on", lambda *_, **__: fused_kernels.OPS)


@pytest.mark.usefixtures("_triton_everywhere")
@torch.inference_mode()
def test_products_of_few_rows_take_sums_and_norms_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LINEAR_OPS, "on", lambda *_, **__: triton_small.OPS)
    monkeypatch.setattr(small_tiles, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(triton_small, "may_defer_norm", lambda *_: True)
    monkeypatch.setattr(small_tiles, "MOST_ROWS", 4)
    seen: list[bool] = []
    small_linear = triton_small.small_linear

    def spy(x: Any, *args: Any, **keywords: Any) -> torch.Tensor:
        seen.append(isinstance(x, DeferredNorm))
        return small_linear(x, *args, **keywords)

    monkeypatch.setattr(triton_small, "small_linear", spy)
    model, judge = model_of("llama", **SIZES), hf_model(tiny_model("llama", **SIZES))
    token_ids = torch.randint(3, 331, (14,), generator=torch.Generator().manual_seed(0)).tolist()
    truth = judge(torch.tensor([token_ids], device=judge.device)).logits[0].float().cpu()
    rotated: list[int] = []
    for layer in model.attention_layers:
        layer.fused = replace(layer.fused, rotate_and_write=spied(layer.fused.rotate_and_write, rotated))
    caches = empty_caches(model)
    hidden = [step(model, caches, token_ids[:10], 0)]
    assert not seen
    hidden += [step(model, caches, token_ids[10:13], 10), step(model, caches, token_ids[13:], 13)]
    assert sum(seen) == 2 * 3  # all but the first of two layers' four, as in our own modules
    assert rotated == [10, 10, 3, 3, 1, 1]  # tokens of each layer's rotation, which also writes
    torch.testing.assert_close(model.raw_logits(torch.cat(hidden)).float().cpu(), truth, rtol=1e-3, atol=1e-3)


def spied(rotate_and_write: Any, tokens: list[int]) -> Any:
    def call(heads: torch.Tensor, *args: Any) -> Any:
        tokens.append(len(heads))
        return rotate_and_write(heads, *args)

    return call


class NoWaiting(TorchDispatchMode):
    """Fails where a captured step would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def _no_attention(layer: PagedAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Any:
    if layer.rotation is not None:
        layer.rotation.take(query, key, value)
    return query.new_zeros(1, query.shape[2], layer.num_heads, layer.value_dim)


DENSE = [name for name, changes in ARCHITECTURES.items() if "num_experts_per_tok" not in changes]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("llama", "nemotron") else pytest.mark.slow) for name in DENSE]
)
@torch.inference_mode()
def test_no_step_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts do on a CPU; on a GPU their products are grouped without it."""
    model = model_of(name, **ARCHITECTURES[name])
    monkeypatch.setattr(PagedAttention, "__call__", _no_attention)
    ids, positions = torch.tensor([5, 6, 7]), torch.tensor([3, 0, 9])
    with NoWaiting():
        out = model._trunk[0](input_ids=ids[None], position_ids=positions[None], use_cache=False)
        model.raw_logits(tensor_of(out.last_hidden_state)[0])


def test_what_stands_for_a_tensor_is_one_to_everybody_else() -> None:
    x, residual = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    site = Site()

    def product() -> Any:
        return site.result(lambda epilogue: epilogue.after(x.view(3, 4)), x.shape, x)

    total = residual + product()
    assert isinstance(total, Sum)
    assert total.is_open
    torch.testing.assert_close(total * 2, (residual + x) * 2)
    assert not total.is_open
    torch.testing.assert_close(tensor_of(product() + residual), total.value())
    torch.testing.assert_close(torch.cat([product(), x]), torch.cat([x, x]))
    torch.testing.assert_close(torch.nn.functional.gelu(product()), torch.nn.functional.gelu(x))
    torch.testing.assert_close(3 - product()[0], 3 - x[0])
    torch.testing.assert_close(tensor_of(residual + product() + product()), residual + x + x)
    assert product().dtype == x.dtype
    assert product().transpose(0, 1).shape == (3, 1, 4)
    wider = product() + torch.randn(2, 3, 4)  # not the same shape: no residual
    assert isinstance(wider, torch.Tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_launches_of_a_decode_layer_are_those_of_our_own_modules(dtype: torch.dtype) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}

    def launches(impl: Any, num_layers: int) -> int:
        directory = str(tiny_model("llama", num_hidden_layers=num_layers, **sizes))
        ctx = BuildContext(dtype, DEVICE, 512, triton_ops.OPS, ParallelGroups())
        info = replace(ModelInfo.from_directory(directory), impl=impl)
        return sum(decode_launches(load_model(info, ctx, "safetensors", 0)).values())

    grown = {impl: launches(impl, 4) - launches(impl, 2) for impl in ("native", "transformers")}
    assert grown["transformers"] == grown["native"], grown


def test_a_stand_in_is_compared_by_its_numbers() -> None:
    """Python's own answer would be whether both are one object."""
    numbers = torch.tensor([[0.0, 2.0]])
    product = Deferred(Site(), lambda epilogue: numbers, numbers.shape, numbers)
    assert (product == 0).tolist() == [[True, False]]  # type: ignore[attr-defined]
    assert (product != 0).tolist() == [[False, True]]  # type: ignore[attr-defined]
