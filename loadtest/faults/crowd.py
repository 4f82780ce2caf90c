"""64 long streams beside the other clients of a run, for what an operator does: none of them may notice."""

from __future__ import annotations

import asyncio
import random

from loadtest.faults.fault import Strike
from loadtest.faults.mix import COMPLETIONS, Ask
from loadtest.faults.reply import Reply, send
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
            await site.until(lambda: all(reply.times or reply.ended for reply in replies), _LIMIT_S)
            findings = await strike(site, rng)
            await asyncio.gather(*streams)
        verdicts = [goldens.judge(reply) for reply in replies]
        return findings + [f"of the crowd: {one.kind}: {one.why}"[:200] for one in verdicts if one.kind != "ok"]

    return crowd


def _asks() -> list[Ask]:
    body = {"max_tokens": _TOKENS, "ignore_eos": True, "stream": True, "temperature": 1.0}
    prompts = [f"Chapter {number}." for number in range(KINDS)]
    return [Ask(prompt, COMPLETIONS, {**body, "prompt": prompt, "seed": i}) for i, prompt in enumerate(prompts)]
