"""Attention of encoders against its definition, at odd sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from app.kernels.attention.encoder import EncoderPlan, naive_encoder_attention, plan_encoder
from app.kernels.attention.encoder_groups import GroupPlan
from app.kernels.attention.triton_encoder import ROWS, TilePlan, choose_tile, list_tiles

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")  # Triton's interpreter runs where there is no GPU
LENGTHS = ([1], [7, 1, 33, 8, 8, 64, 9, 2], [300, 3, 129], [16] * 12)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 9, 70])
@pytest.mark.parametrize("make", [GroupPlan, TilePlan])
@pytest.mark.parametrize("is_causal", [False, True])
def test_each_text_sees_itself_only(
    lengths: list[int], window: int | None, make: type[EncoderPlan], is_causal: bool
) -> None:
    torch.manual_seed(0)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    query, key, value = torch.randn(3, starts[-1], 3, 24, device=DEVICE).unbind()
    found = make(starts, DEVICE).attend(query, key, value, 24**-0.5, window, is_causal=is_causal)
    expected = naive_encoder_attention(query, key, value, starts, 24**-0.5, window, is_causal=is_causal)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 65])
@pytest.mark.parametrize("is_causal", [False, True])
def test_16_bits_on_a_gpu(dtype: torch.dtype, head_dim: int, window: int | None, is_causal: bool) -> None:
    torch.manual_seed(0)
    lengths = [1, 700, 128, 33, 512, 511, 4, 90]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    heads = torch.randn(starts[-1], 8, head_dim, device=DEVICE, dtype=dtype)
    query, key, value = heads.split((4, 2, 2), 1)  # as they lie in a product
    found = plan_encoder(starts, DEVICE).attend(query, key, value, head_dim**-0.5, window, is_causal=is_causal)
    wide = [x.float().repeat_interleave(n, 1) for x, n in ((query, 1), (key, 2), (value, 2))]
    expected = naive_encoder_attention(*wide, starts, head_dim**-0.5, window, is_causal=is_causal)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_heads_that_share_keys_and_lie_side_by_side() -> None:
    torch.manual_seed(3)
    starts = [0, 5, 135, 300]
    heads = torch.randn(starts[-1], 8, 16, device=DEVICE)
    query, key, value = heads.split((4, 2, 2), 1)
    found = TilePlan(starts, DEVICE).attend(query, key, value, 0.3)
    wide = [x.repeat_interleave(n, 1) for x, n in ((query, 1), (key, 2), (value, 2))]
    torch.testing.assert_close(found, naive_encoder_attention(*wide, starts, 0.3), atol=1e-5, rtol=1e-5)


def test_tiles_cover_each_token_once_the_longest_texts_first() -> None:
    starts = [0, 3, 303, 303, 431, 432]
    tiles = list_tiles(starts, 128)
    assert tiles.tolist() == [[3, 300, 0], [3, 300, 128], [3, 300, 256], [303, 128, 0], [0, 3, 0], [431, 1, 0]]
    assert list_tiles(starts, 128, is_causal=True).tolist() == [
        *([3, 300, 256], [3, 300, 128], [3, 300, 0], [303, 128, 0], [0, 3, 0], [431, 1, 0])
    ]
    assert all(
        choose_tile(size, dtype).rows == ROWS for size in (16, 80, 128, 256) for dtype in (torch.float32, torch.half)
    )


def test_what_is_added_to_scores_and_heads_that_share_keys() -> None:
    torch.manual_seed(1)
    lengths = [5, 3, 300, 5]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    query = torch.randn(starts[-1], 4, 8)
    key, value = torch.randn(2, starts[-1], 2, 8).unbind()
    table = torch.randn(4, 300, 300)

    def bias(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return table[:, : q.shape[2], : q.shape[2]].unsqueeze(0)

    found = plan_encoder(starts, torch.device("cpu")).attend(query, key, value, 0.3, None, bias)
    for start, end in pairwise(starts):
        q, k, v = (
            x[start:end].transpose(0, 1) for x in (query, *(one.repeat_interleave(2, 1) for one in (key, value)))
        )
        probs = (q @ k.transpose(1, 2) * 0.3 + table[:, : end - start, : end - start]).softmax(-1)
        torch.testing.assert_close(found[start:end], (probs @ v).transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("make", [GroupPlan, TilePlan])
def test_tokens_that_are_not_seen(window: int | None, make: type[EncoderPlan]) -> None:
    """Padding of another text beside them, and long texts whose windows are computed in blocks."""
    torch.manual_seed(2)
    lengths, num_seen = [7, 9, 30, 80], [7, 3, 12, 70]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    query, key, value = torch.randn(3, starts[-1], 2, 8).unbind()
    places = torch.cat([torch.arange(length) for length in lengths])
    seen = places < torch.tensor(num_seen).repeat_interleave(torch.tensor(lengths))
    on_device = [x.to(DEVICE) for x in (query, key, value)]
    found = make(starts, DEVICE).attend(*on_device, 0.3, window, None, seen.to(DEVICE)).cpu()
    assert found.isfinite().all()
    for (start, end), count in zip(pairwise(starts), num_seen, strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        offsets = torch.arange(end - start)
        hidden = offsets.expand(end - start, -1) >= count
        if window is not None:
            hidden = hidden | ((offsets[:, None] - offsets).abs() >= window)
        probs = (q @ k.transpose(1, 2) * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
        some = ~hidden.all(1)  # of what sees nothing, nothing is asked
        torch.testing.assert_close(found[start:end][some], (probs @ v).transpose(0, 1)[some], atol=1e-5, rtol=1e-5)


def test_padding_is_bounded() -> None:
    starts = [0, *torch.randint(1, 300, (200,), generator=torch.Generator().manual_seed(1)).cumsum(0).tolist()]
    plan = GroupPlan(starts, torch.device("cpu"))
    padded = sum(group.shape[0] * group.shape[1] for group in plan.groups)
    assert padded < 1.3 * starts[-1] + 8 * 200
    assert sorted(int(row) for group in plan.groups for row in group.targets) == list(range(starts[-1]))
