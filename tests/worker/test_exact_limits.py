"""`deterministic` goes only with what was shown to be exact; the rest is refused by its name before memory is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.kernels.kernel_table import Candidate, KernelTable
from app.worker.exact_limits import refuse_inexact
from tests.kernels.stub_gpu import as_on
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
LAYOUT = {"deterministic": "batch_and_layout"}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 331, "num_hidden_layers": 2}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}


def refuse(
    hf: dict[str, Any] | None = None, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    options = {"deterministic": "batch", "num_threads": 1, **options}
    config = EngineConfig(**{name: value for name, value in options.items() if value is not None})
    info = ModelInfo(tiny_model("llama"), {**LLAMA, **SIZES, **(hf or {})}, {})
    refuse_inexact(config, info, device, dtype)


def test_what_is_exact() -> None:
    refuse()
    refuse(dtype=torch.bfloat16, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    refuse(pipeline_parallel_size=2)
    refuse(quantization="int8")
    refuse({"quantization_config": {"quant_method": "gptq"}})
    refuse(tensor_parallel_size=2, **LAYOUT)
    refuse(kv_host_memory_bytes=1 << 20, enable_prefix_caching=True, max_num_batched_tokens=7)
    refuse({"architectures": ["NoSuchForCausalLM"]}, deterministic="off", num_threads=None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            LAYOUT | {"tensor_parallel_size": 3},
            "tensor_parallel_size=3: with .* a divisor of 4 and of the model's 2 KV",
        ),
        (
            LAYOUT | {"tensor_parallel_size": 4},
            "tensor_parallel_size=4: with .* a divisor of 4 and of the model's 2 KV",
        ),
        (LAYOUT | {"hf": {"intermediate_size": 90}}, "batch_and_layout: intermediate_size=90 is no multiple of 4"),
        (LAYOUT | {"hf": {"architectures": ["MixtralForCausalLM"]}}, "batch_and_layout: MixtralForCausalLM was not"),
        ({"cpu_offload_gb": 1.0}, "cpu_offload_gb: a product with streamed weights"),
        ({"dtype": torch.float16}, "deterministic: dtype float32 or bfloat16"),
        ({"num_threads": None}, "deterministic: say num_threads"),
        ({"runner": "pooling"}, "deterministic: for models that generate only"),
        (
            {"hf": {"architectures": ["BloomForCausalLM"]}},
            "BloomForCausalLM was not shown to be exact; known: BioGptFor",
        ),
        ({"hf": {"hidden_act": "quick_gelu"}}, "deterministic: the activation quick_gelu"),
        (
            LAYOUT | {"hf": {"quantization_config": {"quant_method": "gptq"}}},
            "the checkpoint is quantized: a quantized",
        ),
        (LAYOUT | {"quantization": "int8"}, "quantization: a quantized product"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: a quantized KV cache"),
        ({"enable_lora": True}, "enable_lora: a step with adapters"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: sums over ranks"),
        ({"speculative_config": {"method": "eagle", "model": "x"}}, "the drafter eagle was not shown"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_what_is_not_shown_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse(**options)


def test_gpus() -> None:
    gpu = torch.device("cuda")
    with as_on(9):
        refuse(device=gpu, dtype=torch.bfloat16, num_threads=None)
        with pytest.raises(ConfigError, match="deterministic: dtype bfloat16"):
            refuse(device=gpu)
        refuse({"architectures": ["OPTForCausalLM"]}, gpu, torch.bfloat16)
        for act in ("gelu_pytorch_tanh", "gelu", "relu"):
            refuse({"hidden_act": act}, gpu, torch.bfloat16)
        refuse({"hidden_act": "relu2"})
        with pytest.raises(ConfigError, match="the activation relu2 was not shown to be exact on GPUs"):
            refuse({"hidden_act": "relu2"}, gpu, torch.bfloat16)
        with pytest.raises(ConfigError, match="quantization: a quantized product was not shown"):
            refuse(device=gpu, dtype=torch.bfloat16, quantization="int8")
        with pytest.raises(ConfigError, match="pipeline_parallel_size: a pipeline of GPUs was not shown"):
            refuse(device=gpu, dtype=torch.bfloat16, pipeline_parallel_size=2)
    for generation in (0, 8, 10):
        with as_on(generation), pytest.raises(ConfigError, match="on CPUs and NVIDIA's Hopper GPUs only so far"):
            refuse(device=gpu, dtype=torch.bfloat16)


def test_an_operation_without_an_exact_kernel_is_named() -> None:
    table: KernelTable[object] = KernelTable("recurrences", Candidate(object()), Candidate(object(), is_exact=False))
    with pytest.raises(ConfigError, match="deterministic: this model needs recurrences, which are not exact on a CPU"):
        table.on(CPU, exact=True)
    exact, other = object(), object()
    table = KernelTable("sums", Candidate(exact, is_exact=True), Candidate(other))
    assert table.on(CPU) is other
    assert table.all_on(CPU) == (other,)
    assert table.on(CPU, exact=True) is exact
