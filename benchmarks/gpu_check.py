"""One command that says within minutes whether the decode graphs work on a GPU, and what they bring.

    python -m benchmarks.gpu_check [--shape qwen3-0.6b] [--sections tokens latency ...] [--out-dir results]

Every section is a process of its own with a time limit: a fault of one, even one that spoils the CUDA context, leaves
the others alone. `tokens` compares the tokens of steps from graphs with those of ordinary steps, in fp32 over random
weights; `splits` times decode attention as it is launched and as
it is captured; the others are the benchmarks of these names. A line PASS or FAIL for each; JSON after each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from app import LLM, SamplingParams
from benchmarks.offline import make_llm, write
from benchmarks.shapes import SHAPES

LENGTHS = [3 + 13 * i for i in range(24)]  # the prompts': across block edges; not every batch is a captured size
SMALL: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 32, "gpu_memory_utilization": 0.2}


def _prompts() -> list[list[int]]:
    return [[(7 * i + 11 * j) % 500 for j in range(length)] for i, length in enumerate(LENGTHS)]


def _params(kind: str) -> list[SamplingParams]:
    """The tokens of each request; lengths differ so that the batch shrinks one by one."""
    made = []
    for i in range(len(LENGTHS)):
        options: dict[str, Any] = {"temperature": 0.0, "seed": i, "max_tokens": 8 + 2 * i, "ignore_eos": True}
        if kind != "greedy" and i % 3:
            options["temperature"] = 0.5 + 0.1 * (i % 7)
        if kind in ("filtered", "all"):
            options |= [{}, {"top_p": 0.8}, {"top_k": 1 + i}, {"min_p": 0.05}][i % 4]
        if kind == "all":
            options |= [{}, {}, {"presence_penalty": 1.0}, {"logprobs": 2}, {"logit_bias": {5: 2.0}}][i % 5]
        made.append(SamplingParams(**options))
    return made


def _tokens(llm: LLM, kind: str) -> list[list[int]]:
    outputs = llm.generate(_prompts(), _params(kind), use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outputs]


def _compare(found: list[list[int]], expected: list[list[int]]) -> str:
    """Describe the first difference; empty when there is none."""
    for request, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            return f"request {request} differs from token {at}: {ours[at : at + 4]} instead of {theirs[at : at + 4]}"
    return ""


def check_tokens(options: dict[str, Any]) -> bool:
    """Graphs against ordinary steps; prints a line for each case."""
    kinds = ("greedy", "sampled", "filtered", "all")
    with make_llm("tiny", **{**SMALL, "cuda_graphs": "off", **options}) as llm:
        expected = {kind: _tokens(llm, kind) for kind in kinds}
    passed = True
    for inflight, sizes in ((2, None), (3, (4, 20))):
        more = {"max_inflight_steps": inflight, "cuda_graph_sizes": sizes}
        with make_llm("tiny", **{**SMALL, **more, **options}) as llm:
            print("  ", llm.worker_info.notes[-1], flush=True)
            passed &= options.get("device") == "cpu" or "batch sizes" in llm.worker_info.notes[-1]
            for kind in kinds:
                passed &= _case(f"{kind}, {inflight} in flight, sizes {sizes}", llm, kind, expected[kind])
    return passed


def _case(name: str, llm: LLM, kind: str, expected: list[list[int]]) -> bool:
    try:
        difference = _compare(_tokens(llm, kind), expected)
    except Exception:
        difference = traceback.format_exc()
    print(f"   {'FAIL' if difference else 'pass'} {name} {difference}", flush=True)
    return not difference


def sections(args: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """Name -> (arguments of the interpreter, time limit in seconds)."""
    engine = json.dumps(args.engine)
    common = ["--shape", args.shape, "--engine"]
    batches = ["--batches", *map(str, args.batches)]
    eager = json.dumps({**args.engine, "cuda_graphs": "off"})
    few = ["--batches", str(args.batches[0]), str(args.batches[-1])]
    requests = ["--requests", str(args.requests), "--longest", str(args.longest), "--uniform", "0"]
    size = ["--context", str(args.context), "--steps", str(args.steps)]

    def out(name: str) -> list[str]:
        return ["--out", str(args.out_dir / f"{args.shape}-{name}.json")]

    return {
        "tokens": (["-m", "benchmarks.gpu_check", "--only-tokens", "--engine", engine], 120),
        "splits": (["-m", "benchmarks.split_list", *out("splits")], 60),
        "latency": (["-m", "benchmarks.latency", *common, engine, *batches, *size, *out("latency")], 90),
        "throughput": (
            ["-m", "benchmarks.throughput", *common, engine, *requests, *out("throughput")],
            90,
        ),
        "prefill": (["-m", "benchmarks.prefill", *common, engine, *out("prefill")], 60),
        "eager": (["-m", "benchmarks.latency", *common, eager, *few, *size, *out("eager")], 60),
        "startup": (["-m", "benchmarks.startup", "--cold", *common, engine, *out("startup")], 90),
        "pytest": (["-m", "pytest", "-m", "gpu", "-q", "tests/worker/test_engine_on_gpu.py", "-x", "--no-header"], 240),
    }


def main() -> None:
    """Run the sections, print a summary; exit 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--sections", nargs="+", default=["tokens", "latency", "throughput", "splits", "eager"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--out-dir", type=Path, default=Path("results"))
    parser.add_argument("--only-tokens", action="store_true", help="the comparison of tokens, in this process")
    args = parser.parse_args()
    if args.only_tokens:
        sys.exit(0 if check_tokens(args.engine) else 1)
    table = sections(args)
    summary: dict[str, Any] = {}
    for name in args.sections:
        summary[name] = _run_section(name, *table[name])
        write(args.out_dir / f"{args.shape}-gpu-check.json", summary)
    sys.exit(0 if all(section["passed"] for section in summary.values()) else 1)


def _run_section(name: str, arguments: list[str], limit_s: int) -> dict[str, Any]:
    begin = time.perf_counter()
    print(f"== {name}: {' '.join(arguments)}", flush=True)
    try:
        code: int | str = subprocess.run([sys.executable, *arguments], check=False, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        code = f"not done within {limit_s} s"
    seconds = time.perf_counter() - begin
    print(f"== {name}: {'PASS' if code == 0 else f'FAIL ({code})'} after {seconds:.0f} s", flush=True)
    return {"passed": code == 0, "exit": code, "seconds": seconds}


if __name__ == "__main__":
    main()
