"""Multi-token prediction (DeepSeek-V3, 2024): a further layer of the checkpoint, trained for the token after the next.

It is a layer of the target's family behind the last one, with tensors of its own that join a token and a hidden state;
`app/checkpoints/mtp_layer.py` says how each family has it. Embedding and head are the target's, of which checkpoints
may hold copies. Of several such layers the first is used for all drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.mtp_layer import FORMS, promises_mtp, with_layer_behind
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import text_name
from app.errors import ConfigError
from app.kernels.gemm import Activations, materialize
from app.layers.context import BuildContext, ForwardContext, HiddenStates
from app.layers.replicated import ReplicatedLinear
from app.layers.rotary import RotaryEmbedding
from app.layers.vocab import VocabEmbedding
from app.models import MODELS
from app.models.blocks import LayerPlace
from app.models.decoder import CausalLM
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import readable
from app.models.drafters.base import Drafter, Target


class MtpDrafter(Drafter):
    """The layer behind the target's last."""

    def __init__(self, ctx: BuildContext, info: ModelInfo, target: Target) -> None:
        super().__init__()
        check_mtp(info)
        self.target, self._form, self._family = target, FORMS[info.architecture], MODELS.load(info.architecture)
        longer = with_layer_behind(info)
        settings = readable(self._family.settings, longer)
        self._settings = s = replace(settings, experts=None) if self._form.is_dense else settings
        self._index, blocks = info.num_layers, self._family.blocks_behind(longer)
        rope = self._family.ropes(longer, s, ctx.max_model_len)(s.rope_types[-1] if s.rope_types else "")
        rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)
        layer: Any = (blocks.layer or PreNormLayer)(ctx, s, LayerPlace(self._index, 0, rotary), blocks)
        layer.enorm, layer.hnorm = (blocks.norm(ctx, s, False) for _ in range(2))
        layer.norm = blocks.norm(ctx, s, False) if self._form.norm else None
        layer.eh_proj = ReplicatedLinear(ctx, 2 * s.hidden_size, s.hidden_size, bias=False)
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({str(self._index): layer})})
        self._layer = (layer,)
        held = target.model.model.embed_tokens if isinstance(target.model, CausalLM) else None
        if held is None:  # in another stage
            layer.embed_tokens = held = VocabEmbedding(ctx, s.vocab_size, s.hidden_size)
        self._table = (held,)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel: those of the one layer, by the family's names; the model's own table of tokens where this
        stage does not hold it."""
        prefix = f"model.layers.{self._index}."
        if hasattr(self._layer[0], "embed_tokens") and self._form.is_table(text_name(name) or ""):
            return [(f"{prefix}embed_tokens.weight", tensor)]
        own = self._form.own_name(name, self._index)
        return [] if own is None else self._family.tensors(self._settings, prefix + own, tensor)

    def start(self, hidden: HiddenStates) -> torch.Tensor:
        """See Drafter."""
        return hidden.last

    def advance(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See Drafter."""
        layer, (normed, x) = self._layer[0], self._inputs(token_ids, features, ctx)
        if self._form.norm == "features":
            return materialize(layer(normed, x, layer.norm, ctx)[0])
        total: torch.Tensor = layer(normed, x, None, ctx)[1]
        return total

    def keep(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> None:
        """See Drafter: without attention and experts."""
        self._layer[0].self_attn.keep(self._inputs(token_ids, features, ctx)[0], ctx)

    def _inputs(
        self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """Returns the layer's inputs [T, C], normed and not."""
        layer, embedded = self._layer[0], self._table[0](token_ids)
        if self._form.masks_first:
            embedded = embedded.masked_fill((ctx.positions == 0)[:, None], 0.0)
        parts = layer.enorm(embedded), layer.hnorm(features)
        x = layer.eh_proj(torch.cat(parts[::-1] if self._form.hidden_first else parts, dim=-1))
        return x if layer.input_layernorm is None else layer.input_layernorm(x), x

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, C] -> [N, V]."""
        normed = self._layer[0].norm(hidden) if self._form.norm == "head" else hidden
        return self.target.model.raw_logits(normed)


def check_mtp(info: ModelInfo) -> None:
    """ConfigError where a model's checkpoint has no such layer."""
    if promises_mtp(info):
        return
    form = FORMS.get(info.architecture)
    counted = "" if form is None else f", {form.counted_by}={info.hf_config.get(form.counted_by, 0)}"
    raise ConfigError(
        f"speculative_config: method=mtp: the model ({info.architecture}{counted}) has no layer that predicts further "
        f"tokens; such a layer is read of {', '.join(sorted(FORMS))}",
        param="speculative_config",
    )
