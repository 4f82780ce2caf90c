"""A replica tells Routers of itself as it is."""

from __future__ import annotations

from app.config.engine import EngineConfig
from app.config.model import ModelConfig
from app.deployments.replica.load_reporter import LoadReporter
from app.records.worker_info import WorkerInfo
from tests.deployments.replica.test_engine_metrics import stats


def test_its_rows_are_those_that_it_has() -> None:
    """Memory for what an encoder gave may be for fewer requests than `max_num_seqs`."""
    engine = EngineConfig(model="m", max_num_seqs=64)
    for most_rows, expected in ((None, 64), (3, 3), (100, 64)):
        info = WorkerInfo(10, "cpu", "float32", most_rows=most_rows)
        sizes = 160, info.num_rows(engine.max_num_seqs)
        reporter = LoadReporter(ModelConfig(name="m", engine=engine), "r", "1", 0, *sizes, "")
        report = reporter.report(stats(), is_accepting=True, answers=True)
        assert report.max_num_seqs == expected
