"""All offline figures of a shape from one engine: its column of the table in RESULTS.md.

    python -m benchmarks.table --shape qwen3-0.6b [--out results/table.json]

What `benchmarks.latency`, `benchmarks.prefill` and `benchmarks.throughput` measure, without starting an engine for
each.
"""

from __future__ import annotations

from typing import Any

from benchmarks import latency, prefill, throughput
from benchmarks.offline import arguments, make_llm, write


def main() -> None:
    """Measure, print each row as it comes, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--requests", type=int, default=256, help="of the mixed workload")
    parser.add_argument("--uniform", type=int, default=1000, help="requests of 1,024 in and 128 out")
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape, "latency": {}, "prefill": {}}

    def keep(name: str, row: dict[str, float]) -> dict[str, float]:
        print(f"{args.shape} {name}: " + ", ".join(f"{k} {v:,.4g}" for k, v in row.items()), flush=True)
        return row

    with make_llm(args.shape, **args.engine) as llm:
        print(*llm.worker_info.notes, sep="\n", flush=True)
        for length in args.lengths:
            row = prefill.measure(llm, args.shape, length, repeats=4)
            figures["prefill"][str(length)] = keep(f"prefill {length}", row)
        for batch in args.batches:
            figures["latency"][str(batch)] = keep(f"decode batch {batch}", latency.measure(llm, args.shape, batch))
            write(args.out, figures)
        figures["mixed"] = keep("mixed", throughput.mixed(llm, args.shape, args.requests))
        write(args.out, figures)
        figures["uniform"] = keep("uniform", throughput.uniform(llm, args.shape, args.uniform))
    write(args.out, figures)


if __name__ == "__main__":
    main()
