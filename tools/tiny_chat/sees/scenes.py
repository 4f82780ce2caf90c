# ruff: noqa: D103 (seeded on purpose)
"""What pictures show, and what is asked about it: shapes, numbers, bar charts.

Held out are scenes (`words.held` of their content): no picture of one is drawn in training, whatever is asked about it.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tools.tiny_chat.words import held

Rng = random.Random
Kind = Literal["shapes", "number", "chart"]
SHAPES = ("circle", "square", "triangle", "star", "diamond")
COLORS = ("red", "green", "blue", "yellow", "orange", "purple", "black", "pink")
PLACES = ("left", "right", "top", "bottom")
MAX_OBJECTS, MAX_HEIGHT = 9, 9
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Scene:
    """One picture's content: objects (shape and color, in reading order where there are two), a number, or bars."""

    kind: Kind
    objects: tuple[tuple[str, str], ...] = ()
    axis: str = ""  # of two objects: "x" beside each other, "y" one above the other
    number: str = ""
    bars: tuple[tuple[str, int], ...] = ()  # color and height, from the left

    @property
    def key(self) -> str:
        """The content that is held out or not."""
        seen = self.objects if self.axis else tuple(sorted(self.objects))
        return f"{self.kind}:{seen}:{self.axis}:{self.number}:{self.bars}"

    def labels(self) -> list[int]:
        """Facts as classes of 0 to 10, -1 where one means nothing: what the tower is taught beside the answers."""
        shapes, colors = (Counter(one[i] for one in self.objects) for i in (0, 1))
        is_shapes, is_number, is_chart = (self.kind == kind for kind in ("shapes", "number", "chart"))
        digits = [int(d) for d in self.number] + [10] * (4 - len(self.number))
        heights, groups = dict(self.bars), Counter(self.objects)
        row = [heights.get(color, 0) for color in COLORS]
        order = [COLORS.index(self.bars[i][0]) if i < len(self.bars) else 10 for i in range(5)]
        pair = self.objects if self.axis else self.objects[:1] * 2  # the two objects of an axis, one by one
        facts = [
            (is_shapes, [len(self.objects), *(shapes[s] for s in SHAPES), *(colors[c] for c in COLORS)]),
            (is_shapes, [groups[s, c] for s in SHAPES for c in COLORS]),
            (bool(self.axis), [value for s, c in pair or [("star", "red")] * 2 for value in _classes(s, c)]),
            (is_number, digits),
            (is_chart, [len(self.bars), *row, *order]),
        ]
        kind = ("shapes", "number", "chart").index(self.kind)
        return [kind] + [value if is_it else -1 for is_it, values in facts for value in values]


def _classes(shape: str, color: str) -> tuple[int, int]:
    return SHAPES.index(shape), COLORS.index(color)


def scene(rng: Rng, held_out: bool, kind: Kind | None = None) -> Scene:
    """A scene of the training part, or of the other."""
    kind = kind or rng.choices(("shapes", "number", "chart"), (6, 2, 2))[0]
    while True:
        drawn = {"shapes": _shapes, "number": _number, "chart": _chart}[kind](rng)
        if held(drawn.key) == held_out:
            return drawn


def _shapes(rng: Rng) -> Scene:
    r = rng.random()
    if r < 0.2:
        return Scene("shapes", ((rng.choice(SHAPES), rng.choice(COLORS)),))
    if r < 0.45:
        while True:
            a, b = ((rng.choice(SHAPES), rng.choice(COLORS)) for _ in range(2))
            if a != b:
                return Scene("shapes", (a, b), rng.choice("xy"))
    groups: list[tuple[str, str]] = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        group = (rng.choice(SHAPES), rng.choice(COLORS))
        if all(group[0] != other[0] for other in groups):
            groups.append(group)
    while True:
        counts = [rng.randint(1, MAX_OBJECTS) for _ in groups]
        if 2 <= sum(counts) <= MAX_OBJECTS:
            break
    return Scene("shapes", tuple(g for g, n in zip(groups, counts, strict=True) for _ in range(n)))


def _number(rng: Rng) -> Scene:
    digits = rng.choice((1, 1, 2, 2, 3, 3, 4))
    if digits == 1:
        return Scene("number", number=rng.choice("0123456789"))
    return Scene("number", number=str(rng.randint(10 ** (digits - 1), 10**digits - 1)))


def _chart(rng: Rng) -> Scene:
    colors = rng.sample(COLORS, rng.randint(2, 5))
    return Scene("chart", bars=tuple((color, rng.randint(1, MAX_HEIGHT)) for color in colors))


# ---------------------------------------------------------------- questions

QA = tuple[str, str]  # a question and its answer


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n if n else 'no'} {noun}s"


def _there(n: int, noun: str) -> str:
    return f"There {'is' if n == 1 else 'are'} {_many(n, noun)}."


def _phrase(parts: list[str]) -> str:
    text = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return text[0].upper() + text[1:] + "."


def _an(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def count(rng: Rng, s: Scene) -> QA | None:
    if s.kind != "shapes":
        return None
    shapes = Counter(shape for shape, _ in s.objects)
    shape = rng.choice([*shapes, *shapes, *shapes, rng.choice(SHAPES)])
    ask = rng.choice(("How many {}s are there?", "How many {}s are in the picture?", "Count the {}s.", "How many {}s?"))
    return ask.format(shape), _there(shapes[shape], shape)


def count_all(rng: Rng, s: Scene) -> QA | None:
    if s.kind != "shapes":
        return None
    asks = ("How many shapes are there?", "How many shapes are in the picture?", "Count the shapes.")
    return rng.choice(asks), _there(len(s.objects), "shape")


def color(rng: Rng, s: Scene) -> QA | None:
    colors = {shape: {c for other, c in s.objects if other == shape} for shape, _ in s.objects}
    known = [shape for shape, found in colors.items() if len(found) == 1]
    if not known:
        return None
    shape = rng.choice(known)
    (found,) = colors[shape]
    n = sum(other == shape for other, _ in s.objects)
    spelled = rng.choice(("color", "colour"))
    if n == 1:
        ask = rng.choice((f"What {spelled} is the {shape}?", f"Which {spelled} has the {shape}?"))
        return ask, f"The {shape} is {found}."
    ask = rng.choice((f"What {spelled} are the {shape}s?", f"Which {spelled} have the {shape}s?"))
    return ask, f"The {shape}s are {found}."


def shape(rng: Rng, s: Scene) -> QA | None:
    if len(s.objects) != 1:
        return None
    form, found = s.objects[0]
    if rng.random() < 0.3:
        return f"What color is the {form}?", f"The {form} is {found}."
    asks = ("What shape is this?", "Which shape is in the picture?", "What shape is it?", "Name the shape.")
    return rng.choice(asks), f"It is {_an(form)}."


def is_there(rng: Rng, s: Scene) -> QA | None:
    if s.kind != "shapes":
        return None
    form, found = rng.choice(s.objects) if rng.random() < 0.5 else (rng.choice(SHAPES), rng.choice(COLORS))
    if rng.random() < 0.4:
        has = any(other == form for other, _ in s.objects)
        return rng.choice((f"Is there {_an(form)}?", f"Do you see {_an(form)}?")), "Yes." if has else "No."
    has = (form, found) in s.objects
    ask = rng.choice((f"Is there {_an(found)} {form}?", f"Do you see {_an(found)} {form}?"))
    return ask, "Yes." if has else "No."


def place(rng: Rng, s: Scene) -> QA | None:
    if not s.axis:
        return None
    second = rng.random() < 0.5
    form, found = s.objects[second]
    where = {"x": ("on the left", "on the right"), "y": ("at the top", "at the bottom")}[s.axis][second]
    asks = (f"What is {where}?", f"Which shape is {where}?", f"What do you see {where}?")
    return rng.choice(asks), f"{_an(found).capitalize()} {form}."


def number(rng: Rng, s: Scene) -> QA | None:
    if not s.number:
        return None
    asks = (
        *("What number is this?", "Which number is in the picture?", "Read the number.", "What number do you see?"),
        *("What does it say?", "What is the number?", "Which number do you see?"),
    )
    return rng.choice(asks), f"The number is {s.number}."


def bars(rng: Rng, s: Scene) -> QA | None:
    if not s.bars:
        return None
    asks = ("How many bars are there?", "How many bars does the chart have?", "Count the bars.", "How many bars?")
    return rng.choice(asks), _there(len(s.bars), "bar")


def tallest(rng: Rng, s: Scene) -> QA | None:
    heights = sorted(height for _, height in s.bars)
    if len(heights) < 2:
        return None
    most = rng.random() < 0.6
    if heights[-1 if most else 0] == heights[-2 if most else 1]:
        return None
    found = next(c for c, height in s.bars if height == heights[-1 if most else 0])
    word = rng.choice(("tallest", "highest", "longest") if most else ("shortest", "lowest", "smallest"))
    return rng.choice((f"Which bar is the {word}?", f"What color is the {word} bar?")), f"The {found} bar."


def height(rng: Rng, s: Scene) -> QA | None:
    if not s.bars:
        return None
    found, value = rng.choice(s.bars)
    asks = (f"How high is the {found} bar?", f"How tall is the {found} bar?", f"What value has the {found} bar?")
    return rng.choice(asks), f"The {found} bar is {value} high."


def describe(rng: Rng, s: Scene) -> QA:
    asks = (
        "Describe the picture.",
        "What is in the picture?",
        "What do you see?",
        "What is this?",
        "Describe this image.",
    )
    ask = "" if rng.random() < 0.08 else rng.choice(asks)
    if s.number:
        return ask, f"The number {s.number}."
    if s.bars:
        return ask, f"A bar chart with {_many(len(s.bars), 'bar')}: {', '.join(f'{c} {h}' for c, h in s.bars)}."
    groups = Counter(s.objects)
    one = [_an(f"{c} {form}") if n == 1 else f"{WORDS[n]} {c} {form}s" for (form, c), n in groups.items()]
    return ask, _phrase(one)


FAMILIES = {
    **{"count": count, "count_all": count_all, "color": color, "shape": shape, "is_there": is_there, "place": place},
    **{"number": number, "bars": bars, "tallest": tallest, "height": height, "describe": describe},
}
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("count", "count_all", "color", "shape", "is_there", "place"), "shapes"),
    "number": "number",
    **dict.fromkeys(("bars", "tallest", "height"), "chart"),
}
WEIGHTS = {
    **{"count": 5.0, "count_all": 2.0, "color": 2.5, "is_there": 3.0, "place": 5.0, "describe": 2.5},
    **{"shape": 2.0, "number": 3.0, "bars": 0.7, "tallest": 2.0, "height": 3.0},
}


def question(rng: Rng, s: Scene) -> tuple[str, QA]:
    """One question of those that the scene answers: its family, the words, the answer."""
    while True:
        family = rng.choices(list(FAMILIES), [WEIGHTS[name] for name in FAMILIES])[0]
        if KINDS.get(family, s.kind) == s.kind and (found := FAMILIES[family](rng, s)) is not None:
            return family, found


def heldout(rng: Rng, family: str) -> tuple[Scene, QA]:
    """A held-out scene and a question of that family about it."""
    while True:
        drawn = scene(rng, True, KINDS.get(family))
        if (found := FAMILIES[family](rng, drawn)) is not None and found[0]:
            return drawn, found
