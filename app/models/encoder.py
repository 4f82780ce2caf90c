"""The encoder that BERT and its kin share: every token sees the whole text, norms come after the residual sums.

A family is a file that says how it reads config.json (`settings`) and what its checkpoints call our parts (`names`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.tensor_view import split_rows
from app.errors import UnsupportedError
from app.layers.activation import activation
from app.layers.adapted_layer import AdaptedLayer
from app.layers.attention import AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.epilogue import PLAIN
from app.layers.layer_norm import LayerNorm
from app.layers.mlp import GatedMLP
from app.layers.plain_mlp import PlainMLP
from app.layers.relative_bias import RelativeBias
from app.layers.replicated import ReplicatedLinear, ReplicatedTable
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.vocab import VocabEmbedding
from app.models.pooling_model import PoolingModel
from app.records.pooling_info import PoolingInfo


@dataclass(slots=True, frozen=True)
class EncoderSettings:
    """Sizes and switches of an encoder, from config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    hidden_act: str
    num_positions: int  # rows of the table of learned positions; 0: there is none
    position_offset: int  # row of the first token's position in it
    num_token_types: int  # 0: texts of a pair are not told apart
    embedding_size: int  # of the tables, where they are projected to the hidden size
    has_biases: bool = True  # in linear layers
    is_gated: bool = False  # the feed-forward layer
    rope: RopeSettings | None = None
    relative_buckets: int = 0  # of a relative position bias; 0: there is none
    relative_distance: int = 128  # from which on all share a bucket

    @classmethod
    def from_info(cls, info: ModelInfo) -> EncoderSettings:
        """The settings as BERT means them. UnsupportedError refuses what the family's later variants do otherwise."""
        hf = info.hf_config
        if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("is_decoder"):
            raise UnsupportedError("only encoders with absolute position embeddings are supported", param="model")
        return cls(
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            intermediate_size=info.intermediate_size,
            num_layers=info.num_layers,
            num_heads=info.num_heads,
            norm_eps=float(hf.get("layer_norm_eps", 1e-12)),
            hidden_act=str(hf.get("hidden_act", "gelu")),
            num_positions=int(hf.get("max_position_embeddings", 512)),
            position_offset=info.position_offset,
            num_token_types=int(hf.get("type_vocab_size", 2)),
            embedding_size=int(hf.get("embedding_size", info.hidden_size)),
        )


class EncoderEmbeddings(nn.Module):
    """Token + position + type, as far as there are such tables, normed and projected."""

    def __init__(self, ctx: BuildContext, settings: EncoderSettings, *, norm_last: bool = False) -> None:
        """`norm_last`: behind the projection."""
        super().__init__()
        s = settings
        size, self.norm_last = s.embedding_size, norm_last
        self.word_embeddings = VocabEmbedding(ctx, s.vocab_size, size)
        self.position_embeddings = ReplicatedTable(ctx, s.num_positions, size) if s.num_positions else None
        self.token_type_embeddings = ReplicatedTable(ctx, s.num_token_types, size) if s.num_token_types else None
        self.norm = LayerNorm(ctx, s.hidden_size if norm_last else size, s.norm_eps)
        projects = size != s.hidden_size
        self.project = ReplicatedLinear(ctx, size, s.hidden_size, bias=not norm_last) if projects else None
        self.offset = s.position_offset

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> [T, C]."""
        x: torch.Tensor = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(ctx.positions + self.offset)
        if self.token_type_embeddings is not None:
            types = ctx.inputs.get("token_types")  # int64 [T], 1 = second text of a pair
            table = self.token_type_embeddings
            x = x + (table.weight[0] if types is None else table(types))
        if self.project is None:
            return self.norm(x)  # type: ignore[no-any-return]
        return self.norm(self.project(x)) if self.norm_last else self.project(self.norm(x))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(
        self, ctx: BuildContext, settings: EncoderSettings, attention: EncoderAttention, mlp: nn.Module | None = None
    ) -> None:
        """`mlp` None: the usual one."""
        super().__init__()
        s = settings
        self.attention = attention
        self.attention_norm = LayerNorm(ctx, s.hidden_size, s.norm_eps)
        kind = GatedMLP if s.is_gated else PlainMLP
        usual = s.hidden_size, s.intermediate_size, s.hidden_act, s.has_biases
        self.mlp = kind(ctx, *usual) if mlp is None else mlp
        self.output_norm = LayerNorm(ctx, s.hidden_size, s.norm_eps)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = self.attention_norm.of_sum(self.attention(x, PLAIN, ctx), x)
        return self.output_norm.of_sum(self.mlp(x, PLAIN, ctx), x)


class Encoder(nn.Module):
    """Embeddings and encoder layers."""

    def __init__(
        self,
        ctx: BuildContext,
        settings: EncoderSettings,
        attentions: Sequence[EncoderAttention] | None = None,
        *,
        mlps: Sequence[nn.Module | None] | None = None,
        norm_last: bool = False,
        layer: type[EncoderLayer] = EncoderLayer,
    ) -> None:
        """`attentions`, `mlps`: a family's own, one for each `layer`; `norm_last`: embeddings are normed behind their
        projection."""
        super().__init__()
        s = settings
        self.embeddings = EncoderEmbeddings(ctx, s, norm_last=norm_last)
        self.rotary = None if s.rope is None else RotaryEmbedding(s.rope, ctx.max_model_len, ctx.dtype, ctx.device)
        self.relative = (
            RelativeBias(ctx, s.relative_buckets, s.num_heads, s.relative_distance) if s.relative_buckets else None
        )
        if attentions is None:
            shape, shared = attention_settings(s), (self.rotary, self.relative)
            attentions = [EncoderAttention(ctx, shape, place, *shared) for place in range(s.num_layers)]
        own = [None] * s.num_layers if mlps is None else mlps
        self.layers = nn.ModuleList(layer(ctx, s, *parts) for parts in zip(attentions, own, strict=True))

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        x = self.embeddings(input_ids, ctx)
        for layer in self.layers:
            x = layer(x, ctx)
        return x  # type: ignore[no-any-return]


def attention_settings(settings: EncoderSettings) -> AttentionSettings:
    """The shape of a layer's attention."""
    s = settings
    return AttentionSettings(
        hidden_size=s.hidden_size,
        num_heads=s.num_heads,
        num_kv_heads=s.num_heads,
        head_dim=s.hidden_size // s.num_heads,
        qkv_bias=s.has_biases,
        output_bias=s.has_biases,
        norm_eps=s.norm_eps,
    )


class Fused(NamedTuple):
    """Names the parts of a checkpoint's tensor that lie in it one behind the other."""

    parts: tuple[str, ...]
    of_mlp: bool = False  # each has as many rows as feed-forward layers have inner numbers, else as the hidden state

    @classmethod
    def heads(cls, before: str = ".") -> Fused:
        """Queries, keys and values."""
        return cls(tuple(f"{before}{part}." for part in ("q_proj", "k_proj", "v_proj")))


class EncoderModel(PoolingModel):
    """An encoder without a head. A checkpoint's own pooler or language head is left out."""

    prefix: ClassVar[str]  # under which a model with a head holds the encoder
    roots: ClassVar[tuple[str, ...]] = ("embeddings.", "encoder.")  # the parts of the encoder there
    names: ClassVar[Sequence[Rule]]  # from the checkpoint's to ours
    fused: ClassVar[Mapping[str, Fused]] = MappingProxyType({})  # by what stands in a name in the place of the parts'

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        self.info = info
        self.encoder = self.make_encoder(ctx, info)

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """Read config.json the way this family means it."""
        return EncoderSettings.from_info(info)

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """The encoder: (ids, ForwardContext) -> hidden states."""
        return Encoder(ctx, self.settings(info))

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        return self.encoder(input_ids, ctx)  # type: ignore[no-any-return]

    def own_name(self, name: str) -> str | None:
        """Names of the bare encoder, or of a model that holds one under `prefix`."""
        name = name.removeprefix(self.prefix)
        if not name.startswith(self.roots) or name.endswith(("position_ids", "token_type_ids", "inv_freq")):
            return None
        return "encoder." + renamed(name, self.names)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Fused tensors as their parts."""
        for own, one in super().own_tensors(name, tensor):
            found = next((text for text in self.fused if text in own), None)
            if found is None:
                yield own, one
                continue
            fused = self.fused[found]
            size = self.info.intermediate_size if fused.of_mlp else self.info.hidden_size
            parts = split_rows(one, dict.fromkeys(fused.parts, size))
            yield from ((own.replace(found, part), rows) for part, rows in parts)


class EncoderClassifier(EncoderModel):
    """Two linear layers over the pooled token, for the classes of `<family>ForSequenceClassification`: stands before
    the family's encoder among the bases of a class."""

    head_names: ClassVar[tuple[str, str]]  # of the two in the checkpoint
    head_act: ClassVar[str] = "tanh"  # between them

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.num_labels = len(PoolingInfo.of(info).labels)
        self.dense = ReplicatedLinear(ctx, info.hidden_size, info.hidden_size)
        self.out = ReplicatedLinear(ctx, info.hidden_size, self.num_labels)
        self.act = activation(self.head_act)

    @property
    def head_layers(self) -> Sequence[AdaptedLayer]:
        """See PoolingModel."""
        return self.dense, self.out

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        return self.out(self.act(self.dense(pooled)))  # type: ignore[no-any-return]

    def own_name(self, name: str) -> str | None:
        """The head's two layers, and the encoder's names."""
        for theirs, ours in zip(self.head_names, ("dense.", "out."), strict=True):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return super().own_name(name)
