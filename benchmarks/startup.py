"""Seconds from a fresh process to the first token, by phase, with what the engine says about its choices.

    python -m benchmarks.startup --shape qwen3-0.6b [--checkpoint DIRECTORY] [--cold] [--out results/startup.json]

Without `--checkpoint` random weights are made on the device, and none are read. `--cold` gives Triton an empty cache,
so that every kernel is compiled; without it the user's own cache serves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.offline import arguments, write

# Run by a fresh interpreter; the clock began before it did.
_CHILD = """
import json, sys, time
began, shape, options = float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
from benchmarks.offline import make_llm, timed
from benchmarks.startup_phases import watched_phases
imported = time.time() - began
with watched_phases() as phases:
    llm = make_llm(shape, **options)
ready = time.time() - began
timed(llm, [[1] * 32], [1])
first = time.time() - began
seconds = {"imported_s": imported, "ready_s": ready, "first_token_s": first}
print("FIGURES" + json.dumps({**seconds, "phases": phases, "notes": llm.worker_info.notes}))
"""


def measure(shape: str, options: dict[str, Any], *, cold: bool) -> dict[str, Any]:
    """Figures of one start."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, **({"TRITON_CACHE_DIR": cache} if cold else {})}
        command = [sys.executable, "-c", _CHILD, str(time.time()), shape, json.dumps(options)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES")]
    if not lines:
        raise RuntimeError(f"the start failed: {done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(lines[0].removeprefix("FIGURES"))
    return figures


def main() -> None:
    """Measure, print, write JSON."""
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, help="read these weights of the shape (benchmarks.checkpoint)")
    parser.add_argument("--cold", action="store_true", help="with an empty Triton cache")
    args = parser.parse_args()
    read = {"model": str(args.checkpoint), "load_format": "auto"} if args.checkpoint else {}
    figures = measure(args.shape, {**read, **args.engine}, cold=args.cold)
    print(*figures["notes"], sep="\n")
    print(*(f"{name:>12} {seconds:6.2f} s" for name, seconds in figures["phases"].items()), sep="\n")
    names = ("imported_s", "ready_s", "first_token_s")
    print(f"{args.shape} start: " + ", ".join(f"{name} {figures[name]:.2f}" for name in names))
    write(args.out, {"shape": args.shape, "cold": args.cold, **figures})


if __name__ == "__main__":
    main()
