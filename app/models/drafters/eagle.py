"""EAGLE-1 and EAGLE-2 (Li et al., 2024): one layer over the next token's embedding and the target's last hidden state;
the target's own head tells the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.layers.context import BuildContext, ForwardContext, HiddenStates
from app.layers.replicated import ReplicatedLinear
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.vocab import VocabEmbedding
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.drafters.base import Drafter, Target, without_prefix
from app.models.families.llama import LlamaForCausalLM


class EagleDrafter(Drafter):
    """The drafter of a checkpoint: `fc`, and a layer of Llama's without its first norm."""

    def __init__(
        self, ctx: BuildContext, info: ModelInfo, target: Target, *, has_embedding: bool, has_bias: bool
    ) -> None:
        """`has_bias`: of `fc`, whatever config.json says."""
        super().__init__()
        self.target, s = target, LlamaForCausalLM.settings(info)
        target.expect("hidden_size", s.hidden_size, target.info.hidden_size)
        target.expect("vocab_size", s.vocab_size, target.info.vocab_size)
        if s.num_layers != 1:
            raise UnsupportedError(f"speculative_config: an EAGLE drafter of {s.num_layers} layers; 1 is supported")
        rope = RopeSettings.from_hf(info.hf_config, s.head_dim, ctx.max_model_len)
        rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)
        if has_embedding:
            self.embed_tokens: VocabEmbedding | None = VocabEmbedding(ctx, s.vocab_size, s.hidden_size)
        else:
            self.embed_tokens, self._shared = None, (target.embedding,)
        self.fc = ReplicatedLinear(ctx, 2 * s.hidden_size, s.hidden_size, bias=has_bias)
        self.layer = PreNormLayer(ctx, s, LayerPlace(0, 0, rotary), Blocks())
        self.layer.input_layernorm = None

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel; a head that some bring is the target's."""
        unread = {"lm_head", *(() if self.embed_tokens is not None else ("embed_tokens",))}
        renamed = without_prefix(name, tensor, unread)
        return [(own.replace("layers.0.", "layer.", 1), stored) for own, stored in renamed]

    def start(self, hidden: HiddenStates) -> torch.Tensor:
        """See Drafter."""
        return hidden.last

    def advance(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See Drafter."""
        x = self._joined(token_ids, features)
        total: torch.Tensor = self.layer(x, x, None, ctx)[1]
        return total

    def keep(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> None:
        """See Drafter: keys and values are of the layer's inputs."""
        attention: Any = self.layer.self_attn
        attention.keep(self._joined(token_ids, features), ctx)

    def _joined(self, token_ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Returns the layer's inputs [T, C]."""
        table = self.embed_tokens if self.embed_tokens is not None else self._shared[0]
        return self.fc(torch.cat((table(token_ids), features), dim=-1))  # type: ignore[no-any-return]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, C] -> [N, V]."""
        return self.target.model.raw_logits(hidden)
