"""Voyage 4 nano: Qwen3 whose tokens see the whole text, with a linear layer behind the mean (records.pooling_info)."""

from __future__ import annotations

from app.models.decoder_pooling import DecoderForPooling
from app.models.families.qwen3 import Qwen3ForCausalLM


class VoyageQwen3Bidirectional(DecoderForPooling):
    """Gives vectors that are wider than hidden states."""

    family = Qwen3ForCausalLM

    def own_name(self, name: str) -> str | None:
        """The pooler reads the layer behind it by itself."""
        return None if name.startswith("linear.") else super().own_name(name)
