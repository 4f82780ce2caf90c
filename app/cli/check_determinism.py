"""`manta check-determinism URL`: does a running server give a request the same numbers whatever runs beside it?

The same greedy prompts are asked alone and among others, with a prefix cache that knows them and with one that does not
(a cache salt of its own for each question). Tokens and logprobs are compared as the server wrote them, to the last
digit. With `deterministic: batch` they are all the same; without it a few differ, most where there is much beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from app.cli.command import Command, CommandError
from app.cli.server_options import KEY_VARIABLES, server_given
from app.cli.server_queries import choose_model
from app.cli.stream_client import Server, reason_of
from app.errors import ConfigError

TIMEOUT_S = 3600.0
TOP = 5  # most likely tokens that are compared at each place
MOST_PROMPTS, MOST_CONCURRENT, MOST_TOKENS = 1000, 1000, 100_000
TEXT = "the river of a small town runs past seven old mills and one new bridge where people meet to talk about rain"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to ask all prompts."""

    name: str
    is_crowded: bool  # all at once, among others
    is_salted: bool  # no prefix of it is cached


WAYS = (
    Way("alone, cached", is_crowded=False, is_salted=False),
    Way("among others", is_crowded=True, is_salted=True),
    Way("among others, cached", is_crowded=True, is_salted=False),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer."""

    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]  # of them
    most_likely: tuple[Mapping[str, float], ...]

    def first_difference(self, other: Answer) -> str | None:
        """Says where another answer to the same prompt departs from this one; None: nowhere."""
        for place, (mine, its) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if mine != its:
                return f"token {place}: {mine!r}, then {its!r}"
            if self.logprobs[place] != other.logprobs[place]:
                return f"token {place} {mine!r}: {self.logprobs[place]}, then {other.logprobs[place]}"
            if self.most_likely[place] != other.most_likely[place]:
                return f"token {place}: logprobs of other tokens"
        if len(self.tokens) != len(other.tokens):
            return f"{len(self.tokens)} tokens, then {len(other.tokens)}"
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Server, and how much to ask."""
    parser.add_argument("url", metavar="URL", help="server to ask")
    parser.add_argument("--api-key", metavar="KEY", help=f"(default: {' or '.join(KEY_VARIABLES)} of the environment)")
    parser.add_argument("--model", help="name of the model (default: the server's first)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts, of 1 to 300 words (default: %(default)s)")
    parser.add_argument("--others", type=int, default=8, help="further requests beside them (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Returns 0 where all answers are the same to the last digit, 1 where one is not."""
    for name, most in (("prompts", MOST_PROMPTS), ("others", MOST_CONCURRENT), ("max_tokens", MOST_TOKENS)):
        least = 0 if name == "others" else 1
        if not least <= getattr(args, name) <= most:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(args, name)} is not within {least} and {most}")
    server = server_given(args)
    model = choose_model(server, args.model)
    prompts = [prompt_of(number, 1 + 299 * number // max(1, args.prompts - 1)) for number in range(args.prompts)]
    others = [prompt_of(MOST_PROMPTS + number, 10 + 7 * (number % 40)) for number in range(args.others)]
    differences = asyncio.run(_compare(server, model, prompts, others, args.max_tokens))
    print(
        f"{model} at {server.base}: {len(prompts)} prompts, {args.max_tokens} tokens each, against each of them alone"
    )
    print("\n".join(_table(differences, len(prompts))))
    return 1 if any(differences.values()) else 0


def prompt_of(number: int, num_words: int) -> str:
    """A text of its own for each number."""
    words, step = TEXT.split(), 1 + number % 7
    return " ".join([str(number), *(words[(number + step * word) % len(words)] for word in range(num_words))])


async def _compare(
    server: Server, model: str, prompts: Sequence[str], others: Sequence[str], max_tokens: int
) -> dict[str, list[str]]:
    """Differences to each prompt's answer alone, in words, by the way of asking."""
    run_salt = secrets.token_hex(8)  # nothing that an earlier run left in the cache

    async def ask(session: aiohttp.ClientSession, prompt: str, salt: str) -> Answer:
        body = {"model": model, "prompt": prompt, "temperature": 0.0, "max_tokens": max_tokens, "logprobs": TOP}
        return await _ask(session, server, {**body, "cache_salt": f"{run_salt}{salt}"})

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=server.headers()) as session:
        truth = [await ask(session, prompt, "") for prompt in prompts]
        found = {}
        for way in WAYS:
            salts = [f"{way.name}{number}" if way.is_salted else "" for number in range(len(prompts))]
            if way.is_crowded:
                beside = [ask(session, prompt, f"beside {number}") for number, prompt in enumerate(others)]
                asked = [ask(session, prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)]
                answers = (await asyncio.gather(*beside, *asked))[len(others) :]
            else:
                answers = [await ask(session, prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)]
            found[way.name] = _differences(truth, answers)
        return found


def _differences(truth: Sequence[Answer], answers: Sequence[Answer]) -> list[str]:
    pairs = enumerate(zip(truth, answers, strict=True))
    found = ((number, one.first_difference(other)) for number, (one, other) in pairs)
    return [f"prompt {number}, {words}" for number, words in found if words is not None]


async def _ask(session: aiohttp.ClientSession, server: Server, body: dict[str, Any]) -> Answer:
    """CommandError where there is no answer, or none with logprobs."""
    url = f"{server.base}/v1/completions"
    try:
        async with session.post(url, json=body) as response:
            content = await response.read()
            if response.status != HTTPStatus.OK:
                raise CommandError(f"{url}: HTTP {response.status} {response.reason}: {reason_of(content)}")
            choice = (await response.json())["choices"][0]
        given = choice["logprobs"]
        most_likely = tuple({str(k): float(v) for k, v in one.items()} for one in given["top_logprobs"])
        return Answer(tuple(given["tokens"]), tuple(given["token_logprobs"]), most_likely)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CommandError(f"{url}: {type(error).__name__}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise CommandError(f"{url} answers without logprobs: is this an OpenAI-compatible server?") from None


def _table(differences: Mapping[str, Sequence[str]], num_prompts: int) -> list[str]:
    width = max(map(len, differences))
    lines = [f"{'asked':{width}}  same  differ  first difference"]
    for name, found in differences.items():
        lines.append(
            f"{name:{width}}  {num_prompts - len(found):4}  {len(found):6}  {found[0] if found else ''}".rstrip()
        )
    return lines


COMMAND = Command("ask a running server whether its answers depend on what runs beside them", add_arguments, run)
