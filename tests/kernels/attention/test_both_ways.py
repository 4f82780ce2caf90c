"""A picture's tokens see what is before them within the window, and all of it that is behind them: key by key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from app.kernels.attention.both_ways import PictureSpan, attend_both_ways


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("first", [18, 21])
def test_every_token_sees_what_it_shall(window: int | None, first: int) -> None:
    torch.manual_seed(0)
    size, span = 4, PictureSpan(request=0, token=3, first=first, begin=18, end=26)
    cache = torch.randn(32, 2, 2, size, 8)
    blocks = torch.randperm(32)[:10].int()
    query = torch.randn(span.end - first, 4, 8)
    found = attend_both_ways(query, cache, blocks, span, 0.3, window)
    assert span.tokens == slice(3, 3 + 26 - first)
    for place, token in enumerate(query):
        position = first + place
        lowest = 0 if window is None else max(0, position - window + 1)
        seen = range(lowest, 26)  # the picture ends there
        for head in range(4):
            kv = torch.stack([cache[int(blocks[at // size]), :, head // 2, at % size] for at in seen], dim=1)
            expected = torch.softmax(0.3 * kv[0] @ token[head], dim=0) @ kv[1]
            torch.testing.assert_close(found[place, head], expected, atol=1e-5, rtol=1e-5)


def test_a_cache_of_8_bits_is_read_with_its_scales() -> None:
    torch.manual_seed(1)
    span, scales = PictureSpan(0, 0, 2, 2, 6), torch.tensor([[0.5, 2.0], [1.5, 0.25]])
    stored = torch.randn(4, 2, 2, 4, 8).to(torch.float8_e4m3fn)
    query, blocks = torch.randn(4, 2, 8), torch.tensor([3, 1], dtype=torch.int32)
    plain = stored.float() * scales[None, :, :, None, None]
    found = attend_both_ways(query, stored, blocks, span, 0.3, kv_scales=scales)
    torch.testing.assert_close(found, attend_both_ways(query, plain, blocks, span, 0.3))


def test_a_long_context_takes_the_memory_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    attend = F.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        sizes.append(key.untyped_storage().nbytes())
        return attend(query, key, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    cache, blocks = torch.randn(2, 2, 4, 16, 8), torch.zeros(64, dtype=torch.int32)
    attend_both_ways(torch.randn(4, 16, 8), cache, blocks, PictureSpan(0, 0, 1020, 1020, 1024), 0.3)
    assert sizes == [2 * 1024 * 8 * 4] * 4  # keys and values, once for all query heads that read them
