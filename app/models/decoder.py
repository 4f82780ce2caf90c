"""The decoder-only model that all families share: they differ by their DecoderSettings and Blocks.

Module names are those of Llama's checkpoints in Hugging Face's layout, so a parameter's path is its name there (fused
layers name their parts); a family with other names says how they become these.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import materialize
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext, ForwardContext
from app.layers.layer import Layer
from app.layers.replicated import ReplicatedLinear
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.shown import Shown
from app.layers.vocab import LMHead, VocabEmbedding
from app.models.base import EngineModel
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings, readable
from app.models.layer_offload import LayerOffload
from app.models.whole_latents import LatentDecoderStep
from app.models.whole_step import DecoderStep

Ropes = Callable[[str], RopeSettings]  # by layer type


class Decoder(Layer):
    """Embedding, layers, final norm: those of this pipeline stage, under the names they have in the whole model."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, ropes: Ropes, blocks: Blocks) -> None:
        super().__init__()
        s = settings
        own = ctx.stage_layers if ctx.stage_layers is not None else range(s.num_layers)
        self.offload: LayerOffload | None = None  # the loader's, where weights of some layers stay in host memory
        self._build_ends(ctx, s, blocks)
        # (ids [T], embeddings [T, C]) -> the same, with those of tokens that are not in the table; None: all are.
        self.other_tokens: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        # In the model's type, as the embedding that it multiplies.
        self.embedding_scale = float(torch.tensor(s.embedding_scale, dtype=ctx.dtype, device="cpu"))
        self.position_offset = s.position_offset
        types = s.rope_types or ("",) * s.num_layers
        self.rotaries = {
            kind: RotaryEmbedding(ropes(kind), ctx.max_model_len, ctx.dtype, ctx.device)
            for kind in dict.fromkeys(types[i] for i in own)
        }
        self.indices = list(own)
        layer = blocks.layer or PreNormLayer
        places = [LayerPlace(i, cache, self.rotaries[types[i]]) for cache, i in enumerate(own)]
        self.layers = nn.ModuleDict({str(place.index): layer(ctx, s, place, blocks) for place in places})
        attends = (module for module in self.layers.modules() if isinstance(module, AttentionLayer))
        for number, attention in enumerate(attends):  # a layer may have none, or several
            attention.layer_index = number
        is_plain = blocks.layer_inputs is None and self.project_out is None
        # None: steps of one token are computed layer by layer, too.
        steps = (DecoderStep.of, LatentDecoderStep.of) if is_plain else ()
        made = (of(ctx, s, list(self.layers.values()), list(self.rotaries.values())) for of in steps)
        self.whole_step = next((one for one in made if one is not None), None)

    def _build_ends(self, ctx: BuildContext, s: DecoderSettings, blocks: Blocks) -> None:
        """Builds what stands before the layers in the first stage, and after them in the last."""
        first, last = ctx.groups.is_first_stage, ctx.groups.is_last_stage
        size = s.embedding_size or s.hidden_size
        # A tied head is the embedding's table, so the last stage holds it too.
        embeds = first or (last and s.tie_word_embeddings) or blocks.layer_inputs is not None
        self.embed_tokens = VocabEmbedding(ctx, s.vocab_size, size) if embeds else None
        self.layer_inputs: Any = None if blocks.layer_inputs is None else blocks.layer_inputs(ctx, s)
        self.embed_norm = blocks.norm(ctx, s, False) if first and s.norms_embeddings else None
        self.embed_positions: Any = blocks.positions(ctx, s) if first and s.num_positions else None
        projects = size != s.hidden_size
        self.project_in = ReplicatedLinear(ctx, size, s.hidden_size, bias=False) if first and projects else None
        self.norm = blocks.norm(ctx, s, False) if last and s.final_norm else None
        self.project_out = ReplicatedLinear(ctx, s.hidden_size, size, bias=False) if last and projects else None

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C], or of `ctx.read` alone; a later stage goes on from `ctx.hidden`."""
        x = self._embed(input_ids, ctx) if ctx.hidden is None else ctx.hidden
        if self.layer_inputs is not None:
            embedded = x if ctx.hidden is None else self._embed(input_ids, ctx)
            read = self.layer_inputs.as_read(input_ids) if Shown.of(ctx).has_any else input_ids
            ctx.memo[self.layer_inputs.key] = self.layer_inputs(read, embedded)
        for rotary in self.rotaries.values():
            rotary.of_step(ctx)  # for all layers
        if self.whole_step is not None and (made := self.whole_step.run(x, ctx)) is not None:
            return made if self.norm is None else self.norm(made)
        layers: list[Any] = list(self.layers.values())
        norms = [*[layer.input_layernorm for layer in layers], self.norm]  # the last is None in an earlier stage
        normed = x if norms[0] is None else norms[0](x)
        calls = layers if self.offload is None else self.offload.begin()
        shown, last, of_layer = Shown.of(ctx), self.indices[-1], ctx.before_last()
        narrows = getattr(layers[-1], "narrows", False) and last >= shown.num_deep
        for index, call, next_norm in zip(self.indices, calls, norms[1:], strict=True):
            ctx.keep(index, x)
            if index == last and narrows:
                of_layer = ctx
            if index < shown.num_deep:  # features are added between the layer and the next one's norm
                _, x = call(normed, x, None, of_layer)
                x = shown.add(index, x)
                normed = x if next_norm is None else next_norm(x)
            else:
                normed, x = call(normed, x, next_norm, of_layer)
        ctx.keep(last + 1, x)
        if self.offload is not None:
            self.offload.end()
        hidden = materialize(normed) if narrows else ctx.of_read(materialize(normed))
        return hidden if self.project_out is None else self.project_out(hidden)

    def _embed(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        assert self.embed_tokens is not None, "a later stage needs the hidden states of the one before"
        x: torch.Tensor = self.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.other_tokens is not None:
            x = self.other_tokens(input_ids, x)
        x = Shown.of(ctx).put(x)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(ctx.positions + self.position_offset)
        return x if self.embed_norm is None else self.embed_norm(x)


class CausalLM(EngineModel):
    """A language model; a family overrides `settings`, and the others where it is not Llama's way."""

    keeps_inputs = heeds_read = True

    blocks: ClassVar[Blocks] = Blocks()
    rope_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # what config.json may leave out

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        self.decoder_settings = s = readable(self.settings, info)
        self.model = Decoder(ctx, s, self.ropes(info, s, ctx.max_model_len), self.blocks_of(info))
        last = ctx.groups.is_last_stage
        size = s.embedding_size or s.hidden_size
        self.lm_head = LMHead(ctx, s.vocab_size, size, s.head_bias) if last else None
        self.tied, self.tanh = s.tie_word_embeddings, ctx.kernels(FUSED_OPS).tanh
        if self.tied and self.lm_head is not None:
            assert self.model.embed_tokens is not None
            self.lm_head.tie(self.model.embed_tokens)

    def longest_at_once(self, rows: int) -> int | None:
        """See EngineModel."""
        return 0 if self.model.whole_step is None else self.model.whole_step.longest(rows)

    @staticmethod
    @abstractmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """Read config.json the way this family means it."""

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """The blocks of a variant, where the configuration chooses them."""
        return cls.blocks

    @classmethod
    def blocks_behind(cls, info: ModelInfo) -> Blocks:
        """Those of the layer that predicts further tokens, the last of `info`, where it is not like the others."""
        return cls.blocks_of(info)

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """The rope settings of each layer type."""
        hf = {**cls.rope_defaults, **info.hf_config}

        def of(layer_type: str) -> RopeSettings:
            if layer_type == NO_ROPE:
                return RopeSettings.none()
            return RopeSettings.from_hf(hf, settings.head_dim, max_model_len, layer_type)

        return of

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """A tensor of the checkpoint under our names: itself, its parts, or nothing where it has no use."""
        return [(name, tensor)]

    def offload_layers(self, num_bytes: int, device: torch.device) -> LayerOffload:
        """See EngineModel.offload_layers."""
        self.offload = self.model.offload = LayerOffload(self.model.layers.values(), num_bytes, device)
        return self.offload

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel.own_tensors."""
        return self.tensors(self.decoder_settings, name, tensor)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        return self.model(input_ids, ctx)  # type: ignore[no-any-return]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] of the rows that need them -> [N, V] in the model's type; in the last stage."""
        assert self.lm_head is not None, "logits are computed in the last stage"
        return scaled(self.lm_head(hidden), self.decoder_settings, self.tanh)


def scaled(
    logits: torch.Tensor, settings: DecoderSettings, tanh: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
) -> torch.Tensor:
    """A head's logits as the family means them: scaled, bounded softly."""
    if settings.logit_scale != 1.0:
        logits = logits * settings.logit_scale
    if settings.logit_soft_cap is not None:
        logits = tanh(logits / settings.logit_soft_cap) * settings.logit_soft_cap
    return logits
