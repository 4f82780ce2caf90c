"""What the offline benchmarks share: an engine with random weights, prompts, timed runs, a watch on its steps."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app import LLM, SamplingParams
from app.engine.scheduler.scheduler import Scheduler
from app.offline.generation import Choice
from app.offline.prompts import Encoded
from app.worker.graphs.static_inputs import StaticInputs
from app.worker.worker import Worker
from benchmarks.even_routing import route_evenly
from benchmarks.serve_process import ROOT
from benchmarks.shapes import SHAPES, write_shape

BASELINE = {"max_model_len": 12288, "enable_prefix_caching": False, "max_num_seqs": 256, "max_num_batched_tokens": 8192}


def arguments(description: str | None, shape: str = "qwen3-0.6b") -> argparse.ArgumentParser:
    """Options that every offline benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default=shape)
    parser.add_argument("--even-routing", action=_RouteEvenly, nargs=0, help="send tokens to experts drawn evenly")
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser


class _RouteEvenly(argparse.Action):
    def __call__(self, *_: Any) -> None:
        route_evenly()


def make_llm(shape: str, **options: Any) -> LLM:
    """An engine as the vLLM baseline was run."""
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_shape(shape, Path(folder)))
        common = {"tokenizer": str(ROOT / "app/assets/tiny-chat"), "load_format": "dummy", **BASELINE}
        return LLM(**{"model": directory, **common, **options})


def idle(llm: LLM) -> None:
    """Give the engine the idle time in which a server captures what its start left out."""
    while llm._core.use_idle_time():
        pass


def random_prompt(rng: random.Random, length: int, shape: str) -> list[int]:
    """Token ids that the shape's vocabulary holds."""
    most = min(10_000, SHAPES[shape]["vocab_size"] - 1)
    return [rng.randint(0, most) for _ in range(length)]


def choices_of(llm: LLM, index: int, prompt: list[int], params: SamplingParams) -> list[Choice]:
    """The choices of a prompt, whose requests whoever drives the engine's core itself gives to that."""
    return llm._generation.job(index, Encoded(None, prompt), params)


def timed(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds until prompt i has `lengths[i]` tokens, sampled at temperature 1."""
    params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=n, seed=i) for i, n in enumerate(lengths)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - begin
    assert [len(out.outputs[0].token_ids) for out in outputs] == lengths
    return elapsed


class StepWatch:
    """What each step cost while it watched: host calls and, on a GPU, the device's own time, in seconds."""

    def __init__(self) -> None:
        self.host: dict[str, list[float]] = {"schedule": [], "update": [], "inputs": [], "execute": []}
        self.device: list[float] = []

    def p50_us(self, name: str) -> float:
        """Median of a host call."""
        return 1e6 * median(self.host[name]) if self.host[name] else 0.0

    def gpu_busy(self, wall_s: float) -> float:
        """Share of the time in which the device was inside a step."""
        return sum(self.device) / wall_s

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **options)
            self.host[name].append(time.perf_counter() - begin)
            if name == "execute":
                self.device += [output.step_time_s for output in result if len(output.sampled_token_ids)]
            return result

        return wrapped


@contextmanager
def watched_steps() -> Iterator[StepWatch]:
    """Watch every engine of this process that runs its worker in it."""
    watch = StepWatch()
    places: list[tuple[str, type, str]] = [
        ("schedule", Scheduler, "schedule"),
        ("update", Scheduler, "update_from_output"),
        ("inputs", StaticInputs, "load"),
        ("execute", Worker, "execute"),
    ]
    originals = [getattr(owner, method) for _, owner, method in places]
    for (name, owner, method), original in zip(places, originals, strict=True):
        setattr(owner, method, watch._timed(name, original))
    try:
        yield watch
    finally:
        for (_, owner, method), original in zip(places, originals, strict=True):
            setattr(owner, method, original)


def machine() -> dict[str, str]:
    """Where the figures come from."""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__}


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write JSON, if a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**machine(), **figures}, indent=2) + "\n")
