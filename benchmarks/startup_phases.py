"""How long each phase of a worker's start takes, in this process."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Phase -> what does it: module, class or none, name. None of them runs within another.
PHASES = {
    "place": ("app.worker.worker", "", "place"),
    "weights": ("app.loading.loader", "", "_filled"),
    "pack": ("app.loading.loader", "", "pack"),
    "compile": ("app.worker.warmup.warm_up", "WarmUp", "compile"),
    "size": ("app.worker.kv_sizing", "", "size_kv_cache"),
    "graphs": ("app.worker.graphs.graph_setup", "GraphSetup", "capture"),
    "warm-up": ("app.worker.warmup.warm_up", "WarmUp", "run"),
}


@contextmanager
def watched_phases() -> Iterator[dict[str, float]]:
    """Seconds of each phase of the engine that starts in the block, its worker in this process; what the rest took."""
    phases: dict[str, float] = {}
    begin = time.perf_counter()
    for module in {module for module, _, _ in PHASES.values()}:
        importlib.import_module(module)
    phases["imports"] = time.perf_counter() - begin
    originals = [(phase, _owner(*place), place[2]) for phase, place in PHASES.items()]
    kept = [(owner, name, getattr(owner, name)) for _, owner, name in originals]
    for phase, owner, name in originals:
        setattr(owner, name, _timed(getattr(owner, name), phase, phases))
    try:
        yield phases
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)
        phases["rest"] = time.perf_counter() - begin - sum(phases.values())


def _owner(module: str, kind: str, _: str) -> Any:
    loaded = importlib.import_module(module)
    return getattr(loaded, kind) if kind else loaded


def _timed(call: Callable[..., Any], phase: str, phases: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - begin

    return timed
