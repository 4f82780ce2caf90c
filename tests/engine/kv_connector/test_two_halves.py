"""A connector from outside of the tree: both halves in one file, and one line of the table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.backends import KV_CONNECTORS
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from tests.engine.core_driver import KEY, make_request, run
from tests.tiny_models import tiny_model

FILE = """
from app.engine.kv_connector.base import KVConnector

TOLD = []

class Counter(KVConnector):
    worker = "counting_connector:create"

    def __init__(self, block_bytes):
        self.block_bytes, self.num_computed, self.num_evicted = block_bytes, 0, 0

    @classmethod
    def of(cls, reports, sink):
        return cls(sum(reports))

    def match(self, hashes):
        return 0

    def hold(self, hashes):
        raise AssertionError("nothing matches")

    load = hold

    def take_evicted(self, hashes, blocks):
        self.num_evicted += len(blocks)

    def take_computed(self, hashes, blocks):
        self.num_computed += len(blocks)

    def forget(self):
        pass

    def count_lookup(self, num_tokens, num_hit_tokens):
        pass

    def take_transfers(self):
        return self.num_computed, self.num_evicted

    def figures(self):
        return {"tier_queries": self.num_computed}

def create(context):
    from dataclasses import replace

    from app.worker.rows.worker_feature import WorkerFeature

    class Half(WorkerFeature):
        def report_start(self, info):
            return replace(info, kv_connector=(context.forward.cache.spec.bytes_per_block,))

        def before(self, step):
            if step.transfers is not None:
                TOLD.append(step.transfers)

    return Half()
"""


def test_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's half hears of blocks that steps fill and that the device gives up, and tells the worker's."""
    (tmp_path / "counting_connector.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(KV_CONNECTORS._table, "counting", "counting_connector:Counter")
    monkeypatch.delitem(sys.modules, "counting_connector", raising=False)
    import counting_connector  # type: ignore[import-not-found]

    sizes = {"block_size": 4, "num_blocks": 12, "max_num_seqs": 2, "max_model_len": 48}
    config = EngineConfig(
        model=str(tiny_model("llama")), device="cpu", num_threads=1, executor="in_process", kv_connector="counting",
        **sizes,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
    info = core.start()
    assert info.kv_connector == (core.scheduler.kv.connector.block_bytes,)  # type: ignore[union-attr]
    run(core, [make_request(f"r{i}", [5 + i, 9, 200] * 7, max_tokens=8, ignore_eos=True) for i in range(4)])
    core.shutdown()
    kv = core.scheduler.kv
    assert isinstance(kv.connector, counting_connector.Counter)
    assert core.stats().figures["tier_queries"] == kv.connector.num_computed, "its own number, under a line of METRICS"
    assert kv.connector.num_computed == 4 * ((21 + 7) // 4), "each request's full blocks, none of which any other has"
    assert kv.connector.num_evicted == kv.connector.num_computed - kv.pool.num_cached > 0
    assert sorted(counting_connector.TOLD) == counting_connector.TOLD
    assert counting_connector.TOLD[-1] == (kv.connector.num_computed - 1, kv.connector.num_evicted)  # but for the end
