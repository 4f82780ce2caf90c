"""Adapters that do not all have a slot: what a load from host memory takes, and how much of the tokens are left where
100 adapters share 16 or 8 slots, on random weights.

    python -m benchmarks.lora_slots [--shape llama-8b] [--adapters 100] [--slots 16 8] [--out results/lora_slots.json]

Requests ask for adapters of rank 16 by Zipf's law (exponent 1), 32 in flight, the same ones of each engine: one with
a slot for each adapter, then those with fewer. All adapters are one's matrices under another name each, which are read
once: it is not the reading that is measured. Loads: eight streams of the base model decode beside requests that each
bring another adapter, and beside as many of one that has its slot.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from app import LLM, LoRARequest, SamplingParams
from app.worker.lora.adapters import Adapters
from app.worker.lora.slot_pool import HostAdapter, SlotPool
from app.worker.worker import Worker
from benchmarks.lora import write_adapter
from benchmarks.offline import arguments, make_llm, random_prompt, write
from benchmarks.shapes import SHAPES

RANK, IN_FLIGHT, NEIGHBOURS = 16, 32, 8
PROMPT, LENGTH, REQUESTS = 64, 48, 256
LOADS, BASE_LENGTH = 40, 160


def write_adapters(folder: Path, shape: str, count: int) -> list[LoRARequest]:
    """One adapter's matrices, each time with another factor."""
    first = write_adapter(folder / "0", SHAPES[shape], RANK)
    for number in range(1, count):
        directory = folder / str(number)
        directory.mkdir()
        (directory / "adapter_model.safetensors").symlink_to(first / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK + number}
        (directory / "adapter_config.json").write_text(json.dumps(config))
    return [LoRARequest(str(number), 1, str(folder / str(number))) for number in range(count)]


def zipf(count: int, requests: int) -> list[int]:
    """An adapter's number for each request."""
    return random.Random(7).choices(range(count), [1 / (rank + 1) for rank in range(count)], k=requests)


@contextmanager
def read_once() -> Iterator[None]:
    """The first adapter's matrices serve for all of an engine's."""
    original, kept = Adapters._read, {}

    def read(self: Adapters, *args: Any) -> HostAdapter:
        if id(self) not in kept:
            kept[id(self)] = original(self, *args)
        return kept[id(self)]

    Adapters._read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        Adapters._read = original  # type: ignore[method-assign]


class Watch:
    """The loads, and when steps came back, while it watched."""

    def __init__(self) -> None:
        self.loads: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.steps: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All engines of this process."""
        fill, execute = SlotPool.fill, Worker.execute

        def timed_fill(pool: SlotPool, slot: int, adapter: HostAdapter) -> None:
            if pool.device.type != "cuda":
                return fill(pool, slot, adapter)
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            fill(pool, slot, adapter)
            events[1].record()
            self.loads.append(events)

        def timed_execute(worker: Worker, *args: Any, **options: Any) -> Any:
            result = execute(worker, *args, **options)
            self.steps.append(time.perf_counter())
            return result

        SlotPool.fill, Worker.execute = timed_fill, timed_execute  # type: ignore[method-assign]
        try:
            yield
        finally:
            SlotPool.fill, Worker.execute = fill, execute  # type: ignore[method-assign]

    def load_ms(self) -> list[float]:
        """The device's time of each copy."""
        if self.loads:
            torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in self.loads]

    def gaps_ms(self) -> list[float]:
        """Between steps, the shortest first; the first and the last few are not of the full batch."""
        return sorted(1e3 * (b - a) for a, b in zip(self.steps[8:-8], self.steps[9:-8], strict=False))


def throughput(llm: LLM, shape: str, adapters: list[LoRARequest]) -> float:
    """Output tokens a second."""
    rng = random.Random(3)
    asked = [adapters[number] for number in zipf(len(adapters), REQUESTS)]
    prompts = [{"prompt_token_ids": random_prompt(rng, PROMPT, shape)} for _ in asked]
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=LENGTH, seed=1)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
    return REQUESTS * LENGTH / (time.perf_counter() - begin)


def beside(llm: LLM, shape: str, adapters: list[LoRARequest]) -> Watch:
    """Eight base streams, and one request after another for these adapters."""
    rng = random.Random(5)
    prompts = [{"prompt_token_ids": random_prompt(rng, PROMPT, shape)} for _ in range(NEIGHBOURS + len(adapters))]
    lengths = [BASE_LENGTH] * NEIGHBOURS + [3] * len(adapters)
    params = [SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=length, seed=1) for length in lengths]
    asked = [*[None] * NEIGHBOURS, *adapters]
    watch = Watch()
    with watch.watching():
        llm.generate(prompts, params, use_tqdm=False, lora_request=asked)
    return watch


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, "llama-8b")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 8])
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape}
    options = {"max_model_len": 1024, "enable_lora": True, "max_lora_rank": RANK, "max_cpu_loras": args.adapters}
    with tempfile.TemporaryDirectory() as folder, read_once():
        adapters = write_adapters(Path(folder), args.shape, args.adapters)
        for slots in (args.adapters, *args.slots):
            with make_llm(args.shape, **options, max_num_seqs=IN_FLIGHT, max_loras=slots, **args.engine) as llm:
                throughput(llm, args.shape, adapters)  # loads them, too
                found = figures[str(slots)] = max(throughput(llm, args.shape, adapters) for _ in range(2))
            share = found / figures[str(args.adapters)]
            print(f"{slots} slots: {found:,.0f} tokens/s, {share:.2f} of all resident", flush=True)
        with make_llm(args.shape, **options, max_num_seqs=NEIGHBOURS + 1, max_loras=1, **args.engine) as llm:
            beside(llm, args.shape, adapters[:LOADS])
            still = beside(llm, args.shape, adapters[:1] * LOADS)
            loading = beside(llm, args.shape, adapters[:LOADS])
    copies, gaps, base = loading.load_ms(), loading.gaps_ms(), still.gaps_ms()
    figures["loads_ms"], figures["gaps_ms"], figures["gaps_without_ms"] = copies, gaps, base
    if copies:
        print(f"{len(copies)} loads of rank {RANK}: {median(copies):.2f} ms each, the longest {max(copies):.2f}")
    for name, of in (("between steps with loads", gaps), ("without", base)):
        print(f"{name}: median {median(of):.2f} ms, mean {sum(of) / len(of):.2f}, p95 {of[int(0.95 * len(of))]:.2f}")
    print(f"mean ITL of neighbours: {sum(gaps) / len(gaps) / (sum(base) / len(base)):.3f} x", flush=True)
    write(args.out, figures)


if __name__ == "__main__":
    main()
