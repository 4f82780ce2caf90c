"""Decoders that give vectors (Qwen3-Embedding, E5-Mistral, ...) or scores (Qwen3 rerankers as classifiers).

The families' own decoders without their language head; for scores with a linear head over the last token.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.replicated import ReplicatedLinear
from app.engine.model_info import ModelInfo
from app.engine.models.checkpoint import StoredTensor
from app.engine.models.decoder import CausalLM, Decoder
from app.engine.models.decoder_settings import readable
from app.engine.models.llama import LlamaForCausalLM
from app.engine.models.mistral import MistralForCausalLM
from app.engine.models.pooling_model import PoolingModel
from app.engine.models.qwen2 import Qwen2ForCausalLM
from app.engine.models.qwen3 import Qwen3ForCausalLM
from app.engine.pooling.info import PoolingInfo
from app.errors import UnsupportedError


class DecoderForPooling(PoolingModel):
    """A family's decoder; `family` reads its settings."""

    family: type[CausalLM]

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        hf = info.hf_config
        if hf.get("is_causal") is False or hf.get("use_bidirectional_attention"):
            raise UnsupportedError("decoders with attention in both directions are not supported", param="model")
        self.decoder_settings = settings = readable(self.family.settings, info)
        ropes = self.family.ropes(info, settings, ctx.max_model_len)
        self.model = Decoder(ctx, settings, ropes, self.family.blocks_of(info))
        self.score: ReplicatedLinear | None = None
        if info.architecture.endswith("ForSequenceClassification"):
            self.num_labels = len(PoolingInfo.of(info).labels)
            self.score = ReplicatedLinear(ctx, settings.hidden_size, self.num_labels, bias=False)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C] after the final norm."""
        return self.model(input_ids, ctx)  # type: ignore[no-any-return]

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [N, C] -> logits [N, num_labels]."""
        assert self.score is not None, "a model without classes"
        return self.score(pooled)  # type: ignore[no-any-return]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The family's, whatever the checkpoint holds the decoder as."""
        for own, part in super().own_tensors(name, tensor):
            yield from self.family.tensors(self.decoder_settings, own, part)

    def own_name(self, name: str) -> str | None:
        """Checkpoints hold the decoder as `model`, or it is all that they hold; the language head is left out."""
        if name.startswith("lm_head.") or name.endswith("rotary_emb.inv_freq"):
            return None
        return name if name.startswith(("model.", "score.")) else f"model.{name}"


class LlamaForPooling(DecoderForPooling):
    """Llama with pooled outputs."""

    family = LlamaForCausalLM


class MistralForPooling(DecoderForPooling):
    """Mistral with pooled outputs."""

    family = MistralForCausalLM


class Qwen2ForPooling(DecoderForPooling):
    """Qwen2 with pooled outputs."""

    family = Qwen2ForCausalLM


class Qwen3ForPooling(DecoderForPooling):
    """Qwen3 with pooled outputs."""

    family = Qwen3ForCausalLM
