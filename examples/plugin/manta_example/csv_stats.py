"""A line of comma-separated figures for each interval, in the file that EXAMPLE_STATS_FILE names."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping

from app.telemetry.stat_logger import Figures, StatLogger

COLUMNS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total")


class CsvStats(StatLogger):
    """Model, rank, time, and the columns."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self._file = open(os.environ["EXAMPLE_STATS_FILE"], "a", newline="")  # noqa: SIM115  # until close
        self._writer = csv.writer(self._file, lineterminator="\n")

    def record(self, figures: Figures) -> None:
        """See StatLogger."""
        values = [f"{figures[name]:g}" for name in COLUMNS]
        self._writer.writerow([self.labels["model_name"], self.labels["engine"], f"{time.time():.3f}", *values])
        self._file.flush()

    def close(self) -> None:
        """See StatLogger."""
        self._file.close()
