"""Multi-token prediction (DeepSeek-V3, 2024): a further layer of the checkpoint, trained for the token after the next.

It lies behind the last layer under the next number, with three tensors of its own, and is a layer of the target's
family otherwise. Embedding and head are the target's, of which checkpoints hold copies. Of several such layers the
first is used for all drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.mtp_layer import ARCHITECTURES, promises_mtp
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import ConfigError
from app.kernels.gemm import Activations
from app.layers.context import BuildContext, ForwardContext, HiddenStates
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.rotary import RotaryEmbedding
from app.layers.vocab import VocabEmbedding
from app.models import MODELS
from app.models.blocks import LayerPlace
from app.models.decoder import CausalLM
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import DecoderSettings, readable
from app.models.drafters.base import Drafter, Target


class SharedHead(nn.Module):
    """The norm before the head; the head itself is the target's."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings) -> None:
        super().__init__()
        self.norm = RMSNorm(ctx, settings.hidden_size, settings.norm_eps)


class MtpDrafter(Drafter):
    """The layer behind the target's last."""

    def __init__(self, ctx: BuildContext, info: ModelInfo, target: Target) -> None:
        super().__init__()
        check_mtp(info)
        self.target, self._family = target, MODELS.load(info.architecture)
        plain = readable(self._family.settings, info)
        self._index, self._settings = plain.num_layers, with_layer_behind(plain)
        s, blocks = self._settings, self._family.blocks_of(info)
        kind = s.rope_types[-1] if s.rope_types else ""
        rope = self._family.ropes(info, s, ctx.max_model_len)(kind)
        rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)
        layer: Any = (blocks.layer or PreNormLayer)(ctx, s, LayerPlace(self._index, 0, rotary), blocks)
        layer.enorm, layer.hnorm = (RMSNorm(ctx, s.hidden_size, s.norm_eps) for _ in range(2))
        layer.eh_proj = ReplicatedLinear(ctx, 2 * s.hidden_size, s.hidden_size, bias=False)
        layer.shared_head = SharedHead(ctx, s)
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({str(self._index): layer})})
        self._layer = (layer,)
        held = target.model.model.embed_tokens if isinstance(target.model, CausalLM) else None
        if held is None:  # in another stage
            layer.embed_tokens = held = VocabEmbedding(ctx, s.vocab_size, s.hidden_size)
        self._table = (held,)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel: those of the one layer, by the family's names."""
        prefix = f"model.layers.{self._index}."
        unread = [prefix + "shared_head.head."]
        if not hasattr(self._layer[0], "embed_tokens"):
            unread.append(prefix + "embed_tokens.")
        named = self._family.tensors(self._settings, name, tensor)
        return [(own, stored) for own, stored in named if own.startswith(prefix) and not own.startswith(tuple(unread))]

    def start(self, hidden: HiddenStates) -> torch.Tensor:
        """See Drafter."""
        return hidden.last

    def advance(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See Drafter. The first position was trained without a token."""
        normed, x = self._inputs(token_ids, features, ctx)
        total: torch.Tensor = self._layer[0](normed, x, None, ctx)[1]
        return total

    def keep(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> None:
        """See Drafter: without attention and experts."""
        self._layer[0].self_attn.keep(self._inputs(token_ids, features, ctx)[0], ctx)

    def _inputs(
        self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """Returns the layer's inputs [T, C], normed and not."""
        layer = self._layer[0]
        embedded = self._table[0](token_ids).masked_fill((ctx.positions == 0)[:, None], 0.0)
        x = layer.eh_proj(torch.cat((layer.enorm(embedded), layer.hnorm(features)), dim=-1))
        return x if layer.input_layernorm is None else layer.input_layernorm(x), x

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, C] -> [N, V]."""
        return self.target.model.raw_logits(self._layer[0].shared_head.norm(hidden))


def check_mtp(info: ModelInfo) -> None:
    """ConfigError where a model's checkpoint has no such layer."""
    if not promises_mtp(info):
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(
            f"speculative_config: method=mtp: the model ({info.architecture}, num_nextn_predict_layers="
            f"{info.hf_config.get('num_nextn_predict_layers', 0)}) has no layer that predicts further tokens; such a "
            f"layer is read of {known}",
            param="speculative_config",
        )


def with_layer_behind(settings: DecoderSettings) -> DecoderSettings:
    """The settings of a model with one layer more, which is like the last one: with experts where that has them."""
    s, last = settings, settings.num_layers - 1
    experts = s.experts
    if experts is not None and last in experts.layers:
        experts = replace(experts, layers=experts.layers | {s.num_layers})
    types = (*s.rope_types, s.rope_types[-1]) if s.rope_types else ()
    windows = (*s.sliding_windows, s.sliding_windows[-1])
    return replace(s, num_layers=s.num_layers + 1, experts=experts, rope_types=types, sliding_windows=windows)
