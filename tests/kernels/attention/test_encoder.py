"""Attention of encoders against its definition, at odd sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from app.kernels.attention.encoder import encoder_attention, naive_encoder_attention, plan_encoder

LENGTHS = ([1], [7, 1, 33, 8, 8, 64, 9, 2], [512, 3, 511], [16] * 40)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 9, 70])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_text_sees_itself_only(lengths: list[int], window: int | None, device: str) -> None:
    torch.manual_seed(0)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    query, key, value = torch.randn(3, starts[-1], 3, 24, device=device).unbind()
    found = encoder_attention(query, key, value, plan_encoder(starts, torch.device(device)), 24**-0.5, window)
    torch.testing.assert_close(
        found, naive_encoder_attention(query, key, value, starts, 24**-0.5, window), atol=1e-5, rtol=1e-5
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

    found = encoder_attention(query, key, value, plan_encoder(starts, torch.device("cpu")), 0.3, None, bias)
    for start, end in pairwise(starts):
        q, k, v = (
            x[start:end].transpose(0, 1) for x in (query, *(one.repeat_interleave(2, 1) for one in (key, value)))
        )
        probs = (q @ k.transpose(1, 2) * 0.3 + table[:, : end - start, : end - start]).softmax(-1)
        torch.testing.assert_close(found[start:end], (probs @ v).transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_tokens_that_are_not_seen(window: int | None) -> None:
    """Padding of another text beside them, and long texts whose windows are computed in blocks."""
    torch.manual_seed(2)
    lengths, num_seen = [7, 9, 30, 80], [7, 3, 12, 70]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    query, key, value = torch.randn(3, starts[-1], 2, 8).unbind()
    places = torch.cat([torch.arange(length) for length in lengths])
    seen = places < torch.tensor(num_seen).repeat_interleave(torch.tensor(lengths))
    plan = plan_encoder(starts, torch.device("cpu"))
    found = encoder_attention(query, key, value, plan, 0.3, window, None, seen)
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
    plan = plan_encoder(starts, torch.device("cpu"))
    padded = sum(group.shape[0] * group.shape[1] for group in plan.groups)
    assert padded < 1.3 * starts[-1] + 8 * 200
    assert sorted(int(row) for group in plan.groups for row in group.targets) == list(range(starts[-1]))
