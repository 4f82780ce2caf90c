"""The KV-cache manager for what the workers have: one group of layers, or several of which some have windows."""

from __future__ import annotations

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.state_events import StateEvents
from app.engine.kv_cache.state_manager import StateManager
from app.engine.kv_cache.window_manager import FirstGroup, WindowManager
from app.engine.kv_connector import create_connector
from app.records.kv_events import KVEventSink
from app.records.kv_groups import WHOLE, KVGroups
from app.records.worker_info import WorkerInfo


def create_manager(
    info: WorkerInfo,
    block_size: int,
    *,
    hash_key: bytes,
    max_tokens_in_flight: int,
    enable_prefix_caching: bool,
    sink: KVEventSink | None,
    connector: str,
) -> KVCacheManager:
    """`max_tokens_in_flight`: most tokens of all steps between their scheduling and their return; `connector`: the tier
    of the workers' host memory, where they have made room for one."""
    enable_prefix_caching = enable_prefix_caching and info.finds_prefixes
    if enable_prefix_caching and info.states is not None:
        events = StateEvents(sink)
        return StateManager(
            info.num_blocks,
            block_size,
            info.states,
            hash_key=hash_key,
            keeps_answers=info.num_draft_tokens == 0,
            sink=events,
            connector=create_connector(connector, info, events),
        )
    if info.kv_windows == WHOLE:
        return KVCacheManager(
            info.num_blocks,
            block_size,
            hash_key=hash_key,
            enable_prefix_caching=enable_prefix_caching,
            sink=sink,
            connector=create_connector(connector, info, sink),
        )
    sink = None if sink is None else FirstGroup(sink)
    return WindowManager(
        info.num_blocks,
        KVGroups(info.kv_windows, block_size),
        hash_key=hash_key,
        max_tokens_in_flight=max_tokens_in_flight,
        enable_prefix_caching=enable_prefix_caching,
        sink=sink,
        connector=create_connector(connector, info, sink),
    )
