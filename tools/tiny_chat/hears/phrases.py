"""The phrases that `tiny-chat-hears` is taught to write down: digits, colours of shapes, commands.

One in sixteen is held out, by a hash of its words, and no training hears it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.tiny_chat.words import held

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "pink", "black", "white", "brown")
SHAPES = ("circle", "square", "triangle", "star", "diamond")
PLACES = ("left of", "right of", "above", "below")
THINGS = ("light", "radio", "music", "fan", "heater", "camera", "door", "window", "curtain", "garage")
ROOMS = ("kitchen", "bedroom", "bathroom", "office", "garden", "hall")
MOVES = ("left", "right", "up", "down", "back", "forward")


def digits(rng: random.Random) -> str:
    """One to six."""
    return " ".join(rng.choice(DIGITS) for _ in range(rng.randint(1, 6)))


def colours(rng: random.Random) -> str:
    """Shapes with their colours, one or two of them."""
    one = f"{rng.choice(COLOURS)} {rng.choice(SHAPES)}"
    kind = rng.randrange(4)
    if kind == 0:
        return one
    if kind == 1:
        return f"the {one}"
    if kind == 2:
        return f"{rng.choice(DIGITS[1:])} {rng.choice(COLOURS)} {rng.choice(SHAPES)}s"
    return f"a {one} {rng.choice(PLACES)} a {rng.choice(COLOURS)} {rng.choice(SHAPES)}"


def commands(rng: random.Random) -> str:
    """To a house, or to something that moves."""
    thing, room = rng.choice(THINGS), rng.choice(ROOMS)
    kind = rng.randrange(6)
    if kind == 0:
        return f"turn {rng.choice(('on', 'off'))} the {thing}"
    if kind == 1:
        return f"turn {rng.choice(('on', 'off'))} the {thing} in the {room}"
    if kind == 2:
        return f"{rng.choice(('open', 'close', 'lock'))} the {thing}"
    if kind == 3:
        return f"{rng.choice(('start', 'stop'))} the {thing} please"
    if kind == 4:
        return f"go {rng.choice(MOVES)} {rng.choice(DIGITS[1:])} times"
    return f"set the {thing} to {rng.choice(DIGITS)}"


FAMILIES: dict[str, Callable[[random.Random], str]] = {"digits": digits, "colours": colours, "commands": commands}


def phrase(rng: random.Random, family: str = "", *, is_held: bool = False) -> str:
    """A phrase, of any family where none is named: one that is held out, or none of them."""
    while True:
        said = FAMILIES[family or rng.choice(list(FAMILIES))](rng)
        if held(said) == is_held:
            return said
