"""What the built-in model that sees is taught: scenes, their pictures and what is said of them (no training here)."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tools.tiny_chat import template, words
from tools.tiny_chat.sees import drawing, evaluate, rows, scenes

PAINTS = {"red": (255, 0, 0), "green": (0, 160, 30), "blue": (0, 0, 255), "black": (15, 15, 15)}


def test_training_never_draws_a_held_out_scene() -> None:
    rng = random.Random(0)
    for _ in range(300):
        assert words.held(scenes.scene(rng, held_out=True).key)
        assert not words.held(scenes.scene(rng, held_out=False).key)


@pytest.mark.parametrize("family", scenes.FAMILIES)
def test_every_family_asks_about_held_out_scenes(family: str) -> None:
    rng = random.Random(1)
    found = [scenes.heldout(rng, family) for _ in range(40)]
    assert all(words.held(scene.key) and ask and answer for scene, (ask, answer) in found)
    assert len({answer for _, (_, answer) in found}) > 1


def test_answers_say_what_the_scene_holds() -> None:
    rng = random.Random(2)
    scene = scenes.Scene("shapes", (("circle", "red"), ("circle", "red"), ("star", "blue")))
    assert {scenes.count_all(rng, scene) for _ in range(9)} == {
        (ask, "There are 3 shapes.")
        for ask in ("How many shapes are there?", "How many shapes are in the picture?", "Count the shapes.")
    }
    counted = dict(filter(None, (scenes.count(rng, scene) for _ in range(99))))
    assert counted["How many circles are there?"] == "There are 2 circles."
    assert counted["How many stars are there?"] == "There is 1 star."
    assert scenes.describe(rng, scene)[1] == "Two red circles and a blue star."
    chart = scenes.Scene("chart", bars=(("red", 3), ("blue", 7)))
    said = dict(filter(None, (scenes.tallest(rng, chart) for _ in range(99))))
    assert said["Which bar is the tallest?"] == "The blue bar."
    assert said["Which bar is the lowest?"] == "The red bar."
    assert ("How high is the blue bar?", "The blue bar is 7 high.") in {scenes.height(rng, chart) for _ in range(99)}


def regions(mask: np.ndarray) -> int:
    """Connected regions of a mask, by filling one after the other."""
    left = mask.copy()
    count = 0
    while left.any():
        count += 1
        row, column = map(int, np.argwhere(left)[0])
        edge = [(row, column)]
        while edge:
            y, x = edge.pop()
            if 0 <= y < left.shape[0] and 0 <= x < left.shape[1] and left[y, x]:
                left[y, x] = False
                edge += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return count


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_a_picture_shows_as_many_shapes_apart_as_its_scene(count: int) -> None:
    rng = random.Random(count)
    scene = scenes.Scene("shapes", (("circle", "blue"),) * count)
    pixels = np.asarray(drawing.draw(rng, scene, (96, 96))).astype(int)
    assert regions(pixels[..., 2] - pixels[..., 0] > 100) == count


def test_bars_are_as_high_as_the_scene_says() -> None:
    rng = random.Random(4)
    scene = scenes.Scene("chart", bars=(("red", 2), ("blue", 8)))
    pixels = np.asarray(drawing.draw(rng, scene, (200, 200))).astype(int)
    red = (pixels[..., 0] - pixels[..., 2] > 100).any(1).sum()
    blue = (pixels[..., 2] - pixels[..., 0] > 100).any(1).sum()
    assert blue / red == pytest.approx(4, rel=0.12)


def test_pictures_are_the_generators_and_of_the_towers_side() -> None:
    scene = scenes.Scene("number", number="407")
    first, same, other = (drawing.draw(random.Random(seed), scene) for seed in (5, 5, 6))
    assert isinstance(first, Image.Image)
    assert first.tobytes() == same.tobytes()
    assert first.tobytes() != other.tobytes()
    assert drawing.pixels(first, rows.SIDE).shape == (rows.SIDE, rows.SIDE, 3)


def test_rows_hold_one_picture_and_the_answers_that_are_learned() -> None:
    pixels, ids, weights, labels = next(rows.chunks(7, 12))
    tok = rows.tokenizer()
    assert pixels.shape == (12, rows.SIDE, rows.SIDE, 3)
    assert labels.shape == (12, len(scenes.Scene("number", number="1").labels()))
    assert ((ids == rows.IMAGE_TOKEN).sum(1) == rows.NUM_TOKENS).all()
    for own, learned in zip(ids, weights, strict=True):
        answers = tok.decode(own[learned == 1].tolist(), skip_special_tokens=False)
        assert answers.endswith("<|im_end|>")
        assert "user" not in answers
        assert not (learned[own == rows.IMAGE_TOKEN]).any()


def test_a_text_cannot_bring_the_pictures_token() -> None:
    tok = rows.tokenizer()
    texts = ("ÿ", "\u00ff\u00fe", "<image>", "".join(map(chr, range(0x21, 0x3FF))))
    assert all(rows.IMAGE_TOKEN not in tok.encode(text, add_special_tokens=False).ids for text in texts)


def test_conversations_are_written_as_the_template_writes_them() -> None:
    tok, rng = rows.tokenizer(), random.Random(8)
    for _ in range(40):
        turns = rows.conversation(rng, scenes.scene(rng, held_out=False))
        assert Counter("\n".join(turn["content"] for turn in turns).split("\n"))["<image>"] == 1
        ids, weights = rows.encode(tok, template.pieces(turns))
        assert len(ids) == len(weights)
        assert sum(weights) > 0


def test_a_description_may_name_what_there_is_in_any_order() -> None:
    expected = "Two red circles, a blue star and a pink square."
    assert evaluate.is_right("A blue star, a pink square and two red circles.", expected)
    assert evaluate.is_right(expected, expected)
    assert not evaluate.is_right("Two red circles and a blue star.", expected)
    assert not evaluate.is_right("Two red circles, a blue star and a red square.", expected)
    assert not evaluate.is_right("A bar chart with 2 bars: red 3, blue 4.", "A bar chart with 2 bars: blue 4, red 3.")
