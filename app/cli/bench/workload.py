"""Makes what a benchmark sends, and when: prompts of given lengths and arrival times, from a seed.

Lengths are exact in tokens: prompts are token ids (completions), drawn from a local tokenizer or from what the
server's own /tokenize returns. Chat prompts are the text of such ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.checkpoints.model_info import resolve_model
from app.cli.command import CommandError
from app.cli.server_queries import ask
from app.cli.stream_client import Server
from app.errors import ConfigError
from app.text.tokenizer import Tokenizer

# Text for servers that show their tokenizer: enough different words to sample from.
SAMPLE_TEXT = (
    "The harbour wakes before the town does: ropes creak, gulls quarrel, and a lamp swings over wet planks. Nineteen "
    "boats left at four; twelve are back with herring, crab, mackerel and a rumour of whales near the northern shelf. "
    "Prices rise with the wind, said the auctioneer, and fall again by noon. Children count crates in chalk, 3 by 5, "
    "7 by 8, while their grandmother mends a net she has mended since winter. Later the ferry brings letters, flour, "
    "paint, two violins and a surveyor who measures everything twice and believes none of it."
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of the prompts and answers, in tokens; each is drawn from length * (1 +- range_ratio)."""

    input_len: int
    output_len: int
    prefix_len: int = 0  # the first tokens of a prompt's input_len: the same for all requests
    range_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """One request to send: a text or token ids, and how many tokens to ask for."""

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Token ids to draw from, and their text."""

    token_ids: Sequence[int]
    decode: Callable[[list[int]], str]


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Seconds at which requests start. Gaps are gamma distributed (burstiness 1: Poisson arrivals; inf: even) and
    scaled so that `count` requests take exactly count / rate. All 0 at an infinite rate."""
    if np.isinf(rate):
        return [0.0] * count
    even = np.isinf(burstiness)
    gaps = np.full(count, 1 / rate) if even else rng.gamma(burstiness, 1 / (rate * burstiness), count)
    times = gaps.cumsum()
    scaled: list[float] = (times * (count / rate / times[-1])).tolist()
    return scaled


def random_work(count: int, shape: Shape, source: TokenSource, as_text: bool, rng: np.random.Generator) -> list[Work]:
    """`count` requests of random tokens."""
    pool = np.asarray(source.token_ids)
    prefix: list[int] = rng.choice(pool, shape.prefix_len).tolist()
    work = []
    for _ in range(count):
        own: list[int] = rng.choice(pool, _draw(shape.input_len, shape.range_ratio, rng)).tolist()
        ids = prefix + own
        work.append(Work(source.decode(ids) if as_text else ids, _draw(shape.output_len, shape.range_ratio, rng)))
    return work


def read_work(file: Path, count: int, output_len: int) -> list[Work]:
    """The first `count` lines of a JSONL file, repeated as needed: {"prompt": ..., "output_len": N}.

    ConfigError names the line at fault."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--dataset {file}: {error.strerror}") from None
    work = [_read_line(f"{file}:{number}", line, output_len) for number, line in enumerate(lines, 1)]
    if not work:
        raise ConfigError(f"--dataset {file} is empty")
    return [work[i % len(work)] for i in range(count)]


def token_source(server: Server, model: str, tokenizer: str | None) -> TokenSource:
    """Token ids of a tokenizer directory or built-in model, else of the server. CommandError when neither can be."""
    if tokenizer is not None:
        local = Tokenizer.from_directory(_directory(tokenizer))
        ids = [i for i in range(local.vocab_size) if i not in local.special_token_ids]
        return TokenSource(ids, local.decode)

    def decode(token_ids: list[int]) -> str:
        return str(ask(server, "/detokenize", {"model": model, "tokens": token_ids})["prompt"])

    try:
        answer = ask(server, "/tokenize", {"model": model, "prompt": SAMPLE_TEXT, "add_special_tokens": False})
        return TokenSource(sorted({int(token) for token in answer["tokens"]}), decode)
    except (CommandError, KeyError, TypeError, ValueError):
        raise CommandError(
            f"{server.base} does not answer /tokenize: give --tokenizer DIR, or prompts with --dataset"
        ) from None


def _directory(tokenizer: str) -> Path:
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else resolve_model(tokenizer)


def _draw(length: int, ratio: float, rng: np.random.Generator) -> int:
    return max(1, int(rng.integers(int(length * (1 - ratio)), int(length * (1 + ratio)), endpoint=True)))


def _read_line(where: str, line: str, output_len: int) -> Work:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str | list):
        raise ConfigError(f'{where}: expected {{"prompt": text or token ids, "output_len": N}}')
    length = entry.get("output_len", output_len)
    if not isinstance(length, int) or length < 1:
        raise ConfigError(f"{where}: output_len must be a positive integer, not {length!r}")
    return Work(entry["prompt"], length)
