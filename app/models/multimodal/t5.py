"""T5 (Raffel et al., 2020), T5 v1.1, FLAN-T5 and mT5: a text is read by an encoder, and an answer written by a
decoder; both know positions by biases of their scores alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.mtp_layer import tensor_names
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.distributed.parallel_groups import RankGroup
from app.errors import CheckpointError
from app.kernels.attention.encoder import EncoderPlan, ScoreBias
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.distance_attention import DistanceAttention, DistanceBias
from app.layers.layer import Layer
from app.layers.norm import RMSNorm
from app.layers.relative_bias import RelativeBias
from app.layers.replicated import ReplicatedLinear
from app.models.blocks import Blocks, LayerPlace, attention_settings, gated_mlp, plain_mlp
from app.models.decoder_layers.cross import CrossLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.encoder_decoder import OWN, EncoderDecoder, InputEncoder, encoder_info
from app.models.families.t5 import activation_of, is_gated
from app.models.multimodal.text_encoder import TextEncoder
from app.models.multimodal.vision_layers import GatedBlock, PlainBlock

_RELATIVE = (".relative.weight", ".relative_bias.weight")  # the ends of our names
_ENCODER: list[Rule] = [
    (r"^block\.(\d+)\.layer\.", r"layers.\1."),
    (r"\.0\.SelfAttention\.(q|k|v|o)\.", r".\1_proj."),
    (r"\.0\.SelfAttention\.relative_attention_bias\.", ".relative."),
    (r"\.0\.layer_norm\.", ".norm1."),
    (r"\.1\.layer_norm\.", ".norm2."),
]
_DECODER: list[Rule] = [
    (r"^decoder\.block\.(\d+)\.layer\.", r"model.layers.\1."),
    (r"^decoder\.final_layer_norm\.", "model.norm."),
    (r"\.0\.SelfAttention\.(q|k|v|o)\.", r".self_attn.\1_proj."),
    (r"\.0\.SelfAttention\.relative_attention_bias\.", ".self_attn.relative_bias."),
    (r"\.1\.EncDecAttention\.(q|k|v|o)\.", r".encoder_attn.\1_proj."),
    (r"\.0\.layer_norm\.", ".input_layernorm."),
    (r"\.1\.layer_norm\.", ".encoder_attn_layer_norm."),
    (r"\.2\.layer_norm\.", ".post_attention_layernorm."),
    (r"\.2\.DenseReluDense\.wi_0\.", ".mlp.gate_proj."),
    (r"\.2\.DenseReluDense\.(wi_1|wi)\.", ".mlp.up_proj."),
    (r"\.2\.DenseReluDense\.wo\.", ".mlp.down_proj."),
]
_GATED_BLOCK: list[Rule] = [
    (r"\.1\.DenseReluDense\.wi_0\.", ".mlp.gate_proj."),
    (r"\.1\.DenseReluDense\.wi_1\.", ".mlp.up_proj."),
    (r"\.1\.DenseReluDense\.wo\.", ".mlp.down_proj."),
]
_PLAIN_BLOCK: list[Rule] = [
    (r"\.1\.DenseReluDense\.wi\.", ".mlp.fc1."),
    (r"\.1\.DenseReluDense\.wo\.", ".mlp.fc2."),
]


class T5Block(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)); `relative`: its scores' biases."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        size, width = info.hidden_size, info.num_heads * info.head_dim
        eps = float(info.hf_config.get("layer_norm_epsilon", 1e-6))
        self.num_heads, self.head_dim = info.num_heads, info.head_dim
        self.norm1, self.norm2 = RMSNorm(ctx, size, eps), RMSNorm(ctx, size, eps)
        self.q_proj, self.k_proj, self.v_proj = (ReplicatedLinear(ctx, size, width, bias=False) for _ in range(3))
        self.o_proj = ReplicatedLinear(ctx, width, size, bias=False)
        made = GatedBlock if is_gated(info) else PlainBlock
        self.mlp = made(ctx, size, info.intermediate_size, activation_of(info), bias=False)
        buckets, farthest = _buckets(info)
        self.relative = RelativeBias(ctx, buckets, info.num_heads, farthest, RankGroup())

    def forward(self, x: torch.Tensor, plan: EncoderPlan) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        normed = self.norm1(x)
        query, key, value = (
            project(normed).view(len(x), self.num_heads, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = plan.attend(query, key, value, 1.0, bias=self._bias())
        x = x + self.o_proj(out.reshape(len(x), -1))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]

    def _bias(self) -> ScoreBias:
        return lambda query, key: self.relative.of_length(query.shape[2], query.device)


class T5Encoder(TextEncoder):
    """The encoder, whole on every rank."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        count = int(info.hf_config["num_layers"])
        self.layers = nn.ModuleDict({str(index): T5Block(ctx, info) for index in range(count)})
        eps = float(info.hf_config.get("layer_norm_epsilon", 1e-6))
        self.final_layer_norm = RMSNorm(ctx, info.hidden_size, eps)
        self._names = [*_ENCODER, *(_GATED_BLOCK if is_gated(info) else _PLAIN_BLOCK)]

    def encoded(self, ids: torch.Tensor, places: torch.Tensor, plan: EncoderPlan) -> torch.Tensor:
        """See TextEncoder."""
        x = self.embed_tokens(ids)
        for layer in self.layers.values():
            x = layer(x, plan)
        return self.final_layer_norm(x)  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See InputEncoder: the first layer's biases by distance are all layers'."""
        own = renamed(name, self._names)
        return [(place, tensor) for place in _of_layers(own, len(self.layers))]


class T5ForConditionalGeneration(EncoderDecoder):
    """RMS norms, no biases of products, scores that are not scaled; the first layer's biases by distance are all
    layers'."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; whether the head has a table of its own, the weights tell, as newer versions of
        transformers write that none has."""
        hf, scales = info.hf_config, scales_output(info)
        own_head = has_own_head(info)
        tied = bool(hf.get("tie_word_embeddings", True)) and scales if own_head is None else not own_head
        return replace(
            DecoderSettings.from_info(info, tied=True),
            hidden_act=activation_of(info),
            tie_word_embeddings=tied,
            logit_scale=info.hidden_size**-0.5 if scales else 1.0,
            attention_scale=1.0,
            rope_types=(NO_ROPE,) * info.num_layers,
            cross_positions=encoder_info(info).num_positions,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """`feed_forward_proj` says whether the feed-forward layers have a gate."""
        buckets, farthest = _buckets(info)

        def attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
            bias = DistanceBias(ctx, buckets, settings.num_heads, farthest)
            return DistanceAttention(ctx, attention_settings(settings, place), place.cache_index, place.rotary, bias)

        return Blocks(attention=attention, mlp=gated_mlp if is_gated(info) else plain_mlp, layer=CrossLayer)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> InputEncoder:
        """See EncoderDecoder."""
        return T5Encoder(ctx, info)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel.own_tensors: the shared table is both halves'."""
        if name == "shared.weight":
            return [("model.embed_tokens.weight", tensor), (f"{OWN}embed_tokens.weight", tensor)]
        if name.endswith(".embed_tokens.weight"):  # the same once more
            return []
        return super().own_tensors(name, tensor)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """T5's names as ours."""
        return [(place, tensor) for place in _of_layers(renamed(name, _DECODER), settings.num_layers)]


def _of_layers(own: str, count: int) -> list[str]:
    """The names that a tensor has here: biases by distance lie in the first layer, and are all layers'."""
    if not own.endswith(_RELATIVE):
        return [own]
    return [own.replace("layers.0.", f"layers.{index}.", 1) for index in range(count)]


def scales_output(info: ModelInfo) -> bool:
    """True for the first T5, whose head is the table of tokens: what it reads is scaled."""
    hf = info.hf_config
    if hf.get("model_type") != "t5":
        return False
    return bool(hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings", True)))


def has_own_head(info: ModelInfo) -> bool | None:
    """Tells whether the weights hold a head; None: they do not lie there yet, or nothing is known of them."""
    try:
        names = tensor_names(info.directory, "auto")
    except CheckpointError:
        return None
    return None if names is None else "lm_head.weight" in names


def _buckets(info: ModelInfo) -> tuple[int, int]:
    """Ranges of distances, and where the last begins."""
    hf = info.hf_config
    return int(hf.get("relative_attention_num_buckets", 32)), int(hf.get("relative_attention_max_distance", 128))
