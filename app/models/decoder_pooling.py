"""Decoders that give vectors (Qwen3-Embedding, E5-Mistral, ...) or scores (rerankers, classifiers, reward models).

The families' own decoders without their language head; for scores with a linear head over the last token, with the
language head where that says yes or no (Qwen3-Reranker), or, for rewards, two linear layers over the last token or each
(Qwen2.5-Math-RM and -PRM).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.layers.adapted_layer import AdaptedLayer
from app.layers.context import BuildContext, ForwardContext
from app.layers.replicated import ReplicatedLinear
from app.models import MODELS
from app.models.blocks import both_ways_attention, grouped_query_attention, one_pass_attention
from app.models.decoder import CausalLM, Decoder
from app.models.decoder_settings import readable
from app.models.pooling_model import PoolingModel
from app.models.verdict_head import VerdictHead
from app.records.pooling_info import PoolingInfo

# Families whose language model is not called <family>ForCausalLM.
_FAMILIES = {
    **{"EuroBert": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"},
    "Qwen3VL": "Qwen3VLForConditionalGeneration",
}
_KINDS = ("ForProcessRewardModel", "ForRewardModel", "ForSequenceClassification", "ForMaskedLM", "ForCausalLM", "Model")
_DECODERS = ("model.", "transformer.", "gpt_neox.", "biogpt.")  # what checkpoints hold the decoder as


def family_of(architecture: str) -> type[CausalLM]:
    """The language model of which an architecture takes the decoder."""
    if architecture.endswith("ForConditionalGeneration"):
        return MODELS.load(architecture)
    name = next(architecture.removesuffix(kind) for kind in _KINDS if architecture.endswith(kind))
    return MODELS.load(_FAMILIES.get(name, f"{name}ForCausalLM"))


def score_head(ctx: BuildContext, size: int, num_labels: int) -> nn.Module:
    """One linear layer."""
    return ReplicatedLinear(ctx, size, num_labels, bias=False)


def reward_head(ctx: BuildContext, size: int, num_labels: int) -> nn.Module:
    """Two, and what lies between, under the numbers that they have in the checkpoint."""
    return nn.Sequential(
        ReplicatedLinear(ctx, size, size, bias=True), nn.ReLU(), ReplicatedLinear(ctx, size, num_labels, bias=True)
    )


class DecoderForPooling(PoolingModel):
    """A family's decoder, and a head where the architecture has one. A subclass may name its family (a package's does);
    else `family_of` tells it."""

    family: type[CausalLM]

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        if not hasattr(type(self), "family"):
            self.family = self.family_of(info)
        self.decoder_settings = settings = readable(self.family.settings, info)
        ropes = self.family.ropes(info, settings, ctx.max_model_len)
        blocks = self.family.blocks_of(info)
        if not info.is_causal:
            if blocks.attention is not grouped_query_attention:
                raise UnsupportedError(f"{info.architecture} with attention in both directions", param="model")
            blocks = replace(blocks, attention=both_ways_attention)
        elif ctx.whole_prompts:
            if blocks.attention is not grouped_query_attention:
                raise UnsupportedError(
                    f"enable_prefix_caching=False with {info.architecture}, whose attention needs a KV cache",
                    param="enable_prefix_caching",
                )
            blocks = replace(blocks, attention=one_pass_attention)
        self.model = Decoder(ctx, settings, ropes, blocks)
        self.score: nn.Module | None = None
        pooling = PoolingInfo.of(info)
        self.num_labels = len(pooling.labels)
        size = settings.embedding_size or settings.hidden_size
        if pooling.verdict is not None:
            assert self.model.embed_tokens is not None
            self.score = VerdictHead(ctx, settings, pooling.verdict, self.model.embed_tokens)
        elif self.num_labels:
            rewards = info.architecture.endswith(("RewardModel", "VLForRanking"))
            self.score = reward_head(ctx, size, self.num_labels) if rewards else score_head(ctx, size, self.num_labels)

    @staticmethod
    def family_of(info: ModelInfo) -> type[CausalLM]:
        """The language model whose decoder it has, by the architecture's name."""
        return family_of(info.architecture)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C] after the final norm."""
        return self.model(input_ids, ctx)  # type: ignore[no-any-return]

    @property
    def head_layers(self) -> Sequence[AdaptedLayer]:
        """See PoolingModel."""
        modules = () if self.score is None else self.score.modules()
        return [module for module in modules if isinstance(module, AdaptedLayer)]

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        assert self.score is not None, "a model without classes"
        return self.score(pooled)  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The family's, whatever the checkpoint holds the decoder as."""
        for own, part in super().own_tensors(name, tensor):
            yield from self.family.tensors(self.decoder_settings, own, part)

    def own_name(self, name: str) -> str | None:
        """Checkpoints hold the decoder under a name, or it is all that they hold; the language head is left out."""
        if name.startswith("lm_head.") and isinstance(self.score, VerdictHead) and not self.score.head.tied:
            return f"score.head.{name.removeprefix('lm_head.')}"
        if name.startswith(("lm_head.", "embed_out.")) or name.endswith("rotary_emb.inv_freq"):
            return None
        return name if name.startswith((*_DECODERS, "score.")) else f"model.{name}"
