"""Prints which kernels ordinary requests compile or load once the engine is ready: run by test_warm_up_gpu.py in a
process of its own, where nothing is loaded yet."""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from triton import knobs

from app import LLM, LoRARequest, SamplingParams
from benchmarks.lora import write_adapter
from benchmarks.offline import make_llm, random_prompt
from benchmarks.shapes import SHAPES

SHAPE = sys.argv[1] if sys.argv[1:] else "llama-100m"
RANKS = [int(rank) for rank in sys.argv[2:]]  # of adapters, which every other request has one of
FOLDER = Path(tempfile.mkdtemp())
loaded: list[str] = []


def note(*, fn: Any, **_: Any) -> None:
    """Triton calls it with every kernel that it has compiled or read from its cache."""
    loaded.append(fn.name)


def ask(llm: LLM, lengths: list[int], choices: list[dict[str, Any]]) -> None:
    """Request i has a prompt of lengths[i] tokens and every so many times choices[j]."""
    rng = random.Random(len(lengths))
    prompts = [random_prompt(rng, length, SHAPE) for length in lengths]
    params = [
        SamplingParams(
            **{"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": i, **choices[i % len(choices)]}
        )
        for i in range(len(lengths))
    ]
    llm.generate(prompts, params, use_tqdm=False, lora_request=adapters(len(lengths)) if RANKS else None)


def adapters(count: int) -> list[LoRARequest | None]:
    """Of so many requests; the first one has one."""
    own = [LoRARequest(str(rank), 1, str(FOLDER / str(rank))) for rank in RANKS]
    return [own[i // 2 % len(own)] if i % 2 == 0 else None for i in range(count)]


def main() -> None:
    """One line for each kernel after the start, and one that says how many there were before."""
    knobs.runtime.jit_post_compile_hook = note
    filters: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0.0}]
    apart: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"logprobs": 3},
        {"presence_penalty": 0.5, "top_p": 0.8},
    ]
    for rank in RANKS:
        write_adapter(FOLDER / str(rank), SHAPES[SHAPE], rank)
    options = {"enable_lora": True, "max_loras": 3, "max_lora_rank": max(RANKS)} if RANKS else {}
    with make_llm(SHAPE, gpu_memory_utilization=0.3, **options) as llm:
        print(f"BEFORE {len(loaded)}")
        loaded.clear()
        for length in (3, 17, 100, 200, 300, 400, 512, 8000):
            ask(llm, [length], [{}])
        for choices in (filters, apart, filters + apart):
            for count in (1, 2, 3, 64):
                ask(llm, [20 + 13 * i for i in range(count)], choices)
        ask(llm, [15, 40, 700], [{"prompt_logprobs": 3}])
        shared = [[5] * 3000 + [7 + i] * 20 for i in range(200)]
        for count in (2, 9, 33, 200):
            llm.generate(shared[:count], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        for count in (40, 130, 250):  # the later prompts beside decodes of the earlier ones
            ask(llm, [90 + i % 70 for i in range(count)], [{"max_tokens": 3 + i % 9} for i in range(9)])
    for name in loaded:
        print(f"AFTER {name}")


if __name__ == "__main__":
    main()
