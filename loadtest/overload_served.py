"""Clients of several tenants against a real deployment of two replicas, for `loadtest.overload --served`.

All is real but the devices (modelled_app.py): HTTP, HAProxy, one ingress, the Router, the channels, two engines with
their schedulers. The deployment's capacity is measured first, by clients that ask again as soon as they have an answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.serve_process import ROOT, ServeProcess
from loadtest.simulation.fairness import Outcome

CONFIG = ROOT / "configs/serve/two-replicas.yaml"
MAX_NUM_SEQS, NUM_REPLICAS = 8, 2
NUM_OTHERS = 4
PROMPTS, HOSTILE_PROMPTS = (100, 400), (400, 800)  # tokens, from and to
MAX_TOKENS = 128  # that every request asks for; answers end before
OUTPUTS = (8, MAX_TOKENS - 8)
MAX_RETRIES = 2
FIRST_PART = 1 / 6  # of a run, in which queues fill
TENANTS = (*(f"tenant-{i}" for i in range(NUM_OTHERS)), "hostile")


@dataclass(slots=True)
class Sent:
    """One request of a client; times in seconds from the run's begin."""

    tenant: str
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    admitted_s: float | None = None  # when the attempt began that was not refused
    ended_s: float | None = None
    is_late: bool = False

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(slots=True)
class Clients:
    """Send requests with prompts that nobody has sent before, again when they are told to, as SDKs do."""

    url: str
    session: aiohttp.ClientSession
    deadline_s: float
    random: random.Random
    began: float = field(default_factory=time.monotonic)
    answers: Counter[str] = field(default_factory=Counter)  # by status, of every attempt
    num_without_hint: int = 0  # refusals that do not say when to come again

    @property
    def now(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self.began

    def draw(self, tenant: str) -> Sent:
        """A request of the tenant's kind, to be sent now."""
        prompts = HOSTILE_PROMPTS if tenant == "hostile" else PROMPTS
        return Sent(tenant, self.now, self.random.randint(*prompts), self.random.randint(*OUTPUTS))

    async def send(self, sent: Sent) -> None:
        """Send it until it is let in, three times at most."""
        prompt = [self.random.randrange(300, 1000) for _ in range(sent.num_prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "seed": sent.num_output_tokens}
        for attempt in range(1 + MAX_RETRIES):
            if (after_s := await self._attempt(sent, body, attempt)) is None:
                return
            await asyncio.sleep(after_s)

    async def _attempt(self, sent: Sent, body: Mapping[str, Any], attempt: int) -> float | None:
        """None when it was answered; else the seconds after which it may come again."""
        began_s = self.now
        headers = {
            "Authorization": f"Bearer {key_of(sent.tenant)}",
            "x-request-timeout-ms": f"{1e3 * self.deadline_s:.0f}",
            "x-stainless-retry-count": str(attempt),
        }
        try:
            async with self.session.post(self.url, json=body, headers=headers) as response:
                await response.read()
        except aiohttp.ClientError as error:
            self.answers[type(error).__name__] += 1
            sent.admitted_s = began_s  # and it never ended
            return None
        self.answers[str(response.status)] += 1
        if response.status in (429, 503):
            self.num_without_hint += "retry-after" not in response.headers
            return float(response.headers.get("retry-after-ms", 1e3)) / 1e3
        sent.admitted_s, sent.ended_s, sent.is_late = began_s, self.now, response.status != 200
        return None

    async def saturate(self, length_s: float, number: int) -> list[Sent]:
        """So many clients that ask again at once."""
        done: list[Sent] = []

        async def ask_again(tenant: str) -> None:
            while self.now < length_s:
                done.append(self.draw(tenant))
                await self.send(done[-1])

        await asyncio.gather(*(ask_again(TENANTS[i % len(TENANTS)]) for i in range(number)))
        return done

    async def flood(self, tokens_per_s: Mapping[str, float], length_s: float) -> list[Sent]:
        """Each tenant's requests at random (Poisson), whatever becomes of them."""
        own = await asyncio.gather(*(self._flood(name, rate, length_s) for name, rate in tokens_per_s.items()))
        return [one for requests in own for one in requests]

    async def _flood(self, tenant: str, tokens_per_s: float, length_s: float) -> list[Sent]:
        prompts = HOSTILE_PROMPTS if tenant == "hostile" else PROMPTS
        rate = tokens_per_s / (sum(prompts) / 2 + sum(OUTPUTS) / 2)
        sent, tasks, next_s = list[Sent](), [], 0.0
        while (next_s := next_s + self.random.expovariate(rate)) < length_s:
            await asyncio.sleep(next_s - self.now)
            sent.append(self.draw(tenant))
            tasks.append(asyncio.create_task(self.send(sent[-1])))
        await asyncio.gather(*tasks)
        return sent


def key_of(tenant: str) -> str:
    """The tenant's API key."""
    return f"a-key-of-{tenant}"


async def run_served(
    cases: Sequence[tuple[float, float]], length_s: float, deadline_s: float, seed: int
) -> list[dict[str, Any]]:
    """A row for each (load, share of it that is hostile), in that order."""
    keys = " ".join(f"{tenant}={key_of(tenant)}" for tenant in TENANTS)
    with ServeProcess(CONFIG, edit=edit, ready_timeout_s=400, environ={"MANTA_API_KEYS": keys}) as server:
        capacity = await _capacity(server.base_url, deadline_s, length_s, seed)
        return [await _row(server.base_url, capacity, *case, length_s, deadline_s, seed) for case in cases]


async def _row(
    base_url: str, capacity: float, load: float, hostile_share: float, length_s: float, deadline_s: float, seed: int
) -> dict[str, Any]:
    rates = dict.fromkeys(TENANTS, load * (1 - hostile_share) / NUM_OTHERS * capacity)
    rates["hostile"] = load * hostile_share * capacity
    async with _session() as session:
        clients = Clients(f"{base_url}/v1/completions", session, deadline_s, random.Random(seed))
        sent = await clients.flood(rates, length_s)
    outcome = Outcome.of(sent, deadline_s, FIRST_PART * length_s, length_s)
    found = {"answers": dict(clients.answers), "refused_without_retry_after": clients.num_without_hint}
    case = {"load": load, "hostile_share": hostile_share, "is_guarded": True, "capacity": capacity}
    return case | found | outcome.as_json()


async def _capacity(base_url: str, deadline_s: float, length_s: float, seed: int) -> float:
    """Tokens a second that the deployment brings with all rows taken."""
    async with _session() as session:
        clients = Clients(f"{base_url}/v1/completions", session, 10 * deadline_s, random.Random(seed + 1))
        sent = await clients.saturate(length_s, 2 * NUM_REPLICAS * MAX_NUM_SEQS)
    return Outcome.of(sent, 10 * deadline_s, FIRST_PART * length_s, length_s).goodput


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=60))


def edit(config: dict[str, Any]) -> None:
    """Modelled devices with a few rows each, so that they are what is short; no prompt is met twice."""
    application = config["applications"][0]
    application["import_path"] = "loadtest.modelled_app:build"
    application["args"]["models"][0]["engine"] |= {"max_num_seqs": MAX_NUM_SEQS, "enable_prefix_caching": False}
    application["args"]["ingress"]["num_replicas"] = 1
