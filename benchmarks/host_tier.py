"""TTFT of a prompt whose blocks come back from host memory, beside computing it and beside finding it on the device.

    python -m benchmarks.host_tier --shape llama-8b [--length 16384] [--out results/host_tier.json]
    python -m benchmarks.host_tier --shape tiny --length 256      # where there is no GPU

The device holds one prompt and a half, so that each of two prompts evicts the other: a hit stores what it displaces
while it loads (`hit`), unless the host has those blocks already (`hit, clean`). Beside them: a short request's time per
token while a prompt is loaded, for what the others notice. The last line says whether the hit is at most --aim x
recomputing.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

from app import LLM, SamplingParams
from app.engine.kv_connector.host_memory import HostMemory
from app.records.request import EngineRequest
from benchmarks.offline import arguments, make_llm, random_prompt, write

BLOCK_SIZE = 16


def ttft(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and the tokens found cached."""
    begin = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - begin, output.num_cached_tokens or 0


def with_tail(prompt: list[int], tail: int) -> list[int]:
    """The same blocks, another last token."""
    return [*prompt[:-1], 1 + tail]


def measure(llm: LLM, shape: str, length: int, repeats: int) -> dict[str, Any]:
    """Seconds to the first token, the median of the repeats."""
    rng = random.Random(0)
    found: dict[str, list[float]] = {"recompute": [], "hit": [], "hit_clean": [], "device": []}
    cached: dict[str, int] = {}

    def take(name: str, prompt: list[int]) -> None:
        seconds, cached[name] = ttft(llm, prompt)
        found[name].append(seconds)

    ttft(llm, random_prompt(rng, length, shape))
    for _ in range(repeats):
        first, second = (random_prompt(rng, length, shape) for _ in range(2))
        take("recompute", first)
        take("device", with_tail(first, 1))
        ttft(llm, second)  # displaces the first, which goes to the host
        take("hit", with_tail(first, 2))  # displaces the second
        ttft(llm, with_tail(second, 1))  # displaces the first, which the host still has
        take("hit_clean", with_tail(first, 3))
    row: dict[str, Any] = {f"{name}_ms": 1e3 * median(values) for name, values in found.items()}
    row["cached_tokens"] = cached
    row["ratio"] = row["hit_ms"] / row["recompute_ms"]
    row["ratio_clean"] = row["hit_clean_ms"] / row["recompute_ms"]
    return row


def beside_decodes(llm: LLM, shape: str, length: int) -> dict[str, float]:
    """Time per token of a decoding request: alone, and its longest gap while a long prompt is loaded beside it."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, length, shape) for _ in range(2)]
    for prompt in prompts:
        ttft(llm, prompt)
    core = llm._core
    decodes = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, seed=0)
    core.add_request(EngineRequest("decodes", random_prompt(rng, 32, shape), decodes))
    gaps: list[tuple[float, bool]] = []
    last, loaded, num_steps = time.perf_counter(), False, 0
    while core.has_work():
        if num_steps == 60:
            one = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
            core.add_request(EngineRequest("loads", with_tail(prompts[0], 7), one))
        for output in core.step():
            loaded = loaded or output.request_id == "loads"
            if output.request_id == "decodes":
                now = time.perf_counter()
                gaps.append((now - last, num_steps >= 60 and not loaded))
                last = now
        num_steps += 1
    alone = [gap for gap, beside in gaps[10:] if not beside]
    beside = [gap for gap, beside in gaps[10:] if beside]
    return {"alone_ms": 1e3 * median(alone), "beside_load_ms": 1e3 * max(beside, default=0.0), "steps": len(beside)}


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__, shape="llama-8b")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--host-gib", type=float, default=16.0, help="least host memory; several prompts must fit")
    parser.add_argument("--aim", type=float, default=0.4)
    args = parser.parse_args()
    blocks = -(-args.length // BLOCK_SIZE)
    options = {
        "max_model_len": args.length + 256,
        "num_blocks": blocks + blocks // 2,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
        "max_num_seqs": 16,
        "kv_host_memory_bytes": int(args.host_gib * (1 << 30)),
        **args.engine,
    }
    begin = time.perf_counter()
    with make_llm(args.shape, **options) as llm:
        print(f"started in {time.perf_counter() - begin:.1f} s:", *llm.worker_info.notes, sep="\n  ", flush=True)
        row = measure(llm, args.shape, args.length, args.repeats)
        tier = llm._core.scheduler.kv.connector
        assert isinstance(tier, HostMemory)
        gigabytes = args.length / BLOCK_SIZE * tier.block_bytes / 1e9
        row["load_gb_per_s"] = gigabytes / ((row["hit_clean_ms"] - row["device_ms"]) / 1e3)
        row["beside"] = beside_decodes(llm, args.shape, args.length)
        write(args.out, {"shape": args.shape, "length": args.length, **row})
    for name, value in row.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    assert row["cached_tokens"]["hit"] >= args.length - BLOCK_SIZE, "the prompt was not found"
    print("PASS" if row["ratio"] <= args.aim else "FAIL", f"hit / recompute = {row['ratio']:.3f}, aim {args.aim}")


if __name__ == "__main__":
    main()
