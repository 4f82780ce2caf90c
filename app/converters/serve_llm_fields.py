"""Maps the fields of Ray Serve LLM's configuration (LLMConfig, LLMServingArgs; vLLM's engine arguments) to Manta's.

One table, a line a field; a field that it does not hold has no counterpart. Ray 2.60, vLLM 0.29.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.backends import LOAD_FORMATS, QUANT_METHODS
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS
from app.registry import Registry


@dataclass(slots=True)
class Converted:
    """One model and what its configuration says of the application around it, as fields of ServeConfig."""

    model: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    ingress: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)  # of the ingress
    router: dict[str, Any] = field(default_factory=dict)
    env_vars: dict[str, str] = field(default_factory=dict)


# A rule takes a field's value over, and returns a remark where that is not all: what was lost, or what to look at.
Rule = Callable[[Any, Converted], str | None]


def to(section: str, name: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The same under another name."""

    def rule(value: Any, converted: Converted) -> None:
        if value is not None:
            getattr(converted, section)[name] = convert(value)

    return rule


def always(*values: Any) -> Rule:
    """Rules that a value which Manta has in any case is dropped; any other value is lost."""

    def rule(value: Any, converted: Converted) -> str | None:
        return None if value in values or value is None else f"{value!r} has no counterpart; Manta: {values[0]!r}"

    return rule


def nothing(remark: str) -> Rule:
    """Rules that a field has no counterpart, with a remark where it was set."""
    return lambda value, converted: remark if value not in (None, {}, []) else None


def one_of(section: str, name: str, table: Registry[Any], others: Mapping[str, str] | None = None) -> Rule:
    """A name that Manta's table must hold, as it is or by another spelling."""
    spellings = others or {}

    def rule(value: Any, converted: Converted) -> str | None:
        known = spellings.get(value, value)
        if value is None:
            return None
        if known not in table:
            return f"{value!r} is not there; there are {', '.join(sorted(table))}"
        getattr(converted, section)[name] = known
        return None

    return rule


def _model_source(value: Any, converted: Converted) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        converted.engine["model"] = "/models/" + str(converted.model.get("name", "model"))
        where = value.get("bucket_uri") if isinstance(value, dict) else value
        return f"copy {where} to {converted.engine['model']} of every worker: Manta loads from directories and hubs"
    converted.engine["model"] = value
    return None


def _bundle(value: Any, converted: Converted) -> str | None:
    other = sorted(set(value) - {"CPU", "GPU"})
    if "CPU" in value:
        converted.model["cpus_per_worker"] = value["CPU"]
    if "GPU" in value:
        converted.model["gpus_per_worker"] = value["GPU"]
    return f"{', '.join(other)}: resources other than CPU and GPU have no counterpart" if other else None


def _bundles(value: Any, converted: Converted) -> str | None:
    if any(bundle != value[0] for bundle in value):
        return "bundles that differ have no counterpart: cpus_per_worker and gpus_per_worker are all workers'"
    return _bundle(value[0], converted)


def _num_replicas(value: Any, converted: Converted) -> str | None:
    if value == "auto":
        return '"auto": set num_replicas, or `autoscaling` of the model'
    converted.model["num_replicas"] = value
    return None


def _autoscaling(value: Any, converted: Converted) -> str | None:
    ours = {name: value[name] for name in ("min_replicas", "max_replicas", "initial_replicas") if name in value}
    converted.model["autoscaling"] = {"max_replicas": max(1, ours.get("min_replicas", 1)), **ours}
    lost = ", ".join(sorted(value.keys() - ours.keys()))
    return f"{lost}: replicas follow the seconds of work that wait and the model's `slo` instead" if lost else None


def _ingress_autoscaling(value: Any, converted: Converted) -> str | None:
    converted.ingress["num_replicas"] = max(1, value.get("min_replicas") or 1)
    return f"{converted.ingress['num_replicas']} ingress replicas, fixed"


def _request_router(value: Any, converted: Converted) -> str | None:
    name = str(value.get("request_router_class", "")).replace(":", ".").rpartition(".")[2]
    policy = ROUTERS.get(name)
    if policy is None:
        return f"{name or value} has no counterpart; Manta: prefix_aware"
    converted.router["policy"] = policy
    return "its arguments have no counterpart" if value.get("request_router_kwargs") else None


def _env_vars(value: Any, converted: Converted) -> str | None:
    lost = sorted(name for name in value if name.startswith(("VLLM_", "RAY_SERVE_LLM_")))
    converted.env_vars |= {name: str(text) for name, text in value.items() if name not in lost}
    return f"{', '.join(lost)}: nothing of Manta reads them" if lost else None


ROUTERS = {
    "PrefixCacheAffinityRouter": "prefix_aware",
    "KVAwareRouter": "prefix_aware",
    "PowerOfTwoChoicesRequestRouter": "power_of_two",
    "RoundRobinRouter": "round_robin",
    "ConsistentHashRouter": "session_affinity",
}
DTYPES = {"half": "float16", "float": "float32"}
GIB = 1 << 30
NO_LORA = "name each adapter and its directory in `adapters` of the model (docs/adapters.md)"

LLM_CONFIG: dict[str, Rule] = {
    "model_loading_config.model_id": to("model", "name"),
    "model_loading_config.model_source": _model_source,
    "model_loading_config.tokenizer_source": to("engine", "tokenizer"),
    "llm_engine": always("vLLM"),
    "accelerator_type": lambda value, c: (
        to("engine", "device")("cuda" if value else None, c)
        or (f"choose nodes with {value} by their labels: a replica takes any GPU of the cluster" if value else None)
    ),
    "accelerator_config.kind": lambda value, c: (
        to("engine", "device")({"cpu": "cpu", "gpu": "cuda"}.get(value), c)
        or (None if value in ("cpu", "gpu") else f"{value!r}: CPUs and NVIDIA GPUs only")
    ),
    "placement_group_config.strategy": to("model", "placement_strategy"),
    "placement_group_config.bundle_per_worker": _bundle,
    "placement_group_config.bundles": _bundles,
    "lora_config": nothing(NO_LORA),
    "deployment_config.num_replicas": _num_replicas,
    "deployment_config.autoscaling_config": _autoscaling,
    "deployment_config.health_check_period_s": to("model", "health_check_period_s"),
    "deployment_config.graceful_shutdown_timeout_s": to("model", "graceful_shutdown_timeout_s"),
    "deployment_config.max_ongoing_requests": nothing(
        "every request is taken and waits in the engine; ingress.limits.max_waiting_requests bounds all"
    ),
    "deployment_config.ray_actor_options.num_cpus": to("model", "replica_cpus"),
    "deployment_config.request_router_config": _request_router,
    "runtime_env.env_vars": _env_vars,
    "experimental_configs.stream_batching_interval_ms": nothing("tokens leave in one message per engine step"),
    "experimental_configs.num_ingress_replicas": to("ingress", "num_replicas"),
    "log_engine_metrics": always(True),
}
ENGINE_KWARGS: dict[str, Rule] = {
    **{
        name: to("engine", name)
        for name in (
            *("max_model_len", "block_size", "gpu_memory_utilization", "enable_prefix_caching", "max_num_seqs", "seed"),
            *("max_num_batched_tokens", "scheduling_policy", "tensor_parallel_size", "pipeline_parallel_size"),
            *("enable_lora", "max_loras", "max_lora_rank"),
            *("tokenizer", "kv_cache_dtype", "runner", "revision", "download_dir", "enable_expert_parallel"),
        )
    },
    "dtype": to("engine", "dtype", lambda value: DTYPES.get(value, value)),
    "load_format": lambda value, c: (
        None if value == "auto" else one_of("engine", "load_format", LOAD_FORMATS)(value, c)
    ),
    "model_impl": to("engine", "model_impl", lambda value: "native" if value == "vllm" else value),
    "quantization": one_of("engine", "quantization", QUANT_METHODS),
    "cpu_offload_gb": to("engine", "cpu_offload_gb"),
    "num_gpu_blocks_override": to("engine", "num_blocks"),
    "disable_hybrid_kv_cache_manager": to("engine", "hybrid_kv_cache", lambda value: "off" if value else "auto"),
    "kv_offloading_size": to("engine", "kv_host_memory_bytes", lambda value: int(value * GIB)),
    "enforce_eager": to("engine", "cuda_graphs", lambda value: "off" if value else "auto"),
    "async_scheduling": to("engine", "max_inflight_steps", lambda value: 2 if value else 1),
    "served_model_name": to("model", "aliases", lambda value: [value] if isinstance(value, str) else list(value)),
    "chat_template": to("model", "chat_template"),
    "tool_call_parser": one_of("model", "tool_parser", TOOL_PARSERS, {"openai": "harmony"}),
    "reasoning_parser": one_of(
        "model", "reasoning_parser", REASONING_PARSERS, {"openai_gptoss": "harmony", "qwen3": "think"}
    ),
    "max_logprobs": to("limits", "max_logprobs"),
    "enable_auto_tool_choice": always(True),
    "enable_chunked_prefill": always(True),
    "trust_remote_code": always(False),
    "distributed_executor_backend": always("ray", "mp"),
    "disable_log_stats": always(False, True),
    "disable_log_requests": always(True, False),
}
SERVING_ARGS: dict[str, Rule] = {
    "ingress_deployment_config.num_replicas": to("ingress", "num_replicas"),
    "ingress_deployment_config.autoscaling_config": _ingress_autoscaling,
    "ingress_deployment_config.ray_actor_options.num_cpus": to("ingress", "num_cpus"),
}
