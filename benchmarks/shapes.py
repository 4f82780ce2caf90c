"""Model shapes for benchmarks without a checkpoint: directories to be run with `load_format=dummy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "dtype": "bfloat16"}

_DELTA = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25},
}

_WHISPER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 1280, "dtype": "bfloat16",
    "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120, "num_mel_bins": 128, "max_source_positions": 1500, "max_target_positions": 448,
    "vocab_size": 51866, "activation_function": "gelu", "eos_token_id": 50257, "decoder_start_token_id": 50258,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6, "eos_token_id": 151645,
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": True, "rope_theta": 1e6, "eos_token_id": 151645,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False, "rope_theta": 1e6, "eos_token_id": 151645,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 5e5, "eos_token_id": 128009,
    },
    "llama-70b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 5e5, "eos_token_id": 128009,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
        "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "tie_word_embeddings": False, "rope_theta": 1e6, "eos_token_id": 151645,
    },
    "gemma3-4b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 262208, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "sliding_window": 1024,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(34)],
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "attention_bias": False, "max_position_embeddings": 131072, "eos_token_id": 1,
    },
    "phi4": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352,
        "tie_word_embeddings": False, "rope_theta": 2.5e5, "rms_norm_eps": 1e-5, "attention_bias": False,
        "sliding_window": None, "max_position_embeddings": 16384, "original_max_position_embeddings": 16384,
        "pad_token_id": 0, "eos_token_id": 100265,
    },
    "llama-100m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": 32000, "tie_word_embeddings": True, "rope_theta": 1e4, "eos_token_id": 2,
    },
    "qwen30a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "rope_theta": 1e6, "eos_token_id": 151645,
    },
    "qwen3.5-4b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2560,
        "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 256, **_DELTA, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
        "vocab_size": 248320, "tie_word_embeddings": True, "rope_theta": 1e7, "eos_token_id": 248044,
        "max_position_embeddings": 262144,
    },
    "qwen3.6-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, **_DELTA,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "vocab_size": 248320, "tie_word_embeddings": False, "rope_theta": 1e7, "eos_token_id": 248044,
        "max_position_embeddings": 262144,
    },
    "nemotron-h-8b": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096,
        "intermediate_size": 21504, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
        "conv_kernel": 4, "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
        "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-", "vocab_size": 131072,
        "tie_word_embeddings": False, "eos_token_id": 2,
    },
    "mixtral8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
        "tie_word_embeddings": False, "rope_theta": 1e6, "sliding_window": None, "eos_token_id": 2,
    },
    "gptoss20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "tie_word_embeddings": False,
        "attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 1.5e5,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
        "eos_token_id": 200002,
    },
    "dsv2lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "vocab_size": 102400, "tie_word_embeddings": False, "rope_theta": 1e4, "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
        "eos_token_id": 100001,
    },
    "glm-4.7-flash": {  # with a layer for multi-token prediction
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
        "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1, "vocab_size": 154880,
        "tie_word_embeddings": False, "rope_theta": 1e6, "attention_bias": False, "rms_norm_eps": 1e-5,
        "eos_token_id": 154820,
    },
    "tiny-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64,
        "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True, "rope_theta": 1e4, "eos_token_id": 2,
    },
    "tiny": {  # so that a benchmark can be tried where there is no GPU
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 512, "tie_word_embeddings": True, "rope_theta": 1e4, "eos_token_id": 2,
    },
}  # fmt: skip
_QWEN3_VL = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
    "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
}  # fmt: skip
_QWEN3_VL_TEXT = {
    "model_type": "qwen3_vl_text", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
    "max_position_embeddings": 262144, "rope_theta": 5e6, "eos_token_id": 151645,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
}  # fmt: skip
_QWEN3_VL_VISION = {
    "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 2304, "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
}  # fmt: skip
SHAPES |= {
    "qwen3-vl-8b": {
        **_QWEN3_VL, "tie_word_embeddings": False,
        "text_config": {
            **_QWEN3_VL_TEXT, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
        "vision_config": {
            **_QWEN3_VL_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "whisper-large-v3": {**_WHISPER, "decoder_layers": 32},
    "whisper-large-v3-turbo": {**_WHISPER, "decoder_layers": 4},
    "tiny-whisper": {
        **_WHISPER, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 96,
        "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 96,
    },
    "tiny-vl": {  # so that a benchmark can be tried where there is no GPU
        **_QWEN3_VL, "tie_word_embeddings": True,
        "text_config": {
            **_QWEN3_VL_TEXT, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
        },
        "vision_config": {
            **_QWEN3_VL_VISION, "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
            "out_hidden_size": 64, "deepstack_visual_indexes": [0],
        },
    },
}  # fmt: skip
_GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False,
    "checkpoint_format": "gptq",
}  # fmt: skip
_FP8_BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
}  # fmt: skip
_INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip
SHAPES |= {
    "llama-8b-gptq": {**SHAPES["llama-8b"], "quantization_config": _GPTQ},
    "llama-8b-int8": {**SHAPES["llama-8b"], "quantization_config": _INT8},
    "llama-8b-fp8-blocks": {**SHAPES["llama-8b"], "quantization_config": _FP8_BLOCKS},
    "qwen30a3b-fp8": {**SHAPES["qwen30a3b"], "quantization_config": _FP8_BLOCKS},
    "qwen3.6-35b-a3b-fp8": {
        **SHAPES["qwen3.6-35b-a3b"],
        "quantization_config": {
            **_FP8_BLOCKS,
            "modules_to_not_convert": ["in_proj_a", "in_proj_b"],  # as in published checkpoints
        },
    },
}
# The kernels of the others, soon started.
SHAPES["llama-8b-gptq-2"] = {**SHAPES["llama-8b-gptq"], "num_hidden_layers": 2}
SHAPES["llama-8b-int8-2"] = {**SHAPES["llama-8b-int8"], "num_hidden_layers": 2}
SHAPES["dsv2lite-3"] = {**SHAPES["dsv2lite"], "num_hidden_layers": 3}


def write_shape(name: str, folder: Path) -> Path:
    """Write the config.json of shape `name` into `folder/name` and return that directory."""
    directory = folder / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[name]}))
    return directory
