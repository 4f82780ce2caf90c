"""Says what does not go with `deterministic`, before a start takes memory: what was not shown to be exact is refused.

Exact are the models of `SHOWN`, whose steps are made of kernels marked `is_exact`
(`KernelTable`); a layer of another kind asks for a kernel that is not there, and is refused by its operation's name.
Options that change how numbers are stored or who adds them up are refused by theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.kernels.fused.exact import ACTIVATIONS
from app.kernels.gemm.leaves import LEAVES
from app.kernels.kernel_table import HOPPER
from app.layers.activation import PLAIN_ACTIVATIONS
from app.models import MODELS
from app.models.decoder_settings import readable
from app.models.implementation import runs_natively

# Architectures whose logits tests compare bit for bit, and whose steps on a CPU they hold to operations that look at no
# neighbour: tests/worker/test_exact_families.py, tests/worker/test_exact_families_on_gpu.py.
SHOWN = frozenset(
    {
        "BioGptForCausalLM",
        "CodeGenForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "DbrxForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5ForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoeForCausalLM",
        "FalconForCausalLM",
        "FlexOlmoForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "GPTNeoForCausalLM",
        "GPTNeoXForCausalLM",
        "GraniteForCausalLM",
        "GraniteMoeForCausalLM",
        "GraniteMoeSharedForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "HYV3ForCausalLM",
        "JetMoeForCausalLM",
        "Llama4ForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoeForCausalLM",
        "OPTForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "XGLMForCausalLM",
    }
)
# Those whose logits they compare over numbers of workers, too.
OVER_LAYOUTS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_ACTIVATIONS = {"relu"} | {name for name, kernel in PLAIN_ACTIVATIONS.items() if kernel in ACTIVATIONS}
_ACTIVATIONS_ON_GPUS = _ACTIVATIONS - {"relu2"}
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
PROPOSERS = frozenset({"ngram", "suffix"})  # drafts without a model of their own

_UNSHOWN = "was not shown to leave logits exact"
_QUANTIZED = f"a quantized product {_UNSHOWN}"
# Options that keep their defaults, and why.
_REFUSED: Mapping[str, str] = {
    "kv_cache_dtype": f"a quantized KV cache {_UNSHOWN}",
    "kv_connector": f"what a plugin brings back {_UNSHOWN}",
    "cpu_offload_gb": f"a product with streamed weights {_UNSHOWN}",
    "enable_lora": f"a step with adapters {_UNSHOWN}",
    "logits_processors": f"a plugin that edits the logits of all rows {_UNSHOWN}",
}
_OF_ONE_LAYOUT: Mapping[str, str] = {
    "tensor_parallel_size": "sums over ranks depend on how many there are; use deterministic=batch_and_layout"
}
_OF_ONE_GPU: Mapping[str, str] = {"pipeline_parallel_size": f"a pipeline of GPUs {_UNSHOWN}"}


def refuse_inexact(config: EngineConfig, info: ModelInfo, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError names what `deterministic` does not go with; nothing where it is off."""
    if not config.is_exact:
        return
    if device.type not in DTYPES or (device.type == "cuda" and not HOPPER.are_met(device)):
        raise _refusal("on CPUs and NVIDIA's Hopper GPUs only so far: no other has shown that its kernels are exact")
    if info.runner(config.runner) != "generate":
        raise _refusal("for models that generate only")
    on_gpu = device.type == "cuda"
    where = "GPUs" if on_gpu else "CPUs"
    activations = _ACTIVATIONS_ON_GPUS if on_gpu else _ACTIVATIONS
    if not runs_natively(info) or info.architecture not in SHOWN:
        raise _refusal(f"{info.architecture} was not shown to be exact; known: {', '.join(sorted(SHOWN))}")
    if (act := readable(MODELS.load(info.architecture).settings, info).hidden_act) not in activations:
        raise _refusal(f"the activation {act} was not shown to be exact on {where}")
    if dtype not in DTYPES[device.type]:
        names = " or ".join(str(one).removeprefix("torch.") for one in DTYPES[device.type])
        raise ConfigError(f"deterministic: dtype {names}", param="dtype")
    if device.type == "cpu" and config.num_threads is None:
        raise ConfigError(
            "deterministic: say num_threads, the same for all replicas: a product's sums may depend on it",
            param="num_threads",
        )
    over_layouts = config.deterministic == "batch_and_layout"
    if over_layouts:
        _refuse_layout(config, info)
    if info.quantization_scheme and (on_gpu or over_layouts):
        raise _refusal(f"the checkpoint is quantized: {_QUANTIZED}")
    for name, reason in _refused(on_gpu, over_layouts).items():
        if getattr(config, name) != EngineConfig.model_fields[name].default:
            raise ConfigError(f"{name}: {reason}; leave it out, or deterministic", param=name)
    drafter = config.speculative_config
    if drafter is not None and drafter.method not in PROPOSERS:
        raise ConfigError(
            f"speculative_config: the drafter {drafter.method} {_UNSHOWN}; known: {', '.join(sorted(PROPOSERS))}",
            param="speculative_config",
        )


def _refused(on_gpu: bool, over_layouts: bool) -> dict[str, str]:
    refused = {**_REFUSED, "quantization": _QUANTIZED} if on_gpu or over_layouts else dict(_REFUSED)
    if over_layouts:
        return refused
    return {**refused, **_OF_ONE_LAYOUT, **(_OF_ONE_GPU if on_gpu else {})}


def _refuse_layout(config: EngineConfig, info: ModelInfo) -> None:
    """ConfigError where the bits may depend on the number of workers."""
    ranks = config.tensor_parallel_size
    if info.architecture not in OVER_LAYOUTS:
        names = ", ".join(sorted(OVER_LAYOUTS))
        raise _refusal(f"batch_and_layout: {info.architecture} was not shown to be exact; known: {names}")
    if LEAVES % ranks or info.num_kv_heads % ranks:
        divided = f"{LEAVES} and of the model's {info.num_kv_heads} KV heads"
        raise ConfigError(
            f"tensor_parallel_size={ranks}: with batch_and_layout a divisor of {divided}", param="tensor_parallel_size"
        )
    sizes = {"num_attention_heads x head_dim": info.num_heads * info.head_dim}
    sizes |= {"num_key_value_heads x head_dim": info.num_kv_heads * info.head_dim}
    sizes |= {"intermediate_size": info.intermediate_size}
    for name, size in sizes.items():
        if size % LEAVES:
            raise _refusal(f"batch_and_layout: {name}={size} is no multiple of {LEAVES}, the parts of a sum")


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"deterministic: {reason}", param="deterministic")
