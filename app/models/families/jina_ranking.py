"""Jina Reranker v3: Qwen 3, whose vectors of marks behind documents and query go through two linear layers
(records.pooling_info)."""

from __future__ import annotations

from app.models.decoder_pooling import DecoderForPooling
from app.models.families.qwen3 import Qwen3ForCausalLM


class JinaForRanking(DecoderForPooling):
    """Gives hidden states."""

    family = Qwen3ForCausalLM

    def own_name(self, name: str) -> str | None:
        """The pooler reads the layers behind it by itself."""
        return None if name.startswith("projector.") else super().own_name(name)
