"""TTFT, ITL and E2E as rows of their own in Locust's statistics, web page and CSV; importing this registers them.

The rows are logged past `Aggregated`, which so goes on counting HTTP requests and their failures and nothing else.
ITL gets one sample for each gap between chunks, the two others one for each answer. Times are milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from locust import events
from locust.env import Environment
from locust.runners import MasterRunner

from loadtest.record import AnswerRecord


class RecordRows:
    """Adds an answer's metrics to the statistics."""

    def __init__(self, environment: Environment) -> None:
        self._stats = environment.stats

    def __call__(self, context: dict[str, Any], **_: Any) -> None:
        """Listener of Locust's `request` event."""
        record: AnswerRecord | None = context.get("record")
        if record is None or record.error is not None or record.ttft_s is None:
            return
        self._log("TTFT", record.kind, [record.ttft_s])
        self._log("ITL", record.kind, record.gaps_s)
        self._log("E2E", record.kind, [record.ttft_s + sum(record.gaps_s)])

    def _log(self, metric: str, kind: str, times_s: list[float]) -> None:
        for time_s in times_s:
            # Locust's own values are floats, too, whatever its annotation says.
            self._stats.get(kind, metric).log(1e3 * time_s, 0)  # type: ignore[arg-type]


class RecordFile:
    """Appends every answer to a file, one JSON line each."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", encoding="utf-8", buffering=1 << 16)  # noqa: SIM115  # lives as long as the run

    def __call__(self, context: dict[str, Any], **_: Any) -> None:
        """Listener of Locust's `request` event."""
        if (record := context.get("record")) is not None:
            self._file.write(record.to_json() + "\n")

    def close(self, **_: Any) -> None:
        """Listener of Locust's `quitting` event."""
        self._file.close()


@events.init.add_listener
def listen(environment: Environment, **_: Any) -> None:
    """Register, in every process that runs users, the rows and the file if one is wanted."""
    if isinstance(environment.runner, MasterRunner):
        return
    environment.events.request.add_listener(RecordRows(environment))
    path = environment.parsed_options.records if environment.parsed_options else ""
    if path:
        records = RecordFile(path)
        environment.events.request.add_listener(records)
        environment.events.quitting.add_listener(records.close)
