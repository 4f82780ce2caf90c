"""Prints which kernels ordinary requests compile or load once the engine is ready: run by test_warm_up_gpu.py in a
process of its own, where nothing is loaded yet."""

from __future__ import annotations

import random
import sys
from typing import Any

from triton import knobs

from app import LLM, SamplingParams
from benchmarks.offline import make_llm, random_prompt

SHAPE = sys.argv[1] if sys.argv[1:] else "llama-100m"
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
    llm.generate(prompts, params, use_tqdm=False)


def main() -> None:
    """One line for each kernel after the start, and one that says how many there were before."""
    knobs.runtime.jit_post_compile_hook = note
    filters: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0.0}]
    apart: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"logprobs": 3},
        {"presence_penalty": 0.5, "top_p": 0.8},
    ]
    with make_llm(SHAPE, gpu_memory_utilization=0.3) as llm:
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
