"""Causal attention within texts on Hopper GPUs against its definition, and the calls that its kernel takes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from app.kernels.attention import gluon_pipeline, gluon_texts, triton_encoder
from app.kernels.attention.encoder import TILE_KERNELS, Sight, naive_encoder_attention
from app.kernels.attention.triton_encoder import ROWS, StaticPlan, TilePlan, list_tiles
from app.kernels.kernel_table import HOPPER
from tests.kernels.stub_gpu import as_on

ON_HOPPER = torch.cuda.is_available() and HOPPER.are_met(torch.device("cuda", 0))
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
SCALE = 0.1
CAUSAL = Sight(SCALE, is_causal=True)
LENGTHS = ([1], [64, 65, 128, 129], [1, 700, 128, 33, 512, 511, 4, 90], [257] * 40, [3] * 300)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads_of(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Heads:
    """Queries, keys and values as they lie in a product."""
    parts = [num_heads, num_kv_heads, num_kv_heads]
    device = "cuda" if ON_HOPPER else "cpu"
    query, key, value = torch.split(torch.randn(num_tokens, sum(parts), head_dim, dtype=dtype, device=device), parts, 1)
    return query, key, value


def truth(heads: Heads, starts: list[int]) -> torch.Tensor:
    group = heads[0].shape[1] // heads[1].shape[1]
    query, key, value = (x.float().repeat_interleave(group if i else 1, 1) for i, x in enumerate(heads))
    return naive_encoder_attention(query, key, value, starts, SCALE, is_causal=True)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} texts")
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 1), (16, 8), (32, 8)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_text_sees_itself_only(lengths: list[int], num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    starts = [0, *accumulate(lengths)]
    heads = heads_of(starts[-1], num_heads, num_kv_heads, 128, dtype)
    assert gluon_texts.serves(*heads, CAUSAL)
    found = TilePlan(starts, heads[0].device, is_causal=True).attend(*heads, SCALE, is_causal=True)
    torch.testing.assert_close(found.float(), truth(heads, starts), atol=3e-2, rtol=2e-2)


@pytest.mark.gpu
@on_hopper
def test_a_bad_neighbour_stays_alone_and_lists_may_be_padded() -> None:
    torch.manual_seed(1)
    starts = [0, *accumulate([70, 33, 5, 128, 64])]
    heads = heads_of(starts[-1], 4, 2, 128, torch.bfloat16)
    expected = truth(heads, starts)
    for x in heads:
        x[starts[1] : starts[2]] = float("nan")
    tiles = torch.cat([torch.from_numpy(list_tiles(starts, is_causal=True)), torch.zeros(30, 3).int()])
    found = StaticPlan(tiles.to(heads[0].device)).attend(*heads, SCALE, is_causal=True)
    for rows in (slice(starts[1]), slice(starts[2], None)):
        torch.testing.assert_close(found[rows].float(), expected[rows], atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("heads", "dtype", "sight", "is_served"),
    [
        ((16, 8, 128), torch.bfloat16, CAUSAL, True),
        ((32, 8, 128), torch.float16, CAUSAL, True),
        ((32, 8, 128), torch.float16, Sight(SCALE), False),
        ((12, 12, 64), torch.bfloat16, CAUSAL, False),
        ((12, 4, 128), torch.bfloat16, CAUSAL, False),  # three heads have the same keys
        ((12, 4, 64), torch.bfloat16, CAUSAL, False),
        ((16, 16, 128), torch.bfloat16, CAUSAL, False),  # keys of two do not fit
        ((16, 8, 80), torch.bfloat16, CAUSAL, False),
        ((16, 8, 128), torch.float32, CAUSAL, False),
        ((16, 8, 128), torch.bfloat16, Sight(SCALE, 100, is_causal=True), False),
        ((16, 8, 128), torch.bfloat16, Sight(SCALE, None, torch.ones(3)), False),
    ],
)
def test_calls_that_it_serves(heads: tuple[int, int, int], dtype: torch.dtype, sight: Sight, is_served: bool) -> None:
    query, key, value = heads_of(3, *heads, dtype)
    assert gluon_texts.serves(query, key, value, sight) is is_served
    assert not gluon_texts.serves(query[..., :-8], key[..., :-8], value[..., :-8], sight)


@pytest.mark.parametrize("generation", [0, 8, 9, 10])
def test_it_is_for_hopper_alone(generation: int) -> None:
    with as_on(generation):
        kernels = TILE_KERNELS.all_on(torch.device("cpu"))
    assert (gluon_texts.KERNEL in kernels) == (generation == 9)
    assert kernels[-1] is triton_encoder.KERNEL
    assert gluon_pipeline.ROWS.value == ROWS
