# ruff: noqa: D103 (seeded on purpose)
"""Training rows: a drawn picture and a conversation about it, as `template.py` writes it."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tools.tiny_chat import families, template
from tools.tiny_chat.sees import drawing, scenes

ASSETS = Path(__file__).resolve().parents[3] / "app" / "assets"
MARK = "<image>"
IMAGE_TOKEN = 190  # byte 0xFF, which no UTF-8 text holds: its row of the vocabulary stands for a picture
SIDE, PATCH = 96, 12
NUM_TOKENS = (SIDE // PATCH) ** 2
ROW = 192
Message = dict[str, Any]
Rng = random.Random


def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tiny-chat" / "tokenizer.json"))


def conversation(rng: Rng, scene: scenes.Scene) -> list[Message]:
    """One to four turns of which the first shows the picture; now and then other talk before, within or behind."""
    turns: list[Message] = []
    for number in range(rng.choice((1, 1, 2, 3, 4))):
        _, (ask, answer) = scenes.question(rng, scene)
        ask = ask and families.ask(rng, ask)
        if rng.random() < (0.05 if number == 0 else 0.15) and (other := _talk(rng)):
            ask, answer = other[0]["content"], other[1]["content"]
        text = f"{MARK}\n{ask}" if number == 0 else ask
        if number and not ask:
            continue
        turns += [families.user(text), families.bot(answer)]
    before = _talk(rng) if rng.random() < 0.06 else []
    system = rng.choice(families.SYSTEMS) if rng.random() < 0.5 else None
    return ([{"role": "system", "content": system}] if system else []) + before + turns


def _talk(rng: Rng) -> list[Message]:
    """A question of the text's own families and its answer; empty where it is more than that."""
    found = families.FAMILIES[rng.choice(families._MIXABLE)][0](rng, False)
    if found.solo or found.tools or found.system or len(found.turns) != 2 or found.turns[1].get("tool_calls"):
        return []
    return found.turns


def encode(tok: Tokenizer, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Token ids, a picture's in its place, and 1 where one is to be answered."""
    ids: list[int] = []
    weights: list[int] = []
    for text, is_target in pieces:
        first, *rest = text.split(MARK)
        own = tok.encode(first, add_special_tokens=False).ids
        for behind in rest:
            own += [IMAGE_TOKEN] * NUM_TOKENS + tok.encode(behind, add_special_tokens=False).ids
        ids += own
        weights += [int(is_target)] * len(own)
    return ids, weights


Chunk = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int16], npt.NDArray[np.uint8], npt.NDArray[np.int8]]


def chunks(seed: int, size: int) -> Iterator[Chunk]:
    """For ever: pictures [n, side, side, 3], token ids and weights [n, ROW], labels [n, facts]."""
    tok, rng = tokenizer(), random.Random(seed)
    while True:
        pixels = np.zeros((size, SIDE, SIDE, 3), np.uint8)
        ids, weights = np.zeros((size, ROW), np.int16), np.zeros((size, ROW), np.uint8)
        labels = []
        for i in range(size):
            scene = scenes.scene(rng, False)
            pixels[i] = drawing.pixels(drawing.draw(rng, scene), SIDE)
            labels.append(scene.labels())
            while True:
                own, target = encode(tok, template.pieces(conversation(rng, scene)))
                if len(own) <= ROW:
                    break
            ids[i, : len(own)], weights[i, : len(own)] = own, target
        yield pixels, ids, weights, np.array(labels, np.int8)


def worker(seed: int, out: Any, size: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for chunk in chunks(seed, size):
        out.put(chunk)
