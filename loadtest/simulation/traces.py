"""The kinds of traffic: one function each, and the table. Every one is scaled to a number of requests.

Lengths are in tokens, times in shares of the trace's length; the same seed gives the same trace.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from loadtest.simulation.traffic import SimRequest, Text, Trace, answered

ZIPF = 1.0  # popularity of the n-th prompt: n ** -ZIPF
REQUESTS_PER_GROUP = 5.0
NUM_BURSTS = 8
NUM_ADAPTERS = 1000
DEAD_SHARE = 0.125  # the part of the replicas that dies in `churn`


def _outputs(rng: random.Random) -> int:
    return rng.randint(64, 192)


def _zipf(rng: random.Random, count: int) -> Callable[[], int]:
    cumulative = list(itertools.accumulate((n + 1) ** -ZIPF for n in range(count)))
    ranks = range(count)
    return lambda: rng.choices(ranks, cum_weights=cumulative)[0]


def shared_prefix(rng: random.Random, num_requests: int, num_replicas: int) -> Trace:
    """Long system prompts, some far more popular than others; short questions, evenly over time."""
    return Trace("shared_prefix", _questions(rng, num_requests, [i / num_requests for i in range(num_requests)]))


def _questions(rng: random.Random, num_requests: int, times: Sequence[float]) -> list[SimRequest]:
    systems = [Text().then(rng, rng.randint(3072, 8192)) for _ in range(max(1, int(num_requests / REQUESTS_PER_GROUP)))]
    draw = _zipf(rng, len(systems))
    found = []
    for at in times:
        group = draw()
        prompt = systems[group].then(rng, rng.randint(64, 512))
        found.append(answered(rng, prompt, _outputs(rng), at, session=f"group-{group}"))
    return found


def chat(rng: random.Random, num_requests: int, num_replicas: int) -> Trace:
    """Conversations of 2 to 12 turns under one of eight system prompts, with pauses between the turns."""
    systems = [Text().then(rng, 1024) for _ in range(8)]
    roots: list[SimRequest] = []
    made = 0
    while made < num_requests:
        turns = rng.randint(2, 12)
        made += turns
        roots.append(_conversation(rng, rng.choice(systems), turns, f"chat-{len(roots)}", rng.random() * 0.7))
    roots.sort(key=lambda root: root.at)
    return Trace("chat", roots)


def _conversation(rng: random.Random, text: Text, turns: int, session: str, at: float) -> SimRequest:
    first = previous = None
    for turn in range(turns):
        prompt = text.then(rng, rng.randint(512, 3072) if turn == 0 else rng.randint(64, 768))
        pause = rng.expovariate(1 / 0.03) if turn else 0.0
        at += pause
        request = answered(rng, prompt, _outputs(rng), at, session=session, delay=pause)
        text = request.whole
        if previous is None:
            first = request
        else:
            previous.then.append(request)
        previous = request
    assert first is not None
    return first


def agents(rng: random.Random, num_requests: int, num_replicas: int) -> Trace:
    """A plan over a long context, four to eight steps at once that continue it, each with one or two steps after it."""
    tools = [Text().then(rng, 2048) for _ in range(16)]
    roots: list[SimRequest] = []
    made = 0
    while made < num_requests:
        at, session = rng.random() * 0.95, f"agent-{len(roots)}"
        root = answered(rng, rng.choice(tools).then(rng, rng.randint(1024, 6144)), _outputs(rng), at, session=session)
        made += 1
        for _ in range(rng.randint(4, 8)):
            parent = root
            for _ in range(rng.randint(2, 3)):
                prompt = parent.whole.then(rng, rng.randint(64, 768))
                pause = rng.uniform(0.0, 0.01)
                child = answered(rng, prompt, _outputs(rng), parent.at + pause, session=session, delay=pause)
                parent.then.append(child)
                parent = child
                made += 1
        roots.append(root)
    roots.sort(key=lambda root: root.at)
    return Trace("agents", roots)


def documents(rng: random.Random, num_requests: int, num_replicas: int) -> Trace:
    """Documents of 8,192 to 24,576 tokens, each asked about 4 to 10 times within a third of the trace's length."""
    roots: list[SimRequest] = []
    while len(roots) < num_requests:
        document = Text().then(rng, rng.randint(8192, 24576))
        begin, session = rng.uniform(0.0, 0.67), f"document-{len(roots)}"
        for _ in range(rng.randint(4, 10)):
            prompt = document.then(rng, rng.randint(32, 128))
            roots.append(answered(rng, prompt, _outputs(rng), begin + rng.uniform(0.0, 0.33), session=session))
    roots.sort(key=lambda root: root.at)
    return Trace("documents", roots)


def bursts(rng: random.Random, num_requests: int, num_replicas: int) -> Trace:
    """The questions of `shared_prefix`, half of them crowded into short bursts (a twentieth of the time in all)."""
    times = []
    for i in range(num_requests):
        at = rng.random()
        if i % 2:
            at = (int(at * NUM_BURSTS) + 0.5 + 0.05 * rng.random()) / NUM_BURSTS
        times.append(at)
    return Trace("bursts", _questions(rng, num_requests, sorted(times)))


def adapters(rng: random.Random, num_requests: int, num_replicas: int) -> Trace:
    """A thousand teams' adapters of one model, some far more popular than others, each with a short system prompt."""
    systems = [Text().then(rng, rng.randint(256, 1024)) for _ in range(NUM_ADAPTERS)]
    draw, roots = _zipf(rng, NUM_ADAPTERS), []
    for i in range(num_requests):
        team = draw()
        prompt = systems[team].then(rng, rng.randint(64, 1024))
        found = answered(rng, prompt, _outputs(rng), i / num_requests, session=f"team-{team}", adapter=f"{team:032x}")
        roots.append(found)
    return Trace("adapters", roots)


def churn(rng: random.Random, num_requests: int, num_replicas: int) -> Trace:
    """The questions of `shared_prefix` while an eighth of the replicas die, one by one, and new ones come for them."""
    trace = shared_prefix(rng, num_requests, num_replicas)
    dying = max(1, int(DEAD_SHARE * num_replicas))
    deaths = [0.3 + 0.3 * i / dying for i in range(dying)]
    return Trace("churn", trace.roots, deaths, [at + 0.1 for at in deaths])


TRACES: dict[str, Callable[[random.Random, int, int], Trace]] = {
    "shared_prefix": shared_prefix,
    "chat": chat,
    "agents": agents,
    "documents": documents,
    "bursts": bursts,
    "churn": churn,
    "adapters": adapters,
}


def create_trace(name: str, num_requests: int, num_replicas: int, seed: int) -> Trace:
    """A trace of about `num_requests` requests of the kind `name`; KeyError for an unknown one."""
    return TRACES[name](random.Random(f"{name}-{seed}"), num_requests, num_replicas)
