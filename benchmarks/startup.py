"""Seconds from a fresh process to the first token, with what the engine says about its choices.

    python -m benchmarks.startup --shape qwen3-0.6b [--cold] [--out results/startup.json]

Random weights are made on the device, so no checkpoint is read. `--cold` gives Triton an empty cache, so that every
kernel is compiled; without it the user's own cache serves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.offline import arguments, write

# Run by a fresh interpreter; the clock began before it did.
_CHILD = """
import json, sys, time
began, shape, options = float(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
from benchmarks.offline import make_llm, timed
imported = time.time() - began
llm = make_llm(shape, **options)
ready = time.time() - began
timed(llm, [[1] * 32], [1])
first = time.time() - began
seconds = {"imported_s": imported, "ready_s": ready, "first_token_s": first}
print("FIGURES" + json.dumps({**seconds, "notes": llm.worker_info.notes}))
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
    parser.add_argument("--cold", action="store_true", help="with an empty Triton cache")
    args = parser.parse_args()
    figures = measure(args.shape, args.engine, cold=args.cold)
    print(*figures["notes"], sep="\n")
    names = ("imported_s", "ready_s", "first_token_s")
    print(f"{args.shape} start: " + ", ".join(f"{name} {figures[name]:.2f}" for name in names))
    write(args.out, {"shape": args.shape, "cold": args.cold, **figures})


if __name__ == "__main__":
    main()
