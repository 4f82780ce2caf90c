# ruff: noqa: D103 (seeded on purpose)
"""Pictures of scenes, drawn by Pillow as people draw them who try a model out, at many sizes."""

from __future__ import annotations

import math
import random

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from tools.tiny_chat.sees.scenes import Scene

Rng = random.Random
RGB = tuple[int, int, int]
_COLORS: dict[str, tuple[RGB, ...]] = {
    "red": ((255, 0, 0), (220, 20, 30), (200, 30, 30)),
    "green": ((0, 128, 0), (0, 200, 0), (30, 160, 60)),
    "blue": ((0, 0, 255), (30, 80, 220), (31, 119, 230)),
    "yellow": ((255, 255, 0), (250, 220, 20), (240, 230, 60)),
    "orange": ((255, 165, 0), (255, 140, 0), (250, 130, 30)),
    "purple": ((128, 0, 128), (140, 40, 180), (110, 40, 150)),
    "black": ((0, 0, 0), (25, 25, 25), (15, 15, 20)),
    "pink": ((255, 192, 203), (255, 150, 190), (255, 120, 190)),
}
_BACKGROUNDS: tuple[RGB, ...] = ((255, 255, 255), (245, 245, 245), (235, 240, 250), (220, 220, 220), (250, 245, 230))


def size(rng: Rng) -> tuple[int, int]:
    """Width and height of a canvas, most of them near the side that the tower reads."""
    side = rng.randint(96, 160) if rng.random() < 0.7 else rng.randint(160, 400)
    return (side, side) if rng.random() < 0.6 else (side, max(64, round(side * rng.uniform(0.75, 1.3))))


def draw(rng: Rng, scene: Scene, canvas: tuple[int, int] | None = None) -> Image.Image:
    """A picture of the scene; all that is not its content is the generator's."""
    image = Image.new("RGB", canvas or size(rng), (255, 255, 255) if rng.random() < 0.6 else rng.choice(_BACKGROUNDS))
    pen = ImageDraw.Draw(image)
    {"shapes": _shapes, "number": _number, "chart": _chart}[scene.kind](rng, scene, pen, image.size)
    return image


def color(rng: Rng, name: str) -> RGB:
    r, g, b = (max(0, min(255, c + rng.randint(-10, 10))) for c in rng.choice(_COLORS[name]))
    return r, g, b


def _shapes(rng: Rng, scene: Scene, pen: ImageDraw.ImageDraw, canvas: tuple[int, int]) -> None:
    n = len(scene.objects)
    paints = {name: color(rng, name) for _, name in scene.objects}
    for (form, name), (x, y, r) in zip(scene.objects, _spots(rng, n, scene.axis), strict=True):
        width, height = canvas
        radius = r * min(width, height)
        _form(rng, pen, form, (x * width, y * height, radius), paints[name])


def _spots(rng: Rng, n: int, axis: str) -> list[tuple[float, float, float]]:
    """Middles and radii, as shares of the sides, of n things that do not touch; two on an axis in order."""
    most = 0.4 if n == 1 else 0.21 if n == 2 else 0.15 if n <= 4 else 0.11
    while True:
        same = rng.uniform(most * 0.55, most)
        spots: list[tuple[float, float, float]] = []
        for _ in range(60 * n):
            r = same * rng.uniform(0.85, 1.15) if rng.random() < 0.5 else same
            r = min(r, 0.45)
            x, y = rng.uniform(r + 0.02, 0.98 - r), rng.uniform(r + 0.02, 0.98 - r)
            if all(math.hypot(x - a, y - b) > 1.15 * (r + c) for a, b, c in spots):
                spots.append((x, y, r))
            if len(spots) == n:
                break
        if len(spots) < n:
            continue
        if axis:
            along = 0 if axis == "x" else 1
            spots.sort(key=lambda spot: spot[along])
            gap = spots[1][along] - spots[0][along]
            if gap < 0.3 or abs(spots[1][1 - along] - spots[0][1 - along]) > 0.7 * gap:
                continue
        return spots


def _form(rng: Rng, pen: ImageDraw.ImageDraw, form: str, at: tuple[float, float, float], paint: RGB) -> None:
    x, y, r = at
    if form == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=paint)
        return
    if form == "square":
        s = r * 0.86
        turn = rng.uniform(-0.12, 0.12) if rng.random() < 0.3 else 0.0
        if turn == 0.0:
            pen.rectangle((x - s, y - s, x + s, y + s), fill=paint)
            return
        corners = [(s * 1.41, math.pi / 4 + turn + i * math.pi / 2) for i in range(4)]
    elif form == "diamond":
        wide = rng.uniform(0.65, 0.9)
        pen.polygon([(x, y - r), (x + wide * r, y), (x, y + r), (x - wide * r, y)], fill=paint)
        return
    elif form == "triangle":
        turn = rng.uniform(-0.2, 0.2) if rng.random() < 0.5 else 0.0
        corners = [(r, -math.pi / 2 + turn + i * 2 * math.pi / 3) for i in range(3)]
    else:
        turn, inner = rng.uniform(-0.2, 0.2), rng.uniform(0.38, 0.5)
        corners = [(r * (inner if i % 2 else 1.0), -math.pi / 2 + turn + i * math.pi / 5) for i in range(10)]
    pen.polygon([(x + d * math.cos(a), y + d * math.sin(a)) for d, a in corners], fill=paint)


def _number(rng: Rng, scene: Scene, pen: ImageDraw.ImageDraw, canvas: tuple[int, int]) -> None:
    width, height = canvas
    paint = color(rng, rng.choice(("black", "black", "black", "blue", "red", "green", "purple")))
    n = len(scene.number)
    room = min(height * 0.85, width * 0.95 / (0.62 * n))
    points = max(14.0, room * rng.uniform(0.45 if n < 4 else 0.7, 1.0))
    font = ImageFont.load_default(points)
    stroke = rng.choice((0, 0, 1)) if points > 40 else 0
    left, top, right, bottom = pen.textbbox((0, 0), scene.number, font=font, stroke_width=stroke)
    x = rng.uniform(0.02, 0.98) * max(0.0, width - (right - left)) - left
    y = rng.uniform(0.02, 0.98) * max(0.0, height - (bottom - top)) - top
    pen.text((x, y), scene.number, fill=paint, font=font, stroke_width=stroke)


def _chart(rng: Rng, scene: Scene, pen: ImageDraw.ImageDraw, canvas: tuple[int, int]) -> None:
    width, height = canvas
    left, right = width * rng.uniform(0.04, 0.12), width * rng.uniform(0.9, 0.97)
    floor, top = height * rng.uniform(0.88, 0.96), height * rng.uniform(0.04, 0.1)
    unit, line = (floor - top) / 10, max(1, round(min(canvas) / 120))
    gray, axis = rng.randint(170, 215), rng.randint(0, 90)
    for step in range(1, 11):  # a line for each unit, as the example in examples/ draws it
        y = floor - step * unit
        pen.line((left, y, right, y), fill=(gray,) * 3, width=line)
    slot = (right - left) / len(scene.bars)
    share = rng.uniform(0.5, 0.8)
    for i, (name, value) in enumerate(scene.bars):
        x = left + (i + 0.5) * slot
        box = (x - slot * share / 2, floor - value * unit, x + slot * share / 2, floor)
        pen.rectangle(box, fill=color(rng, name))
    pen.line((left, top, left, floor), fill=(axis,) * 3, width=line)
    pen.line((left, floor, right, floor), fill=(axis,) * 3, width=line)


def pixels(image: Image.Image, side: int) -> npt.NDArray[np.uint8]:
    """[side, side, 3] as the processor hands it to the tower."""
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
