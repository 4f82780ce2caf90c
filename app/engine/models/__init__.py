"""Models by the architecture that config.json names: one file and one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs no torch
    from app.engine.models.decoder import CausalLM
    from app.engine.models.pooling_model import PoolingModel

MODELS: Registry[type[CausalLM]] = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "app.engine.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "app.engine.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "app.engine.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "app.engine.models.qwen3:Qwen3ForCausalLM",
    },
)

# The same for embeddings, scores and classes (runner=pooling).
POOLING_MODELS: Registry[type[PoolingModel]] = Registry(
    "architecture of a pooling model",
    {
        "BertModel": "app.engine.models.bert:BertModel",
        "BertForMaskedLM": "app.engine.models.bert:BertModel",
        "BertForSequenceClassification": "app.engine.models.bert:BertForSequenceClassification",
        "RobertaModel": "app.engine.models.xlm_roberta:RobertaModel",
        "RobertaForMaskedLM": "app.engine.models.xlm_roberta:RobertaModel",
        "RobertaForSequenceClassification": "app.engine.models.xlm_roberta:RobertaForSequenceClassification",
        "XLMRobertaModel": "app.engine.models.xlm_roberta:RobertaModel",
        "XLMRobertaForMaskedLM": "app.engine.models.xlm_roberta:RobertaModel",
        "XLMRobertaForSequenceClassification": "app.engine.models.xlm_roberta:RobertaForSequenceClassification",
        "LlamaModel": "app.engine.models.decoder_pooling:LlamaForPooling",
        "LlamaForCausalLM": "app.engine.models.decoder_pooling:LlamaForPooling",
        "LlamaForSequenceClassification": "app.engine.models.decoder_pooling:LlamaForPooling",
        "MistralModel": "app.engine.models.decoder_pooling:MistralForPooling",
        "MistralForCausalLM": "app.engine.models.decoder_pooling:MistralForPooling",
        "MistralForSequenceClassification": "app.engine.models.decoder_pooling:MistralForPooling",
        "Qwen2Model": "app.engine.models.decoder_pooling:Qwen2ForPooling",
        "Qwen2ForCausalLM": "app.engine.models.decoder_pooling:Qwen2ForPooling",
        "Qwen2ForSequenceClassification": "app.engine.models.decoder_pooling:Qwen2ForPooling",
        "Qwen3Model": "app.engine.models.decoder_pooling:Qwen3ForPooling",
        "Qwen3ForCausalLM": "app.engine.models.decoder_pooling:Qwen3ForPooling",
        "Qwen3ForSequenceClassification": "app.engine.models.decoder_pooling:Qwen3ForPooling",
    },
)
