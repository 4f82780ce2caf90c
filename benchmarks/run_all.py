"""All offline benchmarks of all given shapes, each in a process of its own; one that fails does not stop the rest.

    python -m benchmarks.run_all [--shapes qwen3-0.6b llama-8b] [--repeats 2] [--out-dir results]

Writes SHAPE-NAME-RUN.json for each and ends with a list of what failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.shapes import SHAPES

NAMES = ("startup", "table", "latency", "prefill", "throughput")
USUAL = ("startup", "table")  # the table holds what the other three measure
LIMIT_S = 1200


def main() -> None:
    """Run them; exit 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["qwen3-0.6b", "llama-8b"])
    parser.add_argument("--names", nargs="+", choices=NAMES, default=USUAL)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine options, as JSON")
    parser.add_argument("--out-dir", type=Path, default=Path("results"))
    args = parser.parse_args()
    failed = []
    for run in range(args.repeats):
        for shape in args.shapes:
            for name in args.names:
                out = args.out_dir / f"{shape}-{name}-{run}.json"
                command = [sys.executable, "-m", f"benchmarks.{name}", "--shape", shape, "--out", str(out)]
                command += ["--engine", json.dumps(args.engine)]
                print("==", *command[1:], flush=True)
                try:
                    code = subprocess.run(command, check=False, timeout=LIMIT_S).returncode
                except subprocess.TimeoutExpired:
                    code = 124
                if code != 0:
                    failed.append(out.stem)
    print("failed:", ", ".join(failed) or "none")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
