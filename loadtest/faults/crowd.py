"""64 long streams beside the other clients of a run, for what an operator does: none of them may notice.

python -m loadtest.faults.crowd                     # scale down under them: the seconds until the replica is gone
python -m loadtest.faults.crowd --move-after 3600   # as if streams did not move
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

from loadtest.faults.fault import Strike
from loadtest.faults.mix import COMPLETIONS, Ask
from loadtest.faults.reply import Reply, send
from loadtest.faults.shapes import Shape
from loadtest.faults.site import Site
from loadtest.faults.traffic import Goldens, client

SIZE, KINDS = 64, 8
_TOKENS = 1200
_LIMIT_S = 900.0


def crowded(strike: Strike) -> Strike:
    """The same strike once all streams run; a finding for each that does not end as undisturbed."""

    async def crowd(site: Site, rng: random.Random) -> list[str]:
        goldens = await Goldens.record(site.base_url, _asks(), _LIMIT_S)
        replies = [Reply(ask) for ask in _asks() * (SIZE // KINDS)]
        async with client(site.base_url) as http:
            streams = [asyncio.create_task(send(http, reply, _LIMIT_S)) for reply in replies]
            while not all(reply.times or reply.ended for reply in replies):
                await asyncio.sleep(0.05)
            findings = await strike(site, rng)
            await asyncio.gather(*streams)
        verdicts = [goldens.judge(reply) for reply in replies]
        return findings + [f"of the crowd: {one.kind}: {one.why}"[:200] for one in verdicts if one.kind != "ok"]

    return crowd


def _asks() -> list[Ask]:
    body = {"max_tokens": _TOKENS, "ignore_eos": True, "stream": True, "temperature": 1.0}
    prompts = [f"Chapter {number}." for number in range(KINDS)]
    return [Ask(prompt, COMPLETIONS, {**body, "prompt": prompt, "seed": i}) for i, prompt in enumerate(prompts)]


def main() -> int:
    """Print one line of JSON; 1 when a stream noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--move-after", type=float, default=5.0, help="ingress.move_after_s")
    options = parser.parse_args()

    def edit(args: dict[str, Any]) -> None:
        args["ingress"]["move_after_s"] = options.move_after
        args["models"][0]["graceful_shutdown_timeout_s"] = 600.0

    async def scale_down(site: Site, rng: random.Random) -> list[str]:
        began = time.monotonic()
        found = await deploys.scale_down(site, rng)
        site.notes["drain_s"] = round(time.monotonic() - began, 1)
        return found

    from loadtest.faults import deploys  # which is made of crowds

    with Site(Shape("pair", edit)) as site:
        site.look()
        findings = asyncio.run(crowded(scale_down)(site, random.Random(0)))
        print(json.dumps({"move_after_s": options.move_after, **site.notes, "findings": findings}))
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
