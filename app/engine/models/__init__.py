"""Models by the architecture that config.json names: one file and one line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.plugins import PluginGroup
from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs no torch
    from app.engine.models.decoder import CausalLM
    from app.engine.models.pooling_model import PoolingModel

MODELS: Registry[type[CausalLM]] = Registry(
    "model architecture",
    {
        "Cohere2ForCausalLM": "app.engine.models.cohere:Cohere2ForCausalLM",
        "CohereForCausalLM": "app.engine.models.cohere:CohereForCausalLM",
        "Exaone4ForCausalLM": "app.engine.models.exaone4:Exaone4ForCausalLM",
        "FalconForCausalLM": "app.engine.models.falcon:FalconForCausalLM",
        "GPT2LMHeadModel": "app.engine.models.gpt2:GPT2LMHeadModel",
        "GPTNeoXForCausalLM": "app.engine.models.gpt_neox:GPTNeoXForCausalLM",
        "Gemma2ForCausalLM": "app.engine.models.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "app.engine.models.gemma3:Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration": "app.engine.models.gemma3:Gemma3ForCausalLM",  # text only
        "GemmaForCausalLM": "app.engine.models.gemma:GemmaForCausalLM",
        "Glm4MoeForCausalLM": "app.engine.models.glm4_moe:Glm4MoeForCausalLM",
        "Glm4ForCausalLM": "app.engine.models.glm4:Glm4ForCausalLM",
        "GlmForCausalLM": "app.engine.models.glm4:GlmForCausalLM",
        "GptOssForCausalLM": "app.engine.models.gpt_oss:GptOssForCausalLM",
        "GraniteMoeForCausalLM": "app.engine.models.granite_moe:GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM": "app.engine.models.granite_moe:GraniteMoeForCausalLM",
        "GraniteForCausalLM": "app.engine.models.granite:GraniteForCausalLM",
        "AquilaForCausalLM": "app.engine.models.llama:LlamaForCausalLM",  # Llama under another name, as the next
        "LLaMAForCausalLM": "app.engine.models.llama:LlamaForCausalLM",
        "LlamaForCausalLM": "app.engine.models.llama:LlamaForCausalLM",
        "Llama4ForCausalLM": "app.engine.models.llama4:Llama4ForCausalLM",
        "Llama4ForConditionalGeneration": "app.engine.models.llama4:Llama4ForCausalLM",  # text only
        "Ministral3ForCausalLM": "app.engine.models.ministral:Ministral3ForCausalLM",
        "MinistralForCausalLM": "app.engine.models.ministral:MinistralForCausalLM",
        "Mistral3ForConditionalGeneration": "app.engine.models.ministral:Ministral3ForCausalLM",  # text only
        "MistralForCausalLM": "app.engine.models.mistral:MistralForCausalLM",
        "MixtralForCausalLM": "app.engine.models.mixtral:MixtralForCausalLM",
        "OPTForCausalLM": "app.engine.models.opt:OPTForCausalLM",
        "Olmo2ForCausalLM": "app.engine.models.olmo2:Olmo2ForCausalLM",
        "Olmo3ForCausalLM": "app.engine.models.olmo2:Olmo3ForCausalLM",
        "OlmoeForCausalLM": "app.engine.models.olmoe:OlmoeForCausalLM",
        "PhimoeForCausalLM": "app.engine.models.phimoe:PhimoeForCausalLM",
        "Phi3ForCausalLM": "app.engine.models.phi3:Phi3ForCausalLM",
        "PhiForCausalLM": "app.engine.models.phi:PhiForCausalLM",
        "Qwen2ForCausalLM": "app.engine.models.qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "app.engine.models.qwen_moe:Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM": "app.engine.models.qwen_moe:Qwen3MoeForCausalLM",
        "Qwen3ForCausalLM": "app.engine.models.qwen3:Qwen3ForCausalLM",
        "SmolLM3ForCausalLM": "app.engine.models.smollm3:SmolLM3ForCausalLM",
        "StableLmForCausalLM": "app.engine.models.stablelm:StableLmForCausalLM",
    },
    PluginGroup("models", "app.engine.models.decoder:CausalLM"),
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
        "LlamaModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "LlamaForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "LlamaForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "MistralModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "MistralForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "MistralForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen2Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen2ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen2ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen3Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen3ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen3ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Exaone4ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "FalconForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GPT2ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GPTNeoXForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GemmaForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Gemma2ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Gemma3TextForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GlmForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Glm4ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "MinistralForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Ministral3ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "OPTForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Olmo2ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Olmo3ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "PhiForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Phi3ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "SmolLM3ForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "StableLmForSequenceClassification": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen2ForRewardModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Qwen2ForProcessRewardModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Exaone4Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GemmaModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Gemma2Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GlmModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Glm4Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "MinistralModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Olmo2Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Olmo3Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Phi3Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "SmolLM3Model": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Gemma3TextModel": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Exaone4ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GemmaForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Gemma2ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "GlmForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Glm4ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "MinistralForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Olmo2ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Olmo3ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "Phi3ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
        "SmolLM3ForCausalLM": "app.engine.models.decoder_pooling:DecoderForPooling",
    },
    PluginGroup("pooling_models", "app.engine.models.pooling_model:PoolingModel"),
)
