"""What a simulated client sends: texts as chains of block hashes, requests, and requests that follow from others."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from app.records.block_hash import HASH_BYTES

BLOCK_SIZE = 128  # tokens; the engines' default is 16, and a simulation of it eight times as slow


class Text:
    """So many tokens, and the hashes of their full blocks. `then` continues it; equal beginnings are shared."""

    __slots__ = ("hashes", "num_tokens")

    def __init__(self, num_tokens: int = 0, hashes: tuple[bytes, ...] = ()) -> None:
        self.num_tokens = num_tokens
        self.hashes = hashes

    def then(self, rng: random.Random, num_tokens: int) -> Text:
        """This text with `num_tokens` further tokens that are nowhere else."""
        total = self.num_tokens + num_tokens
        data = rng.randbytes(HASH_BYTES * (total // BLOCK_SIZE - len(self.hashes)))
        new = tuple(data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES))
        return Text(total, self.hashes + new)


@dataclass(slots=True)
class SimRequest:
    """One request: `prompt` is answered to become `whole`. `then` are sent when it has ended, after their delays."""

    prompt: Text
    whole: Text
    at: float  # when a root is sent, as a share of the trace's length; about when, for others
    session: str = ""
    adapter: str = ""  # digest, in hex digits; "": the base model
    delay: float = 0.0  # after the end of the request it follows, as a share of the trace's length
    then: list[SimRequest] = field(default_factory=list)
    number: int = -1
    # What became of it, in seconds of simulated time; of a request that was placed again, the last placement's cache.
    sent_s: float = -1.0
    first_token_s: float = -1.0
    ended_s: float = -1.0
    replica: str = ""
    num_cached_tokens: int = 0
    num_placements: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer."""
        return self.whole.num_tokens - self.prompt.num_tokens

    @property
    def prompt_hashes(self) -> tuple[bytes, ...]:
        """Hashes of the prompt's full blocks without its last token, which is always computed."""
        return self.prompt.hashes[: (self.prompt.num_tokens - 1) // BLOCK_SIZE]


def answered(rng: random.Random, prompt: Text, num_output_tokens: int, at: float, **more: object) -> SimRequest:
    """A request with an answer of its own."""
    return SimRequest(prompt, prompt.then(rng, num_output_tokens), at, **more)  # type: ignore[arg-type]


@dataclass(slots=True)
class Trace:
    """Requests that start by themselves (`roots`), the rest of them behind these; replicas that die or join."""

    name: str
    roots: list[SimRequest]
    deaths: Sequence[float] = ()  # when one replica dies, as shares of the trace's length
    joins: Sequence[float] = ()

    def __post_init__(self) -> None:
        for number, request in enumerate(self):
            request.number = number

    def __iter__(self) -> Iterator[SimRequest]:
        stack = list(reversed(self.roots))
        while stack:
            request = stack.pop()
            yield request
            stack += reversed(request.then)


def reuse(trace: Trace) -> tuple[int, int]:
    """(blocks of prompts that an endless shared cache would hit, most blocks at once that are still to be used again).

    The second number is the working set: a block is in it from its first use in a prompt to its last one.
    """
    first: dict[bytes, float] = {}
    last: dict[bytes, float] = {}
    hits = 0
    for request in sorted(trace, key=lambda request: request.at):
        for block_hash in request.prompt_hashes:
            if block_hash in first:
                hits += 1
            else:
                first[block_hash] = request.at
            last[block_hash] = request.at
        for block_hash in request.whole.hashes[len(request.prompt_hashes) :]:
            first.setdefault(block_hash, request.at)
    used_again = [(first[h], at) for h, at in last.items() if at > first[h]]
    changes = sorted([(begin, 1) for begin, _ in used_again] + [(end, -1) for _, end in used_again])
    most = alive = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return hits, most
