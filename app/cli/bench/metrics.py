"""Figures of a serving benchmark, by the definitions of `vllm bench serve`, and under its names.

TTFT: first chunk with a choice minus just before the POST. ITL: each gap between chunks, of all requests together.
E2EL: last chunk minus just before the POST. TPOT: (E2EL - TTFT) / (output tokens - 1), of requests with more than one
output token; the others count as 0 for goodput. Goodput: requests a second that meet every objective. Percentiles
interpolate linearly; failed requests count in `failed` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.cli.stream_client import StreamResult
from app.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
OBJECTIVES = ("ttft", "tpot", "e2el")


def calculate(
    results: Sequence[StreamResult],
    duration_s: float,
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """All figures of a run of `duration_s` seconds. `goodput` maps ttft, tpot, e2el to most milliseconds.

    A server that sends no usage is taken to send one token a chunk.
    """
    good = [result for result in results if result.error is None]
    lengths = [output_tokens(result) for result in good]
    num_input = sum(result.num_prompt_tokens for result in good)
    tpots = [tpot_s(result) for result in good]
    samples = {
        "ttft": [result.ttft_s for result in good],
        "tpot": [tpot for tpot, length in zip(tpots, lengths, strict=True) if length > 1],
        "itl": [gap for result in good for gap in result.itls_s],
        "e2el": [result.e2e_s for result in good],
    }
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": sum(lengths),
        "request_throughput": len(good) / duration_s,
        "output_throughput": sum(lengths) / duration_s,
        "total_token_throughput": (num_input + sum(lengths)) / duration_s,
        "max_concurrent_requests": _most_at_once(good),
    }
    if goodput:
        each = {"ttft": samples["ttft"], "tpot": tpots, "e2el": samples["e2el"]}
        met = sum(all(1e3 * each[name][i] <= most for name, most in goodput.items()) for i in range(len(good)))
        figures["request_goodput"] = met / duration_s
    for name in METRICS:
        figures.update(_spread(name, samples[name], percentiles))
    return figures


def output_tokens(result: StreamResult) -> int:
    """Output tokens: those of usage, else one for each chunk."""
    return result.num_tokens or len(result.event_times)


def tpot_s(result: StreamResult) -> float:
    """Time per output token after the first; 0 with fewer than two."""
    length = output_tokens(result)
    return (result.e2e_s - result.ttft_s) / (length - 1) if length > 1 else 0.0


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:30` as a mapping. ConfigError names what is no objective."""
    goodput = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in OBJECTIVES:
            raise ConfigError(
                f"--goodput {text!r}: expected NAME:MILLISECONDS with NAME one of {', '.join(OBJECTIVES)}"
            )
        try:
            goodput[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {text!r}: {value!r} is no number of milliseconds") from None
        if not goodput[name] >= 0:
            raise ConfigError(f"--goodput {text!r}: milliseconds must not be negative")
    return goodput


def percentile_key(percentile: float, name: str) -> str:
    """The name of a figure, such as `p99_ttft_ms`."""
    return f"p{percentile:g}_{name}_ms"


def _spread(name: str, samples: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.asarray(samples or [0.0])
    spread = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return spread | {percentile_key(p, name): float(np.percentile(values, p)) for p in percentiles}


def _most_at_once(results: Sequence[StreamResult]) -> int:
    """Most requests between their POST and their last chunk; one that ends as another begins does not overlap it."""
    events = sorted([(r.begin, 1) for r in results] + [(r.begin + r.e2e_s, -1) for r in results])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most
