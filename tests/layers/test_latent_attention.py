"""What ranks hold of latent attention, its scale, and that both ways through it come to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.errors import ConfigError
from app.kernels.attention import KV_FP8
from app.layers.context import ForwardContext
from app.layers.epilogue import PLAIN
from app.layers.latent_attention import LatentAttention, LatentSettings
from app.layers.latent_linear import LatentInputLinear, LatentUpLinear
from app.layers.latent_step import NEVER
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.weight import ShapeMismatch
from tests.kernels.mla.test_reference import step
from tests.layers.test_tensor_parallel_shares import CPU, Recorded, context

HIDDEN, HEADS = 48, 4
SETTINGS = LatentSettings(latent_size=64, nope_dim=16, rope_dim=8, value_dim=12, query_rank=20, scale=24**-0.5)


def layer(settings: LatentSettings, kv_dtype: torch.dtype | None = None) -> LatentAttention:
    rotary = RotaryEmbedding(RopeSettings(settings.rope_dim, 100.0), 64, torch.float32, CPU)
    made = LatentAttention(replace(context(0, 1), kv_dtype=kv_dtype), settings, HIDDEN, HEADS, 0, rotary)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
    return made


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("query_rank", [None, 20])
def test_latents_are_whole_on_every_rank_and_heads_are_shared_out(rank: int, query_rank: int | None) -> None:
    query, latent = torch.randn(query_rank or 96, HIDDEN), torch.randn(72, HIDDEN)
    linear = LatentInputLinear(context(rank, 2), HIDDEN, 96, query_rank, 72, bias=False)
    read = {"q_proj" if query_rank is None else "q_a_proj": Recorded(query), "kv_a_proj_with_mqa": Recorded(latent)}
    for name, tensor in read.items():
        linear.weight.weight_loader(tensor, name)
    own = query[rank * 48 :][:48] if query_rank is None else query
    assert linear.sizes == [len(own), 72]
    assert torch.equal(linear.weight, torch.cat((own, latent)))
    assert [tensor.read for tensor in read.values()] == [own.numel(), latent.numel()]
    with pytest.raises(ShapeMismatch, match=r"the model expects \[72, 48\]"):
        linear.weight.weight_loader(Recorded(torch.randn(73, HIDDEN)), "kv_a_proj_with_mqa")


def test_a_rank_has_the_functions_of_its_heads() -> None:
    whole = torch.randn(4 * 28, 64)
    up = LatentUpLinear(context(1, 2), 64, 4, 16, 12)
    up.weight.weight_loader(Recorded(whole))
    up.pack()
    assert torch.equal(up.heads, whole.view(4, 28, 64)[2:])


def test_absorbed_and_expanded_are_the_same() -> None:
    attention = layer(SETTINGS)
    caches, outs = torch.randn(16, 16, SETTINGS.width).repeat(2, 1, 1, 1), []
    x = torch.randn(1 + 7 + 20, HIDDEN)
    for cache, least in zip(caches, (NEVER, 5), strict=True):
        meta = step([1, 7, 20], [40, 3, 17])
        meta.slot_mapping = torch.full((len(x),), -1)
        attention.least_expanded = least
        attention.plan(meta, 16)
        ctx = ForwardContext(torch.arange(len(x)), [meta], [cache])
        outs.append(attention(x, PLAIN, ctx))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


def test_a_block_has_one_vector_a_token() -> None:
    spec = layer(SETTINGS).cache_spec()
    assert spec.block_shape(16) == (16, 72)
    assert spec.bytes_per_token == 72 * 4
    assert layer(SETTINGS, KV_FP8).cache_spec().bytes_per_token == 72


def test_the_larger_of_two_scales_is_taken_until_others_come() -> None:
    attention = layer(SETTINGS, KV_FP8)
    assert attention.kv_scales is not None
    attention.set_kv_scales("k", torch.tensor([0.25]))
    attention.set_kv_scales("v", torch.tensor([0.5]))
    assert attention.kv_scales.tolist() == [0.5]
    attention.reset_kv_scales()
    assert attention.kv_scales.tolist() == [1.0]
    attention.set_kv_scales("v", torch.tensor([0.125]))
    assert attention.kv_scales.tolist() == [0.125]


def test_latents_are_not_kept_in_int8() -> None:
    with pytest.raises(ConfigError, match="latents are kept in fp8 or as they are") as raised:
        layer(SETTINGS, torch.int8)
    assert raised.value.param == "kv_cache_dtype"
