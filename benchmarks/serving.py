"""A model of random weights through the whole Ray Serve graph, measured over HTTP by `manta bench`.

    python -m benchmarks.serving --shape llama-8b [--concurrency 1 16 64 256] [--out results/serving.json]

As vLLM's figures in RESULTS.md were taken: prompts of 1,024 random tokens, 128 output tokens, C requests in flight,
6 x C in all (12 at C = 1), no prefix cache, the client on the same host. `--engine '{"device":"cpu"}'
--shape llama-100m --input-len 32 --output-len 8` tries it where there is no GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.offline import BASELINE, arguments, write
from benchmarks.serve_process import ROOT, ServeProcess
from benchmarks.shapes import write_shape

CONFIG = ROOT / "configs/serve/quickstart.yaml"
TOKENIZER = str(ROOT / "app/assets/tiny-chat")
BENCH_LIMIT_S = 300
HEAD = "| C | req/s | output tok/s | TTFT ms mean / median / p99 | TPOT ms mean / median | ITL ms median / p99 |"


def bench(url: str, concurrency: int, lengths: tuple[int, int]) -> dict[str, Any]:
    """Figures of one concurrency."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "app.cli", "bench", "--url", url, "--tokenizer", TOKENIZER, "-o", str(out)]
        command += ["--num-prompts", str(max(12, 6 * concurrency)), "--max-concurrency", str(concurrency)]
        # Most of a random model's tokens have no text in this tokenizer: ask for a chunk for each nevertheless.
        command += ["--extra-body", '{"return_token_ids": true}']
        command += ["--input-len", str(lengths[0]), "--output-len", str(lengths[1])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BENCH_LIMIT_S)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def edit(shape: str, directory: str, engine: dict[str, Any]) -> Any:
    """Serve this shape instead of the built-in model."""
    options = {"model": directory, "tokenizer": TOKENIZER, "load_format": "dummy", **BASELINE, **engine}

    def change(config: dict[str, Any]) -> None:
        config["applications"][0]["args"]["models"] = [{"name": shape, "engine": options}]

    return change


def main() -> None:
    """Serve, measure each concurrency, print one table, write JSON."""
    parser = arguments(__doc__, "llama-8b")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=128)
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape}
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_shape(args.shape, Path(folder)))
        with ServeProcess(CONFIG, edit(args.shape, directory, args.engine), ready_timeout_s=240) as server:
            figures["start_s"] = server.start_time_s
            print(f"{args.shape}: ready after {server.start_time_s:.1f} s", flush=True)
            print(HEAD)
            print("|---|---|---|---|---|---|")
            for concurrency in args.concurrency:
                figures[str(concurrency)] = row = bench(server.base_url, concurrency, (args.input_len, args.output_len))
                print(table_line(concurrency, row), flush=True)
                write(args.out, figures)


def table_line(concurrency: int, row: dict[str, Any]) -> str:
    """One line of the table."""
    if row["failed"]:
        return f"| {concurrency} | {row['failed']} of {row['failed'] + row['completed']} requests failed |"
    ttft = " / ".join(f"{row[f'{name}_ttft_ms']:.1f}" for name in ("mean", "median", "p99"))
    tpot = " / ".join(f"{row[f'{name}_tpot_ms']:.2f}" for name in ("mean", "median"))
    itl = " / ".join(f"{row[f'{name}_itl_ms']:.2f}" for name in ("median", "p99"))
    rates = f"{row['request_throughput']:.2f} | {row['output_throughput']:,.0f}"
    return f"| {concurrency} | {rates} | {ttft} | {tpot} | {itl} |"


if __name__ == "__main__":
    main()
