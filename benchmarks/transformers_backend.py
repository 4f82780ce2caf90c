"""Manta's own modules against those of transformers on the same engine: decode steps and a long prompt.

    python -m benchmarks.transformers_backend --shape llama-8b [--out results/transformers_backend.json]

Random weights. `ratio` is the speed through transformers' modules over that of Manta's own; the aim is 0.8.
"""

from __future__ import annotations

from typing import Any

from benchmarks import latency, prefill
from benchmarks.offline import arguments, make_llm, write

IMPLEMENTATIONS = ("native", "transformers")


def measure(shape: str, batches: list[int], prompt: int, steps: int, engine: dict[str, Any]) -> dict[str, float]:
    """Milliseconds by what was measured, of one engine."""
    with make_llm(shape, **engine) as llm:
        print(*llm.worker_info.notes, sep="\n", flush=True)
        found = {f"prefill {prompt}": prefill.measure(llm, shape, prompt, repeats=3)["best_ms"]}
        for batch in batches:
            found[f"decode {batch}"] = latency.measure(llm, shape, batch, steps=steps)["step_ms"]
    return found


def main() -> None:
    """Measure both, print a table, write JSON."""
    parser = arguments(__doc__, "llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape}
    for impl in IMPLEMENTATIONS:
        engine = {**args.engine, "model_impl": impl}
        figures[impl] = measure(args.shape, args.batches, args.prompt, args.steps, engine)
        write(args.out, figures)
    figures["ratio"] = {name: ms / figures["transformers"][name] for name, ms in figures["native"].items()}
    write(args.out, figures)
    print(f"{args.shape:>14} {'native ms':>12} {'transformers':>12} {'ratio':>8}")
    for name, ratio in figures["ratio"].items():
        print(f"{name:>14} {figures['native'][name]:12.3f} {figures['transformers'][name]:12.3f} {ratio:8.2f}")


if __name__ == "__main__":
    main()
