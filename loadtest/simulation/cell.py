"""One cell of the tables: a trace, a fleet size, a KV pressure and a policy, from traffic to percentiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from loadtest.simulation.fleet import Fleet
from loadtest.simulation.speeds import Speeds
from loadtest.simulation.traces import create_trace
from loadtest.simulation.traffic import BLOCK_SIZE, Trace, reuse

TYPICAL_BATCH = 16  # decodes in a step, for the estimate of what a request costs
LEAST_REQUESTS = 4  # a pool holds so many of the largest


@dataclass(slots=True, frozen=True)
class Setting:
    """What is simulated. `load` 1 keeps every replica busy if no prompt is ever cached."""

    trace: str
    num_replicas: int
    pressure: float
    policy: str
    requests_per_replica: int = 64
    load: float = 0.9
    seed: int = 0
    adapter_places: int = 0  # in each replica's host memory; 0: for all


@dataclass(slots=True, frozen=True)
class Scale:
    """What follows from a trace and a setting: its length in seconds and each replica's pool in blocks."""

    length_s: float
    num_blocks: int
    ideal_hit_rate: float  # that of one endless cache shared by all replicas

    @classmethod
    def of(cls, trace: Trace, setting: Setting, speeds: Speeds) -> Scale:
        """The pressure is (working set + what running requests hold) / pools of all replicas."""
        hits, working_set = reuse(trace)
        replica_s = held_block_s = 0.0
        prompt_tokens = largest = 0
        for request in trace:
            tokens, output = request.prompt.num_tokens, request.num_output_tokens
            step_s = speeds.decode_s(TYPICAL_BATCH, TYPICAL_BATCH * tokens)
            prefill_s = speeds.prefill_s(tokens)
            replica_s += prefill_s + output * step_s / TYPICAL_BATCH
            own_blocks = request.whole.num_tokens / BLOCK_SIZE
            held_block_s += own_blocks * (prefill_s + output * step_s)
            prompt_tokens += tokens
            largest = max(largest, -(-request.whole.num_tokens // BLOCK_SIZE))
        length_s = replica_s / (setting.num_replicas * setting.load)
        blocks = (working_set + held_block_s / length_s) / (setting.pressure * setting.num_replicas)
        return cls(length_s, max(round(blocks), LEAST_REQUESTS * largest), hits * BLOCK_SIZE / prompt_tokens)


@dataclass(slots=True, frozen=True)
class Result:
    """Seconds, shares and counts; all but the two CPU times are the same for the same setting."""

    setting: Setting
    num_requests: int
    length_s: float
    pool_tokens: int
    prompt_tokens_mean: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    e2e_p50_s: float
    e2e_p99_s: float
    hit_rate: float  # cached / prompt tokens
    ideal_hit_rate: float
    imbalance: float  # busiest replica's busy time / the mean of all
    mean_busy: float  # share of the time that replicas were busy, until the last request ended
    num_replaced: int
    adapter_loads: float  # copies into slots, per request
    adapter_reads: float  # from disk, per request
    decision_us: float  # CPU of a decision, mean
    decision_p99_us: float
    events_us: float  # CPU to apply the KV events, per request

    def as_json(self) -> dict[str, Any]:
        """The result as one flat dict."""
        fields: dict[str, Any] = asdict(self)
        cell: dict[str, Any] = fields.pop("setting")
        return cell | fields


def simulate(setting: Setting, speeds: Speeds | None = None) -> Result:
    """Run one cell; KeyError or UnsupportedError for unknown names."""
    speeds = speeds or Speeds()
    num_requests = setting.requests_per_replica * setting.num_replicas
    trace = create_trace(setting.trace, num_requests, setting.num_replicas, setting.seed)
    scale = Scale.of(trace, setting, speeds)
    fleet = Fleet(
        setting.policy,
        setting.num_replicas,
        scale.num_blocks,
        setting.seed,
        speeds,
        adapter_places=setting.adapter_places,
    )
    fleet.run(trace, scale.length_s)
    return _result(setting, trace, scale, fleet)


def _result(setting: Setting, trace: Trace, scale: Scale, fleet: Fleet) -> Result:
    requests = list(trace)
    ttft = np.percentile([r.first_token_s - r.sent_s for r in requests], [50, 90, 99])
    e2e = np.percentile([r.ended_s - r.sent_s for r in requests], [50, 99])
    prompt_tokens = sum(r.prompt.num_tokens for r in requests)
    busy = np.array([replica.busy_s for replica in fleet.replicas.values()])
    decision_us = np.array(fleet.decision_s) * 1e6
    return Result(
        setting=setting,
        num_requests=len(requests),
        length_s=scale.length_s,
        pool_tokens=scale.num_blocks * BLOCK_SIZE,
        prompt_tokens_mean=prompt_tokens / len(requests),
        ttft_p50_s=float(ttft[0]),
        ttft_p90_s=float(ttft[1]),
        ttft_p99_s=float(ttft[2]),
        e2e_p50_s=float(e2e[0]),
        e2e_p99_s=float(e2e[1]),
        hit_rate=sum(r.num_cached_tokens for r in requests) / prompt_tokens,
        ideal_hit_rate=scale.ideal_hit_rate,
        imbalance=float(busy.max() / busy.mean()),
        mean_busy=float(busy.mean() / fleet.now),
        num_replaced=fleet.num_replaced,
        adapter_loads=sum(replica.adapters.num_loads for replica in fleet.replicas.values()) / len(requests),
        adapter_reads=sum(replica.adapters.num_reads for replica in fleet.replicas.values()) / len(requests),
        decision_us=float(decision_us.mean()),
        decision_p99_us=float(np.percentile(decision_us, 99)),
        events_us=fleet.events_s / len(requests) * 1e6,
    )
