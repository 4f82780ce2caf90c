"""Decides how many KV-cache blocks there are: as configured, or what memory allows.

On a GPU a full step is run first, so that what activations need is measured and not guessed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.platforms import platform_of
from app.records.kv_groups import WHOLE
from app.worker.attention.kv_cache import KVCacheSpec

MIB = 1 << 20
# The limit for each group of layers. The host keeps an object for each block; only a tiny model on a large GPU could
# have more.
MAX_BLOCKS = 1 << 19
MOST_KEPT = 16  # copies of states for each request at once, where they lie in slots
ON_A_CPU = 2


def size_kv_cache(
    config: EngineConfig,
    spec: KVCacheSpec,
    max_model_len: int,
    device: torch.device,
    free_bytes: Callable[[], int],
) -> int:
    """Blocks to allocate. `free_bytes` measures what a GPU has left; see free_device_bytes.

    Raises ConfigError when memory does not hold one request of max_model_len tokens.
    """
    needed = spec.groups.num_blocks(max_model_len)
    if not spec.layers and (not spec.states or config.num_blocks is None):  # blocks are numbers of the host's books
        return min(config.max_num_seqs * needed, max(MAX_BLOCKS, needed))
    if config.num_blocks is not None:
        return _configured(config.num_blocks, spec)
    runtime = platform_of(device).runtime
    if runtime is None:
        # On a GPU states and encoded inputs show in what is free.
        beside = config.max_num_seqs * spec.bytes_per_state
        beside += num_encoded_slots(config, spec, device) * spec.bytes_per_encoded
        budget = config.kv_cache_memory_bytes - beside
        option = "kv_cache_memory_bytes"
    else:
        budget, option = free_bytes(), "gpu_memory_utilization"
    affordable = budget // spec.bytes_per_block
    if affordable < needed + spec.groups.num_kept:
        held = spec.groups.max_tokens(max(affordable - spec.groups.num_kept, 0))
        states = f" beside {config.max_num_seqs} requests' states (max_num_seqs)" if spec.states else ""
        raise ConfigError(
            f"the KV cache can have {max(budget, 0) // MIB} MiB{states}, which holds {held} "
            f"tokens, less than one request of max_model_len={max_model_len}: raise {option} or lower max_model_len",
            param=option,
        )
    # More blocks than all rows can fill still serve as prefix cache on a GPU; on a CPU they would be a waste.
    most = max(MAX_BLOCKS * len(spec.windows), needed)
    useful = needed * config.max_num_seqs + spec.groups.num_kept if runtime is None else most
    if spec.states and config.enable_prefix_caching:
        useful = min(useful + ON_A_CPU * config.max_num_seqs * spec.blocks_per_state, most)
    return min(affordable, useful)


def num_state_slots(
    config: EngineConfig, spec: KVCacheSpec, device: torch.device, free_bytes: Callable[[], int]
) -> int | None:
    """Slots for copies of states, from which requests with the same prefix go on; None: copies lie in blocks.

    Where nothing is kept of tokens slots take what memory there is, at most MOST_KEPT for each request at once; on a
    CPU there are two for each.
    """
    if not spec.states or not config.enable_prefix_caching:
        return 0
    if spec.layers:
        return None
    if platform_of(device).runtime is None:
        return ON_A_CPU * config.max_num_seqs
    return max(0, min(free_bytes() // spec.bytes_per_state, MOST_KEPT * config.max_num_seqs))


def num_encoded_slots(config: EngineConfig, spec: KVCacheSpec, device: torch.device) -> int:
    """Requests at once of which something of an encoder's output is kept: max_num_seqs, or as many as half of the
    memory for caches holds, at least one."""
    if not spec.encoded:
        return 0
    runtime: Any = platform_of(device).runtime
    budget = config.kv_cache_memory_bytes
    if runtime is not None:
        free, total = runtime.mem_get_info(device)
        budget = int(free - total * (1 - config.gpu_memory_utilization))
    return max(1, min(config.max_num_seqs, budget // 2 // spec.bytes_per_encoded))


def describe_encoded(spec: KVCacheSpec, num_slots: int) -> list[str]:
    """A line for the start-up notes where something of an encoder's output is kept."""
    if not spec.encoded:
        return []
    return [f"encoded inputs: {spec.bytes_per_encoded / MIB:.2f} MiB a request, {num_slots} requests at once"]


def describe(
    spec: KVCacheSpec, num_blocks: int, max_model_len: int, num_rows: int = 0, num_slots: int | None = 0
) -> list[str]:
    """Lines for the start-up notes; `num_rows`: most requests at once, `num_slots`: for copies of states."""
    if spec.states:
        states = replace(spec, states=())
        return [
            _describe_states(spec, num_rows, num_blocks, num_slots),
            *(describe(states, num_blocks, max_model_len) if spec.layers else ()),
        ]
    if not spec.layers:
        return ["KV cache: none, every prompt is computed in one step"]
    mib = num_blocks * spec.bytes_per_block / MIB
    kind = f", {spec.quantized_to}" if spec.is_quantized else ""
    size = f"{num_blocks} blocks of {spec.block_size} tokens ({mib:.{0 if mib >= 10 else 1}f} MiB{kind})"
    full = num_blocks * spec.bytes_per_block // (spec.bytes_per_token * spec.block_size)
    full_room = f"{full / spec.whole.num_blocks(max_model_len):.1f}"
    if spec.windows == WHOLE:
        return [f"KV cache: {size}, room for {full_room} requests of {max_model_len} tokens"]
    windows = ", ".join("all" if window is None else str(window) for window in spec.windows)
    room = f"{spec.groups.num_requests(num_blocks, max_model_len):.1f}"
    return [
        f"KV cache: {size} in {len(spec.place_specs)} layers; groups of layers that see {windows} tokens",
        f"KV cache: room for {room} requests of {max_model_len} tokens; {full_room} without hybrid_kv_cache",
    ]


def _describe_states(spec: KVCacheSpec, num_rows: int, num_blocks: int, num_slots: int | None) -> str:
    """Says what a state costs, in bytes and in tokens whose keys and values take as many, and how many fit."""
    mib = spec.bytes_per_state / MIB
    worth = f", as {spec.bytes_per_state // spec.bytes_per_token} tokens" if spec.bytes_per_token else ""
    if num_slots is None:
        each = spec.blocks_per_state
        kept = f"for prefixes one is kept in {each} blocks, at most {num_blocks // each} beside no tokens"
    elif num_slots:
        kept = f"{num_slots} more are kept for prefixes, {num_slots * mib:.1f} MiB"
    else:
        kept = "none are kept, so prefixes are not cached"
    return (
        f"states: {mib:.{0 if mib >= 10 else 2}f} MiB a request{worth}; {num_rows} requests at once "
        f"(max_num_seqs), {num_rows * mib:.{0 if num_rows * mib >= 10 else 1}f} MiB; {kept}"
    )


def _configured(num_blocks: int, spec: KVCacheSpec) -> int:
    """The memory of so many blocks of all layers, cut into blocks of a group; ConfigError where it holds no token."""
    if spec.windows == WHOLE:
        return num_blocks
    cut = num_blocks * spec.bytes_per_token * spec.block_size // spec.bytes_per_block
    if not spec.groups.max_tokens(cut - spec.groups.num_kept):
        raise ConfigError(
            f"num_blocks={num_blocks} holds no token in each of the {len(spec.windows)} groups of layers: raise it",
            param="num_blocks",
        )
    return cut


def free_device_bytes(
    config: EngineConfig, device: torch.device, full_step: Callable[[], None], reserve: Callable[[], int]
) -> int:
    """Bytes that a GPU has left for caches. `full_step` runs the largest step there can be, and `reserve` gives the
    bytes that will be taken later for other things (graphs)."""
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
