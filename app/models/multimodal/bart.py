"""BART (Lewis et al., 2019): a text is read by an encoder, and an answer written by a decoder that attends to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import sqrt

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.kernels.attention.encoder import plan_encoder
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedTable
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder_layers.cross import NormedSumCrossLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.encoder_decoder import OWN, EncoderDecoder, InputEncoder, encoder_info
from app.models.multimodal.sound_layers import EPS, TOWER, SoundSettings
from app.models.multimodal.vision_layers import PlainBlock, Span, VisionAttention

_OFFSET = 2
_SHARED = ("model.shared.weight", "shared.weight")
_NAMES: list[Rule] = [
    (r"^(?:model\.)?decoder\.", "model."),
    (r"^model\.layernorm_embedding\.", "model.layers.0.input_layernorm."),
    (r"^final_logits_bias$", "lm_head.bias"),
    (r"\.(self_attn|encoder_attn)\.out_proj\.", r".\1.o_proj."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
    (r"\.self_attn_layer_norm\.", ".post_attention_layernorm."),
    (r"\.final_layer_norm\.", ".post_feedforward_layernorm."),
]


class NormedSumBlock(Layer):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, ctx: BuildContext, s: SoundSettings) -> None:
        super().__init__()
        self.attn = VisionAttention(ctx, s.size, s.num_heads)
        self.norm1, self.norm2 = (LayerNorm(ctx, s.size, EPS) for _ in range(2))
        self.mlp = PlainBlock(ctx, s.size, s.inner, s.act)

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = self.norm1(x + self.attn(x, span))
        return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]


class BartEncoder(InputEncoder):
    """Texts of several lengths side by side."""

    rules = TOWER

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        self.info = encoder_info(info)
        hf = {**info.hf_config, "scale_embedding": False}
        s = SoundSettings.of(hf, f"{info.directory}/config.json")
        self.embed_tokens = ReplicatedTable(ctx, info.vocab_size, s.size)
        self.embed_positions = ReplicatedTable(ctx, self.info.num_positions + _OFFSET, s.size)
        self.layernorm_embedding = LayerNorm(ctx, s.size, EPS)
        self.layers = nn.ModuleDict({str(index): NormedSumBlock(ctx, s) for index in range(s.num_layers)})
        self.scale, self._device = embedding_scale(info), ctx.device

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """See InputEncoder."""
        counts = [len(text) for text in inputs]
        ids = torch.cat(list(inputs))
        places = torch.cat([torch.arange(_OFFSET, _OFFSET + count, device=ids.device) for count in counts])
        x = self.layernorm_embedding(self.embed_tokens(ids) * self.scale + self.embed_positions(places))
        span = Span(plan_encoder([0, *accumulate(counts)], x.device))
        for layer in self.layers.values():
            x = layer(x, span)
        return x  # type: ignore[no-any-return]

    def largest(self) -> torch.Tensor:
        """See InputEncoder."""
        return torch.zeros(self.info.num_positions, dtype=torch.int32, device=self._device)


class BartForConditionalGeneration(EncoderDecoder):
    """Learned positions from row 2 on, norms of sums, biases everywhere; both halves share a table of tokens."""

    blocks = Blocks(norm=layer_norm, mlp=plain_mlp, layer=NormedSumCrossLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        return replace(
            DecoderSettings.from_info(info, tied=True, hidden_act="gelu", norm_eps=EPS),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            rope_types=(NO_ROPE,) * info.num_layers,
            num_positions=info.max_position_embeddings + _OFFSET,
            position_offset=_OFFSET,
            embedding_scale=embedding_scale(info),
            head_bias=True,
            final_norm=False,
            cross_positions=encoder_info(info).num_positions,
        )

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> InputEncoder:
        """See EncoderDecoder."""
        return BartEncoder(ctx, info)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel.own_tensors: the shared table is both halves'."""
        if name in _SHARED:
            return [("model.embed_tokens.weight", tensor), (f"{OWN}embed_tokens.weight", tensor)]
        if name.endswith((".embed_tokens.weight", "lm_head.weight")):  # the same once more
            return []
        return super().own_tensors(name, tensor)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """BART's names as ours."""
        own = renamed(name, _NAMES)
        return [(own, tensor.reshaped(settings.vocab_size) if own == "lm_head.bias" else tensor)]


def embedding_scale(info: ModelInfo) -> float:
    """The number that embeddings are multiplied by."""
    return sqrt(info.hidden_size) if info.hf_config.get("scale_embedding") else 1.0
