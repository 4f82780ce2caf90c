"""Decides which groups the model's layers form, so that those with a sliding window keep no more than their window.

A stage of a pipeline knows its own layers only, but there is one set of block tables for all stages: they tell each
other first what their layers see, and then come to the same groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from app.config.engine import EngineConfig
from app.layers.attention_layer import AttentionLayer
from app.layers.cache_spec import LayerCacheSpec
from app.layers.context import BuildContext
from app.records.kv_groups import WHOLE, Window, Windows, choose_groups
from app.worker.attention.kv_cache import layer_specs

MOST_LAYERS = 1024  # of a stage
_ALL, _NO_LAYER, _OTHER_SHAPE = 0, -1, -2


def select_groups(config: EngineConfig, layers: Sequence[AttentionLayer], ctx: BuildContext) -> Windows:
    """The groups' windows, the same on every rank; one group of all layers where the option says so, where layers do
    not keep the same of each token, as blocks have one size, or where some keep states. Collective over a pipeline."""
    specs, keeps_states = layer_specs(layers), any(layer.state_spec() for layer in layers)
    if config.hybrid_kv_cache == "off" or not (specs or keeps_states):
        return WHOLE
    windows = _of_all_stages(specs, keeps_states, ctx)
    return WHOLE if windows is None else choose_groups(windows, ctx.max_model_len, config.block_size)


def _of_all_stages(specs: Sequence[LayerCacheSpec], keeps_states: bool, ctx: BuildContext) -> list[Window] | None:
    """The window of every layer of the model; None where the layers keep different things."""
    is_same = not keeps_states and len({replace(spec, sliding_window=None) for spec in specs}) == 1
    codes = [spec.sliding_window or _ALL for spec in specs] if is_same else [_OTHER_SHAPE]
    mine = torch.full((MOST_LAYERS,), _NO_LAYER, dtype=torch.int64)
    mine[: len(codes)] = torch.tensor(codes)
    found: list[int] = ctx.groups.pp.all_gather(mine.to(ctx.device), dim=0).tolist()
    if _OTHER_SHAPE in found:
        return None
    return [code or None for code in found if code != _NO_LAYER]
