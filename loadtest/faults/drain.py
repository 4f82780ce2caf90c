"""How long an engine replica takes to leave under 64 streams.

python -m loadtest.faults.drain                     # the seconds from `serve deploy` until its process is gone
python -m loadtest.faults.drain --move-after 3600   # as if streams did not move
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

from loadtest.faults.crowd import crowded
from loadtest.faults.deploys import scale_down
from loadtest.faults.shapes import Shape
from loadtest.faults.site import Site


def main() -> int:
    """Print one line of JSON; 1 when a stream noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--move-after", type=float, default=5.0, help="ingress.move_after_s")
    options = parser.parse_args()

    def edit(args: dict[str, Any]) -> None:
        args["ingress"]["move_after_s"] = options.move_after
        args["models"][0]["graceful_shutdown_timeout_s"] = 900.0  # or it would bound the time

    with Site(Shape("pair", edit)) as site:
        findings = asyncio.run(crowded(_timed)(site, random.Random(0)))
        print(json.dumps({"move_after_s": options.move_after, **site.notes, "findings": findings}))
    return int(bool(findings))


async def _timed(site: Site, rng: random.Random) -> list[str]:
    began = time.monotonic()
    findings = await scale_down(site, rng)
    site.notes["drain_s"] = round(time.monotonic() - began, 1)
    return findings


if __name__ == "__main__":
    sys.exit(main())
