"""MiMo (Xiaomi, 2025): Qwen 2, trained together with a layer that predicts further tokens."""

from __future__ import annotations

from collections.abc import Iterable

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.models.decoder_settings import DecoderSettings
from app.models.families.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo-7B; that layer is left out."""

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """All but that layer's."""
        return [] if name.startswith("model.mtp_layers.") else [(name, tensor)]
