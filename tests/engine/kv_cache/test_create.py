"""Which manager the workers' groups of layers want."""

from __future__ import annotations

import pytest

from app.engine.kv_cache.create import create_manager
from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.window_manager import WindowManager
from app.engine.kv_connector.host_memory import HostMemory
from app.records.host_pool import HostPoolReport
from app.records.kv_groups import WHOLE, Windows
from app.records.state_pool import StatePool
from app.records.worker_info import WorkerInfo


@pytest.mark.parametrize(
    ("windows", "kind"), [(WHOLE, KVCacheManager), ((6,), WindowManager), ((None, 6), WindowManager)]
)
def test_by_the_windows(windows: Windows, kind: type[KVCacheManager]) -> None:
    info = WorkerInfo(30, "fake", "int", kv_connector=(HostPoolReport(7, 8),), kv_windows=windows)
    kv = create_manager(
        info,
        4,
        hash_key=b"key",
        max_tokens_in_flight=8,
        enable_prefix_caching=True,
        sink=None,
        connector="host_memory",
    )
    assert type(kv) is kind
    assert (kv.num_groups, kv.block_size, kv.pool.num_blocks) == (len(windows), 4, 30)
    assert isinstance(kv.connector, HostMemory)
    assert kv.connector.num_blocks == 7


@pytest.mark.parametrize(("num_kept", "finds"), [(0, False), (3, True)])
def test_blocks_alone_are_no_prefix_of_layers_that_keep_states(num_kept: int, finds: bool) -> None:
    info = WorkerInfo(30, "fake", "int", states=StatePool(64, num_kept))
    kv = create_manager(
        info, 4, hash_key=b"key", max_tokens_in_flight=8, enable_prefix_caching=True, sink=None, connector="host_memory"
    )
    assert kv.enable_prefix_caching == info.finds_prefixes == finds
