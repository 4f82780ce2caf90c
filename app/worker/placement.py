"""Decides where a worker computes and with whom: device, types, parallel groups, layers of its stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from app.checkpoints.model_info import ModelInfo, fetch_model_weights
from app.config.engine import EngineConfig
from app.distributed.parallel_groups import ParallelGroups
from app.distributed.process_groups import connect_store, join_groups
from app.distributed.symmetric_all_reduce import with_small_all_reduce
from app.errors import ConfigError
from app.kernels.attention import AttentionOps
from app.layers.context import BuildContext
from app.models.implementation import check_settings
from app.platforms import platform_of
from app.quantization import select_quantization
from app.quantization.base import QuantMethod
from app.records.parallel_plan import stage_layers
from app.records.step_budget import whole_prompts
from app.records.worker_info import RendezvousInfo
from app.worker.attention.backend import select_attention
from app.worker.attention.kv_cache import select_kv_dtype
from app.worker.device import enter_thread, num_threads, select_device, select_dtype, select_state_dtype
from app.worker.exact_limits import refuse_inexact


@dataclass(slots=True, frozen=True)
class Placement:
    """One rank's place; made before anything takes memory."""

    info: ModelInfo
    build: BuildContext
    notes: list[str]  # a line for each choice and why

    @property
    def device(self) -> torch.device:
        """The device of all this rank's tensors."""
        return self.build.device


def place(config: EngineConfig, rank: int, local_rank: int, rendezvous: RendezvousInfo | None) -> Placement:
    """Choose and join; ConfigError, CheckpointError and UnsupportedError say what to change."""
    info = ModelInfo.of(config)
    check_settings(info)
    fetch_model_weights(config, info)
    device, device_note = select_device(config.device, local_rank)
    dtype, dtype_note = select_dtype(config.dtype, device, info)
    refuse_inexact(config, info, device, dtype)
    ops, attention_note = select_attention(config.attention_backend, device, exact=config.is_exact)
    enter_thread(device, num_threads(config))
    groups, all_reduce_note = _join_groups(config, rank, rendezvous, device, dtype)
    layers = stage_layers(info.num_layers, config.pipeline_parallel_size, config.pipeline_partition)
    scheme = info.quantization_scheme
    quantization, quantization_notes = select_quantization(config.quantization, scheme, device, dtype)
    build = replace(
        build_context(config, info, groups, dtype, device, ops, quantization),
        offload_bytes=offload_bytes(config, device, quantized=bool(quantization_notes)),
        kv_dtype=select_kv_dtype(config.kv_cache_dtype, device),
        state_dtype=select_state_dtype(config.recurrent_state_dtype, info),
    )
    notes = [device_note, dtype_note, attention_note, *quantization_notes]
    return Placement(info, build, [*notes, *_parallel_notes(config, layers, all_reduce_note)])


def build_context(
    config: EngineConfig,
    info: ModelInfo,
    groups: ParallelGroups,
    dtype: torch.dtype,
    device: torch.device,
    attention_ops: AttentionOps,
    quantization: QuantMethod,
) -> BuildContext:
    """Makes the context of the rank with these groups, as far as its weights depend on it."""
    stages = stage_layers(info.num_layers, config.pipeline_parallel_size, config.pipeline_partition)
    return BuildContext(
        dtype=dtype,
        device=device,
        max_model_len=config.max_model_len or info.max_position_embeddings,
        attention_ops=attention_ops,
        groups=groups,
        stage_layers=stages[groups.pp.rank],
        quantization=quantization,
        redundant_experts=config.num_redundant_experts if config.enable_eplb else None,
        adapts_shared=config.enable_lora and (config.lora_experts or config.lora_shared_experts),
        is_exact=config.is_exact,
        whole_prompts=whole_prompts(config, info, config.max_model_len or info.max_position_embeddings),
        whole_steps=config.whole_steps != "off",
        has_leaves=config.deterministic == "batch_and_layout",
    )


def offload_bytes(config: EngineConfig, device: torch.device, *, quantized: bool) -> int:
    """Weights that this rank keeps in host memory. ConfigError where that makes no sense, or not yet."""
    if not config.cpu_offload_gb:
        return 0
    refusal = None
    if not platform_of(device).is_async:
        refusal = f"a {platform_of(device).label}'s weights lie in host memory anyway"
    elif quantized:
        refusal = "quantized weights are not streamed yet"
    if refusal is not None:
        raise ConfigError(f"cpu_offload_gb={config.cpu_offload_gb:g}: {refusal}; leave it out", param="cpu_offload_gb")
    return int(config.cpu_offload_gb * (1 << 30))


def _join_groups(
    config: EngineConfig, rank: int, rendezvous: RendezvousInfo | None, device: torch.device, dtype: torch.dtype
) -> tuple[ParallelGroups, str]:
    """This rank's groups, and a line on how their sums are computed."""
    if rendezvous is None:
        return ParallelGroups(), ""
    store = connect_store(rendezvous.address, config.world_size)
    sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
    whole_experts = config.enable_expert_parallel
    groups = join_groups(store, rank, *sizes, device, rendezvous.address[0], whole_experts=whole_experts)
    first = rank - groups.tp.rank
    one_node = rendezvous.share_a_node(range(first, first + groups.tp.size))
    return with_small_all_reduce(groups, config.small_all_reduce, dtype, device, one_node)


def _parallel_notes(config: EngineConfig, layers: list[range], all_reduce: str) -> list[str]:
    if config.world_size == 1:
        return []
    note = f"parallel: TP {config.tensor_parallel_size} x PP {config.pipeline_parallel_size}"
    if config.enable_expert_parallel:
        note += ", whole experts a rank"
    if config.pipeline_parallel_size > 1:
        note += f", layers a stage {'+'.join(str(len(stage)) for stage in layers)}"
    return [note, all_reduce] if config.tensor_parallel_size > 1 else [note]
