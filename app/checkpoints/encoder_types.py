"""Lists the types of models in which every token sees the whole text, with what the host must know of them. No torch
(I8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class EncoderType:
    """One `model_type` of config.json."""

    # Rows of the table of positions before the first token's; None: as far as the padding token's, and that.
    position_offset: int | None = 0


_PLAIN, _BEHIND_PADDING = EncoderType(), EncoderType(position_offset=None)

ENCODER_TYPES: Mapping[str, EncoderType] = {
    "albert": _PLAIN,
    "bert": _PLAIN,
    "bilingual": _BEHIND_PADDING,
    "camembert": _BEHIND_PADDING,
    "deberta-v2": _PLAIN,
    "distilbert": _PLAIN,
    "dpr": _PLAIN,
    "electra": _PLAIN,
    "eurobert": _PLAIN,
    "gte": _PLAIN,
    "jina_embeddings_v3": _PLAIN,
    "llama_bidirec": _PLAIN,
    "modernbert": _PLAIN,
    "mt5": _PLAIN,
    "mpnet": EncoderType(position_offset=2),
    "new": _PLAIN,
    "nomic_bert": _PLAIN,
    "roberta": _BEHIND_PADDING,
    "siglip": _PLAIN,
    "t5": _PLAIN,
    "xlm-roberta": _BEHIND_PADDING,
}

# Architectures of these types that write an answer to the text, and their encoder alone.
WRITERS: Mapping[str, str] = {
    "MT5ForConditionalGeneration": "MT5EncoderModel",
    "T5ForConditionalGeneration": "T5EncoderModel",
}

# Types of decoders whose layers can do without a cache, where prompts are computed whole.
ONE_PASS_DECODERS = frozenset({"jina_embeddings_v5", "llama", "mistral", "qwen2", "qwen3"})

VOYAGE, NV_EMBED = "VoyageQwen3BidirectionalEmbedModel", "NVEmbedModel"

# Architectures whose tokens see the whole text, though their `model_type` is that of a decoder that looks back.
BOTH_WAYS = frozenset({"ColPaliForRetrieval", NV_EMBED, VOYAGE})
