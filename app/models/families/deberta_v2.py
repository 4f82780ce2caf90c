"""DeBERTa v2 and v3 (He et al., 2021): scores add what a token's content has to do with a distance, and the distance
with the other token's content."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError, UnsupportedError
from app.kernels.attention.encoder import ScoreBias
from app.layers.context import BuildContext, ForwardContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.layer_norm import LayerNorm
from app.layers.linear import ColumnLinear
from app.layers.replicated import ReplicatedTable
from app.models.encoder import (
    Encoder,
    EncoderClassifier,
    EncoderModel,
    EncoderSettings,
    attention_settings,
)
from app.models.families.bert import BERT_NAMES


@dataclass(slots=True, frozen=True)
class DistanceSettings:
    """Tells distances apart, as config.json says."""

    span: int  # rows of the table on each side of distance 0
    buckets: int  # of which farther distances share; below 1: none do
    farthest: int
    shares_keys: bool  # distances go through the projections of the tokens
    of_content: bool  # "c2p"
    of_distance: bool  # "p2c"
    is_normed: bool

    @classmethod
    def from_info(cls, info: ModelInfo) -> DistanceSettings | None:
        """None where the model has absolute positions only."""
        hf = info.hf_config
        if not hf.get("relative_attention"):
            return None
        kinds = hf.get("pos_att_type") or ()
        kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
        farthest = int(hf.get("max_relative_positions", -1))
        farthest = farthest if farthest > 0 else int(hf["max_position_embeddings"])
        buckets = int(hf.get("position_buckets", -1))
        if buckets > 0 and not 1 <= buckets // 2 < farthest - 1:
            raise CheckpointError(
                f"config.json is not usable: position_buckets={buckets} of {farthest} distances", param="model"
            )
        return cls(
            span=buckets if buckets > 0 else farthest,
            buckets=buckets,
            farthest=farthest,
            shares_keys=bool(hf.get("share_att_key", False)),
            of_content="c2p" in kinds,
            of_distance="p2c" in kinds,
            is_normed="layer_norm" in str(hf.get("norm_rel_ebd", "none")).lower(),
        )

    @property
    def score_parts(self) -> int:
        """Sums that a score consists of."""
        return 1 + self.of_content + self.of_distance

    def rows(self, length: int, device: torch.device) -> torch.Tensor:
        """Rows of the table, int64 [L, L], for the distances from each key to each query."""
        places = torch.arange(length, device=device)
        distances = places[:, None] - places
        if self.buckets > 0:
            distances = self._bucketed(distances)
        return (distances + self.span).clamp(0, 2 * self.span - 1)

    def _bucketed(self, distances: torch.Tensor) -> torch.Tensor:
        """Near distances as they are, farther ones by their logarithm."""
        middle = self.buckets // 2
        far = distances.abs().clamp(min=middle).float()
        steps = torch.log(far / middle) / math.log((self.farthest - 1) / middle) * (middle - 1)
        grown = (steps.ceil() + middle).long() * distances.sign()
        return torch.where(distances.abs() <= middle, distances, grown)


class DistanceTable(nn.Module):
    """A vector for each distance, [2 span, C], common to all layers."""

    def __init__(self, ctx: BuildContext, settings: DistanceSettings, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.settings = settings
        self.table = ReplicatedTable(ctx, 2 * settings.span, hidden_size)
        self.norm = LayerNorm(ctx, hidden_size, eps) if settings.is_normed else None

    def vectors(self, ctx: ForwardContext) -> torch.Tensor:
        """[2 span, C], once a step."""
        found: torch.Tensor | None = ctx.memo.get(self)
        if found is None:
            found = self.table.weight if self.norm is None else self.norm(self.table.weight)
            ctx.memo[self] = found
        return found

    def rows(self, ctx: ForwardContext, length: int) -> torch.Tensor:
        """`DistanceSettings.rows`, once a step for each length."""
        found: torch.Tensor | None = ctx.memo.get((self, length))
        if found is None:
            ctx.memo[self, length] = found = self.settings.rows(length, self.table.weight.device)
        return found


class DisentangledAttention(EncoderAttention):
    """q k + q kd + k qd, scaled together; kd and qd are keys and queries of distances."""

    def __init__(
        self, ctx: BuildContext, settings: EncoderSettings, layer_index: int, distances: DistanceTable
    ) -> None:
        own = distances.settings
        shape = attention_settings(settings)
        super().__init__(ctx, replace(shape, scale=(shape.head_dim * own.score_parts) ** -0.5), layer_index)
        self.settings, self._vectors, self._rows = own, distances.vectors, distances.rows
        size = settings.hidden_size
        self.pos_key_proj = self.pos_query_proj = None
        if not own.shares_keys:
            self.pos_key_proj = ColumnLinear(ctx, size, size, bias=True) if own.of_content else None
            self.pos_query_proj = ColumnLinear(ctx, size, size, bias=True) if own.of_distance else None

    def score_bias(self, ctx: ForwardContext) -> ScoreBias:
        """See EncoderAttention."""
        queries, keys = self._of_distances(self._vectors(ctx))

        def bias(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            n, heads, length, _ = query.shape
            rows = self._rows(ctx, length).expand(n, heads, length, length)
            scores = query.new_zeros(1)
            if self.settings.of_content:
                scores = scores + (query @ keys.transpose(1, 2)).gather(3, rows)
            if self.settings.of_distance:
                # Key j meets the distance to query i: the table's row of (i, j) stands at [j, i].
                scores = scores + (key @ queries.transpose(1, 2)).gather(3, rows.transpose(2, 3)).transpose(2, 3)
            return (scores * self.scale).expand(n, heads, length, length)

        return bias

    def _of_distances(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys of distances, [H, 2 span, D] each; unused ones are whatever."""
        if self.settings.shares_keys:
            heads = self.qkv_proj(vectors).view(len(vectors), 3, self.num_heads, self.head_dim)
            return heads[:, 0].transpose(0, 1), heads[:, 1].transpose(0, 1)
        made = [None if one is None else one(vectors) for one in (self.pos_query_proj, self.pos_key_proj)]
        queries, keys = (
            vectors.new_empty(0) if one is None else one.view(len(vectors), -1, self.head_dim).transpose(0, 1)
            for one in made
        )
        return queries, keys


class DebertaV2Model(EncoderModel):
    """DeBERTa v2 or v3 without a head."""

    prefix = "deberta."
    names = (
        (r"^encoder\.rel_embeddings\.", "distances.table."),
        (r"^encoder\.LayerNorm\.", "distances.norm."),
        (r"^embeddings\.embed_proj\.", "embeddings.project."),
        (r"\.attention\.self\.(query|key|value)_proj\.", r".attention.self.\1."),
        (r"\.attention\.self\.pos_", ".attention.pos_"),
        *BERT_NAMES,
    )

    @classmethod
    def settings(cls, info: ModelInfo) -> EncoderSettings:
        """Learned positions where `position_biased_input` asks for them. UnsupportedError for the convolution of v2's
        larger models."""
        hf = info.hf_config
        if int(hf.get("conv_kernel_size", 0)):
            raise UnsupportedError("DeBERTa v2 with a convolution (conv_kernel_size) is not supported", param="model")
        positions = int(hf["max_position_embeddings"]) if hf.get("position_biased_input", True) else 0
        types = int(hf.get("type_vocab_size", 0))
        eps = float(hf.get("layer_norm_eps", 1e-7))
        found = EncoderSettings.from_info(info)
        return replace(found, num_positions=positions, num_token_types=types, norm_eps=eps)

    def make_encoder(self, ctx: BuildContext, info: ModelInfo) -> nn.Module:
        """All layers share the table of distances."""
        settings, distances = self.settings(info), DistanceSettings.from_info(info)
        if distances is None:
            return Encoder(ctx, settings, norm_last=True)
        table = DistanceTable(ctx, distances, settings.hidden_size, settings.norm_eps)
        attentions = [DisentangledAttention(ctx, settings, place, table) for place in range(settings.num_layers)]
        encoder = Encoder(ctx, settings, attentions, norm_last=True)
        encoder.distances = table
        return encoder


class DebertaV2ForSequenceClassification(EncoderClassifier, DebertaV2Model):
    """classifier(act(dense(first token)))."""

    head_names = ("pooler.dense.", "classifier.")
    head_act = "gelu"
