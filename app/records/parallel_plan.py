"""Lays a model over tensor-parallel ranks and pipeline stages; checked before any worker starts."""

from __future__ import annotations

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError


def stage_layers(num_layers: int, num_stages: int, partition: tuple[int, ...] | None = None) -> list[range]:
    """The layers of each stage. Even when no `partition` is given; where that does not divide, the middle stages take
    one more, because the first also embeds and the last also computes logits and samples.

    ConfigError when the partition does not name every layer once, or leaves a stage empty.
    """
    if partition is None:
        if num_stages > num_layers:
            raise ConfigError(
                f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers",
                param="pipeline_parallel_size",
            )
        share, rest = divmod(num_layers, num_stages)
        middle_first = sorted(range(num_stages), key=lambda stage: (stage == num_stages - 1, stage == 0, -stage))
        longer = set(middle_first[:rest])
        partition = tuple(share + (stage in longer) for stage in range(num_stages))
    if len(partition) != num_stages or sum(partition) != num_layers or min(partition) < 1:
        raise ConfigError(
            f"pipeline_partition={list(partition)} does not split {num_layers} layers into {num_stages} stages of at "
            "least one",
            param="pipeline_partition",
        )
    ends = [sum(partition[: stage + 1]) for stage in range(num_stages)]
    return [range(end - count, end) for end, count in zip(ends, partition, strict=True)]


def refuse_stages(config: EngineConfig) -> None:
    """ConfigError where a kind of model cannot be split into pipeline stages, and is asked to be."""
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: pooling models run in one stage",
            param="pipeline_parallel_size",
        )


def check_parallel_sizes(config: EngineConfig, info: ModelInfo) -> None:
    """ConfigError when `config` cannot split this model: names the number that does not divide."""
    tp = config.tensor_parallel_size
    _check_expert_parallel(config, info)
    if config.pipeline_parallel_size > 1 or config.pipeline_partition is not None:
        stage_layers(info.num_layers, config.pipeline_parallel_size, config.pipeline_partition)
    if tp == 1:
        return
    heads = {"num_attention_heads": info.num_heads} if info.attends else {}
    sizes = {**heads, **_widths(info, whole_experts=config.enable_expert_parallel)}
    sizes |= {name: int(info.hf_config[name]) for name in _STATE_HEADS if name in info.hf_config}
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(f"tensor_parallel_size={tp} does not divide {name}={size}", param="tensor_parallel_size")
    if info.attends and info.num_kv_heads % tp and tp % info.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={tp} is neither a divisor nor a multiple of num_key_value_heads={info.num_kv_heads}",
            param="tensor_parallel_size",
        )


# Heads of layers that keep states.
_STATE_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "num_heads")
# Widths of feed-forward layers beside experts that every token goes through, or of layers without experts.
_OTHER_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp")


def _widths(info: ModelInfo, *, whole_experts: bool) -> dict[str, int]:
    """Widths of feed-forward layers that are split over ranks, by their names."""
    hf = info.hf_config
    widths = {"intermediate_size": info.intermediate_size}
    if info.num_experts:
        of_experts = "moe_intermediate_size" if "moe_intermediate_size" in hf else "intermediate_size"
        widths[of_experts] = int(hf.get(of_experts, info.intermediate_size))
        widths |= {name: int(hf[name]) for name in _OTHER_WIDTHS if name in hf}
        if whole_experts:
            del widths[of_experts]
    return widths


def _check_expert_parallel(config: EngineConfig, info: ModelInfo) -> None:
    _check_expert_balance(config, info.num_experts)
    tp, reason = config.tensor_parallel_size, None
    if not config.enable_expert_parallel:
        return
    if not info.num_experts:
        reason = "the model has no experts"
    elif tp == 1:
        reason = "there is one GPU; set tensor_parallel_size"
    elif info.num_experts < tp:
        reason = f"tensor_parallel_size={tp} is more than the model's {info.num_experts} experts"
    if reason is not None:
        raise ConfigError(f"enable_expert_parallel: {reason}", param="enable_expert_parallel")


# Options that decide what each rank holds, but for `pipeline_partition`, which weights that are cut for it name.
LAYOUT = (
    *("tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"),
    *("enable_eplb", "num_redundant_experts"),
)


def layout_flags(config: EngineConfig) -> str:
    """The layout on a command line: the number of ranks, and what else is not the default."""
    flags = []
    for name in LAYOUT:
        value = getattr(config, name)
        if name == LAYOUT[0] or value != EngineConfig.model_fields[name].default:
            flags.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}"))
    return " ".join(flags)


_OF_BALANCE = ("num_redundant_experts", "eplb_window_size", "eplb_step_interval")


def _check_expert_balance(config: EngineConfig, num_experts: int) -> None:
    if not config.enable_eplb:
        for name in _OF_BALANCE:
            if getattr(config, name) != EngineConfig.model_fields[name].default:
                raise ConfigError(f"{name}={getattr(config, name)} needs enable_eplb", param=name)
        return
    if not config.enable_expert_parallel:
        raise ConfigError("enable_eplb needs enable_expert_parallel", param="enable_eplb")
    if config.cpu_offload_gb:
        raise ConfigError(
            f"enable_eplb moves experts between GPUs, cpu_offload_gb={config.cpu_offload_gb:g} keeps them in host "
            "memory: leave one out",
            param="enable_eplb",
        )
    most = num_experts * (config.tensor_parallel_size - 1)
    if num_experts and config.num_redundant_experts > most:
        raise ConfigError(
            f"num_redundant_experts={config.num_redundant_experts} is more than {most}: all experts on every GPU",
            param="num_redundant_experts",
        )
    if config.eplb_window_size > config.eplb_step_interval:
        raise ConfigError(
            f"eplb_window_size={config.eplb_window_size} is more than eplb_step_interval={config.eplb_step_interval}",
            param="eplb_window_size",
        )


def check_backend_sizes(config: EngineConfig, info: ModelInfo) -> None:
    """The same for a model that runs through transformers' modules, as far as its config.json tells."""
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.pipeline_parallel_size}: a model that runs through transformers' "
            "modules is not cut into stages; use tensor_parallel_size",
            param="pipeline_parallel_size",
        )
    if config.enable_expert_parallel:
        raise ConfigError(
            "enable_expert_parallel: not for a model that runs through transformers' modules; use "
            "tensor_parallel_size alone",
            param="enable_expert_parallel",
        )
    _check_expert_balance(config, info.num_experts)
    for name, size in {"num_attention_heads": info.num_heads, "num_key_value_heads": info.num_kv_heads}.items():
        if size % config.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size={config.tensor_parallel_size} does not divide {name}={size}",
                param="tensor_parallel_size",
            )
