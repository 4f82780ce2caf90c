"""Counts requests against a model's service level objectives, for one engine replica."""

from __future__ import annotations

from collections import deque

from app.config.slo import SloConfig
from app.records.stats import RequestTimings
from app.telemetry.metrics_recorder import MetricsRecorder

WINDOW = 1000  # requests that the share of each objective goes by


class Objectives:
    """Lives on the engine's thread; `publish` may be called from another."""

    def __init__(self, recorder: MetricsRecorder, slo: SloConfig) -> None:
        self._recorder = recorder
        self._slo = slo
        self._last: dict[str, deque[bool]] = {"ttft": deque(), "itl": deque()}
        self._num_met = {"ttft": 0, "itl": 0}

    def judge(self, timings: RequestTimings, *, failed: bool) -> None:
        """Count a request that ended, against what it shows anything about: one token has no ITL, and the first token
        of a request that came from another replica was that one's. One that `failed` has met nothing."""
        met = {}
        for slo, seconds, most in (
            ("ttft", timings.ttft_s, self._slo.ttft_s),
            ("itl", timings.per_token_s, self._slo.itl_s),
        ):
            if failed or seconds is not None:
                met[slo] = not failed and seconds is not None and seconds <= most
        for slo, is_met in met.items():
            self._recorder.increment("manta:slo_requests_total", 1.0, slo, "yes" if is_met else "no")
            self._note(slo, is_met)
        if all(met.values()):
            self._recorder.increment("manta:goodput_tokens_total", timings.num_own_tokens)

    def publish(self) -> None:
        """Set the shares; an objective that no request has shown anything about has none."""
        for slo, last in self._last.items():
            if num := len(last):
                self._recorder.set("manta:slo_attainment", min(1.0, self._num_met[slo] / num), slo)

    def _note(self, slo: str, is_met: bool) -> None:
        last = self._last[slo]
        last.append(is_met)
        self._num_met[slo] += is_met - (last.popleft() if len(last) > WINDOW else 0)
