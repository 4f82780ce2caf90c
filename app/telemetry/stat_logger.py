"""Stat loggers: what is told an engine replica's figures at intervals, beside Prometheus and Ray.

Each has a thread of its own and one place for the newest figures, so that one which is slow, hangs or raises costs the
engine nothing: what it has not taken by then is replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from app.telemetry.metrics import METRICS
from app.telemetry.metrics_recorder import Snapshot

Figures = Mapping[str, float]
COMPLAINT_S = 60.0  # between two lines about a logger that fails

logger = logging.getLogger("manta.stats")


class StatLogger(ABC):
    """Told the figures of one engine replica. Its methods are called on one thread, one after another."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """`labels` tell the replica apart: `model_name` and `engine`, its rank."""
        self.labels = dict(labels)

    @abstractmethod
    def record(self, figures: Figures) -> None:
        """The figures of now, by the names of their series as Prometheus sees them without the labels of the replica:
        `vllm:num_requests_running`, `vllm:request_success_total{finished_reason="stop"}`; of a histogram `..._sum` and
        `..._count`. Totals count from the replica's start."""

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """The replica ends."""


class LogLine(StatLogger):
    """A line in the replica's log: tokens a second since the line before, requests, use of the KV cache."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self._last: Figures = {}
        self._at = time.monotonic()

    def record(self, figures: Figures) -> None:
        """Write the line."""
        now = time.monotonic()
        elapsed_s, self._at = max(now - self._at, 1e-3), now

        def since(name: str) -> float:
            return figures[name] - self._last.get(name, 0.0)

        queries = since("vllm:prefix_cache_queries_total")
        logger.info(
            "%s[%s]: prompt %.1f tokens/s, generation %.1f tokens/s; running %d, waiting %d; KV cache %.1f %%, prefix "
            "cache hits %.1f %%",
            *(self.labels.get("model_name", ""), self.labels.get("engine", "")),
            since("vllm:prompt_tokens_total") / elapsed_s,
            since("vllm:generation_tokens_total") / elapsed_s,
            *(figures["vllm:num_requests_running"], figures["vllm:num_requests_waiting"]),
            100 * figures["vllm:kv_cache_usage_perc"],
            100 * since("vllm:prefix_cache_hits_total") / queries if queries else 0.0,
        )
        self._last = figures


class StatLoggers:
    """Those of one replica, told every `interval_s`."""

    def __init__(self, kinds: Mapping[str, type[StatLogger]], labels: Mapping[str, str], interval_s: float) -> None:
        """A logger that cannot be made ends the start with what it raises."""
        self._runners: Sequence[_Runner] = [_Runner(name, kind(labels)) for name, kind in kinds.items()]
        self._interval_s = interval_s
        self._told: float | None = None

    def is_due(self, now: float) -> bool:
        """True if it is time to call `publish`."""
        return bool(self._runners) and (self._told is None or now - self._told >= self._interval_s)

    def publish(self, snapshot: Snapshot, now: float) -> None:
        """Hand the figures to every logger; never waits."""
        self._told = now
        figures = figures_of(snapshot)
        for runner in self._runners:
            runner.tell(figures)

    def close(self) -> None:
        """Let the loggers end; does not wait for them."""
        for runner in self._runners:
            runner.stop()


def figures_of(snapshot: Snapshot) -> dict[str, float]:
    """All series but the buckets of histograms, as they are now."""
    names = {metric.name: metric.labels for metric in METRICS}
    figures: dict[str, float] = {}
    for name, series in snapshot.values.items():
        for values, value in list(series.items()):
            figures[_series(name, names[name], values)] = value
    for name, histograms in snapshot.histograms.items():
        for values, histogram in list(histograms.items()):
            figures[_series(f"{name}_sum", names[name], values)] = histogram.sum
            figures[_series(f"{name}_count", names[name], values)] = float(histogram.count)
    return figures


def _series(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in zip(labels, values, strict=True))
    return f"{name}{{{inside}}}" if inside else name


class _Runner:
    """One logger in its thread."""

    def __init__(self, name: str, target: StatLogger) -> None:
        self._name = name
        self._target = target
        self._changed = threading.Condition()  # guards the next three
        self._newest: Figures | None = None
        self._missed = 0
        self._stopping = False
        self._complained: float | None = None
        threading.Thread(target=self._run, name=f"stats-{name}", daemon=True).start()

    def tell(self, figures: Figures) -> None:
        with self._changed:
            self._missed += self._newest is not None
            self._newest = figures
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            figures, missed = taken
            if missed:
                self._complain("is slower than stat_logger_interval_s: %d times its figures were replaced", missed)
            try:
                self._target.record(figures)
            except Exception as error:
                self._complain("failed: %s", f"{type(error).__name__}: {error}")
        try:
            self._target.close()
        except Exception as error:
            self._complain("failed to close: %s", f"{type(error).__name__}: {error}")

    def _take(self) -> tuple[Figures, int] | None:
        """The newest figures, once there are any, and how many were missed; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._newest is not None)
            if self._stopping or self._newest is None:
                return None
            taken = self._newest, self._missed
            self._newest, self._missed = None, 0
            return taken

    def _complain(self, what: str, argument: object) -> None:
        now = time.monotonic()
        if self._complained is None or now - self._complained >= COMPLAINT_S:
            self._complained = now
            logger.warning("stat logger %s " + what, self._name, argument)
