"""Models that are BART but for norms and positions: mBART, Pegasus, Marian (OPUS-MT), M2M100 and NLLB."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import computed
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.multimodal.bart import BartForConditionalGeneration, BartKind


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """mBART (Liu et al., 2020)."""

    kind = BartKind(norms_sums=False, norms_embeddings=True, offset=2)


class PegasusForConditionalGeneration(BartForConditionalGeneration):
    """Pegasus (Zhang et al., 2020)."""

    kind = BartKind(norms_sums=False, norms_embeddings=False, learns_positions=False, reaches_last=False)


class M2M100ForConditionalGeneration(BartForConditionalGeneration):
    """M2M100 (Fan et al., 2020) and NLLB."""

    kind = BartKind(norms_sums=False, norms_embeddings=False, head_bias=False, offset=2, learns_positions=False)


class MarianMTModel(BartForConditionalGeneration):
    """Marian (Junczys-Dowmunt et al., 2018), which begins with the padding token and never says it."""

    kind = BartKind(norms_sums=True, norms_embeddings=False, learns_positions=False, reaches_last=False)

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        if info.hf_config.get("share_encoder_decoder_embeddings") is False:
            raise UnsupportedError("share_encoder_decoder_embeddings=false is not supported", param="model")
        super().__init__(ctx, info)
        self.padding = int(info.hf_config["pad_token_id"])

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel.own_tensors."""
        if name == "final_logits_bias":
            return [("lm_head.bias", computed(tensor, self._without_padding))]
        return super().own_tensors(name, tensor)

    def _without_padding(self, bias: torch.Tensor) -> torch.Tensor:
        bias = bias.flatten().clone()
        bias[self.padding] = float("-inf")
        return bias
