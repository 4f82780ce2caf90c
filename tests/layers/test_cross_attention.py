"""Cross attention over paged slots is PyTorch's own attention, whatever slots tokens read and whoever shares them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from app.distributed.parallel_groups import ParallelGroups
from app.kernels.attention import ENCODED_TOKENS, AttentionMetadata, EncodedStep
from app.kernels.attention.reference import OPS
from app.layers.attention import AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.cross_attention import LENGTHS, SLOTS, CrossAttention
from app.layers.epilogue import PLAIN

SIZE, HEADS, WIDTH, POSITIONS, BLOCK = 24, 3, 8, 21, 4
CTX = BuildContext(torch.float32, torch.device("cpu"), 64, OPS, ParallelGroups())


def layer(ctx: BuildContext = CTX) -> CrossAttention:
    settings = AttentionSettings(SIZE, HEADS, HEADS, WIDTH, qkv_bias=True, output_bias=True, norm_eps=1e-5)
    made = CrossAttention(ctx, settings, 0, POSITIONS)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return made


def context(cache: torch.Tensor, num_tokens: int, inputs: dict[str, torch.Tensor]) -> ForwardContext:
    places = torch.arange(num_tokens)
    meta = AttentionMetadata(
        torch.tensor([0, num_tokens]), torch.tensor([num_tokens]), torch.zeros(1, 1), places, num_tokens, num_tokens, 0
    )
    return ForwardContext(places, [meta], [cache], inputs=inputs)


@torch.inference_mode()
def test_tokens_see_their_slot_whole() -> None:
    made, spec = layer(), layer().cache_spec()
    assert (spec.encoder_positions, spec.num_encoder_blocks(BLOCK)) == (POSITIONS, 6)
    cache = torch.full((3 * 6, *spec.block_shape(BLOCK)), 7.0)
    encoded = {slot: torch.randn(length, SIZE) for slot, length in ((0, POSITIONS), (2, 5))}
    for slot, states in encoded.items():
        made.write(states, torch.arange(len(states)) + slot * 6 * BLOCK, cache)
    slots = torch.tensor([2, 0, 0, 2], dtype=torch.int32)
    lengths = torch.tensor([len(encoded[slot]) for slot in slots.tolist()], dtype=torch.int32)
    x = torch.randn(4, SIZE)
    out = made(x, PLAIN, context(cache, 4, {SLOTS: slots, LENGTHS: lengths}))
    query = made.q_proj(x).view(4, HEADS, 1, WIDTH)
    for token, slot in enumerate(slots.tolist()):
        kv = made.kv_proj(encoded[slot]).view(-1, 2, HEADS, WIDTH)
        key, value = kv.permute(1, 2, 0, 3)
        expected = made.o_proj(F.scaled_dot_product_attention(query[token], key, value).reshape(1, -1), PLAIN)
        torch.testing.assert_close(out[token : token + 1], expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_step_that_nobody_asked_for_reads_the_first_slot() -> None:
    made, spec = layer(), layer().cache_spec()
    cache = torch.zeros(6, *spec.block_shape(BLOCK))
    made.write(torch.randn(POSITIONS, SIZE), torch.arange(POSITIONS), cache)
    x = torch.randn(2, SIZE)
    whole = torch.full((2,), POSITIONS, dtype=torch.int32)
    given = {SLOTS: torch.zeros(2, dtype=torch.int32), LENGTHS: whole}
    expected = made(x, PLAIN, context(cache, 2, given))
    assert torch.equal(made(x, PLAIN, context(cache, 2, {})), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_steps_of_any_size_run_one_kernel_in_fp32(dtype: torch.dtype) -> None:
    """That of few tokens cuts sums otherwise, and neighbours may not decide about them."""
    noted: list[int] = []

    def attend(query: torch.Tensor, cache: torch.Tensor, step: EncodedStep, scale: float) -> torch.Tensor:
        noted.append(len(query))
        return torch.zeros_like(query)

    made = layer(replace(CTX, dtype=dtype, attention_ops=replace(OPS, encoded=lambda head_dim, num_positions: attend)))
    cache = torch.zeros(6, *made.cache_spec().block_shape(BLOCK), dtype=dtype)
    for num_tokens in (2, ENCODED_TOKENS + 1):
        made(torch.randn(num_tokens, SIZE, dtype=dtype), PLAIN, context(cache, num_tokens, {}))
    assert noted == ([] if dtype == torch.float32 else [2])


def test_layers_plan_apart_from_those_of_tokens() -> None:
    made = layer()
    assert made.plan_key != super(CrossAttention, made).plan_key
    assert made.plan_key == layer().plan_key
    with pytest.raises(AttributeError):
        replace(made.cache_spec()).encoder_positions = 3  # type: ignore[misc]


def test_no_adapter_is_in_what_requests_share() -> None:
    """Keys and values of an encoder's output are found by what was encoded, whichever adapter asked first."""
    made = layer()
    assert not made.kv_proj.takes_delta
    assert made.q_proj.takes_delta
    assert made.o_proj.takes_delta
