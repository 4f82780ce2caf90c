"""How many KV-cache blocks: as configured, or what memory allows.

On a GPU a full step is run first, so that what activations need is measured and not guessed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from app.config import EngineConfig
from app.engine.attention.kv_cache import KVCacheSpec
from app.errors import ConfigError
from app.platforms import platform_of

MIB = 1 << 20
# The host keeps an object for each block; only a tiny model on a large GPU could have more.
MAX_BLOCKS = 1 << 19


def size_kv_cache(
    config: EngineConfig,
    spec: KVCacheSpec,
    max_model_len: int,
    device: torch.device,
    full_step: Callable[[], None],
    reserve: Callable[[], int],
) -> int:
    """Blocks to allocate. On a GPU only, `full_step` runs the largest step there can be, and `reserve` gives the bytes
    that will be taken later for other things (graphs).

    Raises ConfigError when memory does not hold one request of max_model_len tokens.
    """
    needed = -(-max_model_len // spec.block_size)
    if not spec.layers:  # blocks are numbers that keep the host's books
        return config.max_num_seqs * needed
    if config.num_blocks is not None:
        return config.num_blocks
    runtime = platform_of(device).runtime
    if runtime is None:
        budget, option = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        budget, option = _free_device_bytes(config, device, full_step, reserve), "gpu_memory_utilization"
    affordable = budget // spec.bytes_per_block
    if affordable < needed:
        raise ConfigError(
            f"the KV cache can have {max(budget, 0) // MIB} MiB, which holds {max(affordable, 0) * spec.block_size} "
            f"tokens, less than one request of max_model_len={max_model_len}: raise {option} or lower max_model_len",
            param=option,
        )
    # More blocks than all rows can fill still serve as prefix cache on a GPU; on a CPU they would be a waste.
    useful = needed * config.max_num_seqs if runtime is None else max(MAX_BLOCKS, needed)
    return min(affordable, useful)


def describe(spec: KVCacheSpec, num_blocks: int) -> str:
    """A line for the start-up notes."""
    if not spec.layers:
        return "KV cache: none, every prompt is computed in one step"
    mib = num_blocks * spec.bytes_per_block / MIB
    kind = ", fp8" if spec.is_quantized else ""
    return f"KV cache: {num_blocks} blocks of {spec.block_size} tokens ({mib:.{0 if mib >= 10 else 1}f} MiB{kind})"


def _free_device_bytes(
    config: EngineConfig, device: torch.device, full_step: Callable[[], None], reserve: Callable[[], int]
) -> int:
    runtime: Any = platform_of(device).runtime
    gc.collect()
    runtime.empty_cache()
    runtime.reset_peak_memory_stats(device)
    resident = runtime.memory_allocated(device)
    full_step()
    runtime.synchronize(device)
    activations: int = runtime.max_memory_allocated(device) - resident
    later = reserve()
    gc.collect()
    runtime.empty_cache()
    free: int
    total: int
    free, total = runtime.mem_get_info(device)  # `free` knows of weights, other processes and driver alike
    return int(total * config.gpu_memory_utilization) - (total - free) - activations - later
