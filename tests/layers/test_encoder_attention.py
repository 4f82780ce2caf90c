"""Attention of encoders as a layer; transformers judges it within models (models/families/test_encoder_families)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.distributed.parallel_groups import ParallelGroups
from app.errors import UnsupportedError
from app.layers.attention import AttentionSettings
from app.layers.context import BuildContext
from app.layers.encoder_attention import EncoderAttention
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")
CONTEXT = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())
SETTINGS = AttentionSettings(32, 4, 2, 8, qkv_bias=True, output_bias=False, norm_eps=1e-6)


@pytest.mark.parametrize("asked", [{"soft_cap": 30.0}, {"alibi_slopes": (0.5,) * 4}, {"sinks": True}, {"clip": 8.0}])
def test_what_has_no_form_in_both_directions_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="both directions"):
        EncoderAttention(CONTEXT, replace(SETTINGS, **asked), 0)


def test_nothing_is_cached_and_all_layers_share_a_plan() -> None:
    first, second = (EncoderAttention(CONTEXT, SETTINGS, place) for place in range(2))
    assert first.cache_spec() is None
    assert first.plan_key == second.plan_key
