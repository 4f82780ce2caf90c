"""The figures that engine replicas and ingresses tell Serve of themselves (`record_autoscaling_stats`), and what they
say.

Serve keeps each figure of each replica as a series of the last LOOK_BACK_S seconds. A series is known by its newest
time: one that stays the same for STALE_S of the controller's clock has ended, whatever the replica's clock says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from app.deployments.autoscaling.policy import ReplicaLoad

if TYPE_CHECKING:
    from app.records.stats import EngineStats

INTERVAL_S = 1.0  # how often a replica records and sends its figures
WAKE_INTERVAL_S = 0.25  # how often an ingress does, where a model may sleep
LOOK_BACK_S = 10.0  # over which a rate is taken
STALE_S = 10.0

WAITING = "waiting:"  # an ingress's requests without a replica, by model
WAITING_TOKENS = "waiting_tokens:"  # of their prompts


class Point(Protocol):
    """One of Serve's measurements."""

    timestamp: float
    value: float


Series = Sequence[Point]


def engine_figures(stats: EngineStats, num_requests: int, start_s: float) -> dict[str, float]:
    """Returns what one engine replica tells, which took `start_s` seconds to start and has so many requests of
    clients."""
    is_decoding = stats.outstanding_decode_tokens > 0 and stats.num_running > stats.num_paused
    return {
        # All prefill that ever came: it grows by what arrives, whether it is done or waits.
        "arrived_prefill_s": stats.prefill_s_total + stats.queued_prefill_s,
        "queued_prefill_s": stats.queued_prefill_s,
        "decode_step_s": stats.decode_step_s if is_decoding else 0.0,
        "kv_share": stats.kv_cache_usage,
        "num_requests": float(num_requests),
        "prefill_token_s": stats.prefill_token_s,
        "start_s": start_s,
    }


def ingress_figures(waiting: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """Returns what one ingress tells, from the numbers of requests that wait for a replica and of their tokens,
    by model."""
    figures: dict[str, float] = {}
    for model, (num_requests, num_tokens) in waiting.items():
        figures[WAITING + model] = float(num_requests)
        figures[WAITING_TOKENS + model] = float(num_tokens)
    return figures


def replica_load(series: Mapping[str, Series]) -> ReplicaLoad | None:
    """One replica's load by its series, of which each has a point at least; None where one is missing."""
    names = ("arrived_prefill_s", "queued_prefill_s", "decode_step_s", "kv_share", "num_requests")
    if not all(series.get(name) for name in names):
        return None
    return ReplicaLoad(
        prefill_rate=_rate(series["arrived_prefill_s"]),
        queued_prefill_s=last(series["queued_prefill_s"]),
        decode_step_s=sum(point.value for point in series["decode_step_s"]) / len(series["decode_step_s"]),
        kv_share=last(series["kv_share"]),
        num_requests=max(point.value for point in series["num_requests"]),
        prefill_token_s=last(series.get("prefill_token_s", ())),
        start_s=last(series.get("start_s", ())),
    )


def last(series: Series) -> float:
    """The newest value, 0 without any."""
    return series[-1].value if series else 0.0


def _rate(counter: Series) -> float:
    """Returns how fast it grows; 0 as long as there is one point only."""
    seconds = counter[-1].timestamp - counter[0].timestamp
    return max(0.0, counter[-1].value - counter[0].value) / seconds if seconds > 0 else 0.0
