"""Which manager the workers' groups of layers want."""

from __future__ import annotations

import pytest

from app.engine.kv_cache.create import create_manager
from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.kv_cache.kv_groups import WHOLE, Windows
from app.engine.kv_cache.window_manager import WindowManager
from app.engine.worker_info import WorkerInfo


@pytest.mark.parametrize(
    ("windows", "kind"), [(WHOLE, KVCacheManager), ((6,), WindowManager), ((None, 6), WindowManager)]
)
def test_by_the_windows(windows: Windows, kind: type[KVCacheManager]) -> None:
    info = WorkerInfo(30, "fake", "int", num_host_blocks=7, kv_windows=windows)
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
    assert kv.connector is not None
    assert kv.connector.stats().num_blocks == 7
