"""Loads that rise and fall, for autoscaling: when requests come, as shares of a trace's length."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from loadtest.simulation.traffic import SimRequest, Text, Trace, answered

NUM_DAYS = 1
NUM_BURSTS = 6
BURST_SHARE = 0.03  # of the trace's length
NUM_BATCHES = 3
BATCH_SHARE = 0.1  # of all requests, in each batch
NUM_PHASES = 2  # of silence and of load

Rate = Callable[[float], float]  # requests in a moment of the trace (0 to 1), 1: the most


def _step(at: float) -> float:
    return 1.0 if 1 / 3 <= at < 2 / 3 else 0.25


def _bursty(at: float) -> float:
    place = at * NUM_BURSTS % 1.0
    return 1.0 if 0.5 <= place < 0.5 + BURST_SHARE * NUM_BURSTS else 0.25


def _diurnal(at: float) -> float:
    return 0.55 - 0.45 * math.cos(2 * math.pi * NUM_DAYS * at)


def _even(at: float) -> float:
    return 0.4


def _on_off(at: float) -> float:
    return 0.7 if int(at * 2 * NUM_PHASES) % 2 else 0.0


RATES: dict[str, Rate] = {
    "step": _step,
    "bursty": _bursty,
    "diurnal": _diurnal,
    "batch": _even,
    "on_off": _on_off,
}


def create_load(name: str, most_per_s: float, length_s: float, seed: int) -> Trace:
    """Requests of groups that share their beginnings, as `most_per_s` and the shape `name` say; KeyError for an unknown
    one. Arrivals are a Poisson process, those of a batch come at once."""
    rng = random.Random(f"{name}-{seed}")
    times, at = [], 0.0
    while (at := at + rng.expovariate(most_per_s * length_s)) < 1.0:
        if rng.random() < RATES[name](at):
            times.append(at)
    if name == "batch":
        size = round(BATCH_SHARE * len(times))
        times = sorted([*times, *((i + 0.5) / NUM_BATCHES for i in range(NUM_BATCHES) for _ in range(size))])
    return Trace(name, _requests(rng, times))


def _requests(rng: random.Random, times: list[float]) -> list[SimRequest]:
    groups = [Text().then(rng, rng.randint(512, 3072)) for _ in range(32)]
    found = []
    for at in times:
        group = rng.randrange(len(groups))
        prompt = groups[group].then(rng, rng.randint(256, 4096))
        found.append(answered(rng, prompt, rng.randint(64, 256), at, session=f"group-{group}"))
    return found
