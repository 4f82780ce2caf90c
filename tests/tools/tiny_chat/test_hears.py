"""Lessons of `tiny-chat-hears`: none says what is held out, and features are those that a server makes."""

from __future__ import annotations

import random

import numpy as np
import torch

from app.media.audio.mel import MelFeatures
from tools.tiny_chat.hears import lessons, phrases
from tools.tiny_chat.hears.model import END, TIMES, build, token, tokenizer
from tools.tiny_chat.hears.train import wrong_words
from tools.tiny_chat.words import held


def test_held_out_phrases_are_never_lessons() -> None:
    rng = random.Random(1)
    for family in phrases.FAMILIES:
        assert not any(held(phrases.phrase(rng, family)) for _ in range(200))
        assert all(held(phrases.phrase(rng, family, is_held=True)) for _ in range(20))


def test_words_are_tokens_of_their_own() -> None:
    text = "turn off the radio in the kitchen"
    assert len(lessons.words(text)) == 7
    assert max(lessons.words(text)) < token(END) < token(TIMES[0])
    assert tokenizer().decode(lessons.words(text)).strip() == text


def test_features_are_those_of_a_server() -> None:
    window = np.rint(np.random.default_rng(0).normal(0, 3_000, lessons.COUNT)).astype(np.int16)
    found = lessons.Ears("cpu")(torch.from_numpy(window)[None])[0].numpy()
    expected = MelFeatures(lessons.MEL).of(window.astype(np.float32) / 32_768)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_it_is_small() -> None:
    assert sum(weight.numel() for weight in build().parameters()) < 1_000_000


def test_wrong_words() -> None:
    assert wrong_words("one two three", "one two three") == 0
    assert wrong_words("one two three", "one three three four") == 2
    assert wrong_words("one two", "") == 2
