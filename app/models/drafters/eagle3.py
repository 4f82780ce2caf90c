"""EAGLE-3 (Li et al., 2025): one layer over the next token's embedding and a mix of what layers of the target read.

Tensors as the authors publish them (`midlayer`, `d2t` as an offset), or as the project "speculators" does (`layers.0`).
Later ones norm what they read, all together (`norm_before_fc`) or each layer's by itself (`fc_norm`), or hand their
normed features to the next pass (`norm_output`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from app.checkpoints.fields.kinds import FLAG, check, whole
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError, UnsupportedError
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext, HiddenStates
from app.layers.epilogue import AddNorm
from app.layers.layer import Layer
from app.layers.mlp import GatedMLP
from app.layers.norm import RMSNorm
from app.layers.replicated import ReplicatedLinear
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.vocab import LMHead, VocabEmbedding
from app.models.decoder_settings import DecoderSettings
from app.models.drafters.base import Drafter, Target, TokenIds, expect_layers, ids_by_offset, without_prefix
from app.models.families.llama import LlamaForCausalLM

_FIELDS = dict.fromkeys(("draft_vocab_size", "target_hidden_size"), whole(1, 1 << 30))
_SWITCHES = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")  # there, or in `eagle_config`
_FIELDS |= dict.fromkeys(_SWITCHES, FLAG)


class Eagle3Layer(Layer):
    """A layer of Llama's whose attention reads two vectors of a token: its embedding's norm, and its features'."""

    def __init__(
        self, ctx: BuildContext, s: DecoderSettings, rotary: RotaryEmbedding, *, keeps_normed: bool, norms_heads: bool
    ) -> None:
        """`norms_heads`: queries and keys, as Qwen3 does."""
        super().__init__()
        attention = AttentionSettings(
            hidden_size=s.hidden_size,
            input_size=2 * s.hidden_size,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            qkv_bias=s.qkv_bias,
            output_bias=s.output_bias,
            norm_eps=s.norm_eps,
            qk_norm="head_rms" if norms_heads else None,
        )
        self.input_layernorm, self.hidden_norm = (RMSNorm(ctx, s.hidden_size, s.norm_eps) for _ in range(2))
        self.self_attn = Attention(ctx, attention, 0, rotary)
        self.post_attention_layernorm = RMSNorm(ctx, s.hidden_size, s.norm_eps, may_defer=True)
        self.mlp = GatedMLP(ctx, s.hidden_size, s.intermediate_size, s.hidden_act, s.mlp_bias)
        self._keeps_normed = keeps_normed

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] twice -> features [T, C] that are not normed."""
        joined, normed = self._joined(embedded, features)
        residual = normed if self._keeps_normed else features
        x, residual = self.self_attn(joined, AddNorm(residual, self.post_attention_layernorm), ctx)
        total: torch.Tensor = self.mlp(x, AddNorm(residual, None), ctx)[1]
        return total

    def keep(self, embedded: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> None:
        """[T, C] twice: their keys and values, without the rest."""
        self.self_attn.keep(self._joined(embedded, features)[0], ctx)

    def _joined(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what attention reads [T, 2 C], and the features' norm in it [T, C]."""
        normed = self.hidden_norm(features)
        return torch.cat((self.input_layernorm(embedded), normed), dim=-1), normed


class Eagle3Drafter(Drafter):
    """The drafter of a checkpoint; `has_embedding`: it brings a table of tokens of its own."""

    def __init__(
        self, ctx: BuildContext, info: ModelInfo, target: Target, *, has_embedding: bool, norms_heads: bool = False
    ) -> None:
        super().__init__()
        hf, self.target = info.hf_config, target
        switches = {name: _switch(hf, name) for name in _SWITCHES}
        check({**hf, **switches}, _FIELDS, f"{info.directory}/config.json")
        s = LlamaForCausalLM.settings(info)
        self.reads_layers = layers_read(hf, target.info.num_layers)
        width = int(hf.get("target_hidden_size") or s.hidden_size)
        target.expect("the hidden size of what it reads", width, target.info.hidden_size)
        target.expect("vocab_size", s.vocab_size, target.info.vocab_size)
        if s.num_layers != 1:
            raise UnsupportedError(f"speculative_config: an EAGLE-3 drafter of {s.num_layers} layers; 1 is supported")
        self.num_tokens = int(hf.get("draft_vocab_size") or s.vocab_size)
        rope = RopeSettings.from_hf(hf, s.head_dim, ctx.max_model_len)
        rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)
        if has_embedding:
            self.embed_tokens: VocabEmbedding | None = VocabEmbedding(ctx, s.vocab_size, s.hidden_size)
        else:
            target.expect("hidden_size, as it has no embed_tokens", s.hidden_size, target.info.hidden_size)
            self.embed_tokens, self._shared = None, (target.embedding,)
        count = len(self.reads_layers)
        self.fc = ReplicatedLinear(ctx, count * width, s.hidden_size, bias=False)
        self.input_norm = RMSNorm(ctx, count * width, s.norm_eps) if switches["norm_before_fc"] else None
        norms = count if switches["fc_norm"] else 0
        self.fc_norm = nn.ModuleList(RMSNorm(ctx, width, s.norm_eps) for _ in range(norms))
        keeps_normed = bool(switches["norm_before_residual"])
        self.midlayer = Eagle3Layer(ctx, s, rotary, keeps_normed=keeps_normed, norms_heads=norms_heads)
        self.norm, self._norms_output = RMSNorm(ctx, s.hidden_size, s.norm_eps), bool(switches["norm_output"])
        self.lm_head = LMHead(ctx, self.num_tokens, s.hidden_size)
        # How far each token's id is behind its own number, where the drafter knows fewer tokens.
        ids = TokenIds(self.num_tokens, s.vocab_size, is_offset=True)
        self.d2t = ids.weight() if self.num_tokens != s.vocab_size else None

    @property
    def token_ids(self) -> torch.Tensor | None:
        """See Drafter."""
        return ids_by_offset(self.d2t)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel; `t2d` says the same as `d2t`."""
        unread = {"t2d", *(() if self.d2t is not None else ("d2t",))}
        unread |= {"verifier_norm", "verifier_lm_head"} | (set() if self.embed_tokens is not None else {"embed_tokens"})
        renamed = without_prefix(name, tensor, unread)
        return [(own.replace("layers.0.", "midlayer.", 1), stored) for own, stored in renamed]

    def start(self, hidden: HiddenStates) -> torch.Tensor:
        """See Drafter."""
        read = [hidden.inputs_of[layer] for layer in self.reads_layers]
        if self.fc_norm:
            read = [norm(part) for norm, part in zip(self.fc_norm, read, strict=True)]
        joined = torch.cat(read, dim=-1)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))  # type: ignore[no-any-return]

    def advance(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See Drafter."""
        total: torch.Tensor = self.midlayer(self._embedded(token_ids), features, ctx)
        return self.norm(total) if self._norms_output else total

    def keep(self, token_ids: torch.Tensor, features: torch.Tensor, ctx: ForwardContext) -> None:
        """See Drafter."""
        self.midlayer.keep(self._embedded(token_ids), features, ctx)

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self.embed_tokens if self.embed_tokens is not None else self._shared[0]
        return table(token_ids)  # type: ignore[no-any-return]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Features [N, C] -> [N, Vd]."""
        return self.lm_head(hidden if self._norms_output else self.norm(hidden))  # type: ignore[no-any-return]


def layers_read(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target whose inputs the drafter reads: early, middle, late, unless its config.json names them.
    ConfigError where the target has not so many."""
    named = _switch(hf, "eagle_aux_hidden_state_layer_ids")
    if named is None:
        named = [2, num_layers // 2, num_layers - 3]
    if not isinstance(named, list) or not named or not all(type(layer) is int for layer in named):
        raise CheckpointError(f"eagle_aux_hidden_state_layer_ids is {named!r:.80}, no list of layers", param="model")
    return expect_layers(named, num_layers)


def _switch(hf: Mapping[str, Any], name: str) -> Any:
    """A field of config.json, or else of `eagle_config` in it."""
    nested = hf.get("eagle_config")
    value = hf.get(name)
    return nested.get(name) if value is None and isinstance(nested, Mapping) else value
