"""Attention of pictures' tokens is replaced in the steps that show some, and nothing else is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from app.layers.attention import Attention
from app.layers.picture_attention import SPANS, PictureAttention


def test_only_what_is_shown_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = PictureAttention.__new__(PictureAttention)
    nn.Module.__init__(layer)
    layer.layer_index, layer.scale, layer.sliding_window, layer.kv_scales = 0, 0.4, None, None
    query, cache = torch.randn(9, 2, 8), torch.randn(6, 2, 1, 4, 8)
    monkeypatch.setattr(Attention, "attend", lambda *_: torch.zeros(9, 2, 8))
    meta = SimpleNamespace(block_table=torch.tensor([[0, 1], [4, 2]]))
    ctx: Any = SimpleNamespace(inputs={}, kv_caches=[cache], attention=[meta])
    assert not layer.attend(query, ctx).any()
    ctx.inputs[SPANS] = torch.tensor([[1, 5, 3, 3, 6]])
    out = layer.attend(query, ctx)
    assert not out[:5].any()
    assert not out[8:].any()
    kv = cache[[4, 2]].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, 0, :6]  # all of the request so far
    expected = torch.softmax(0.4 * query[5:8] @ kv[0].T, dim=-1) @ kv[1]
    torch.testing.assert_close(out[5:8], expected)
