"""What users say: short questions, long texts with a fact to find, system prompts that many users share.

Texts are drawn from a small list of words, so that two long prompts share no prefix; only `shared_prefix` gives every
user, in every process, the same few long beginnings.
"""

from __future__ import annotations

import random

NUM_SHARED_PREFIXES = 4
NAMES = ("Ada", "Ben", "Clara", "Dan", "Eva", "Finn", "Grace", "Hugo", "Ida", "Jack", "Kira", "Leo", "Mia", "Noah")
COLORS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "pink")
THINGS = ("boat", "house", "door", "book", "car", "chair", "hat", "lamp", "garden", "bridge", "river", "table")
VERBS = ("sees", "likes", "finds", "paints", "buys", "sells", "needs", "moves", "cleans", "builds")


def question(rng: random.Random) -> str:
    """A short question whose answer may be short or, now and then, long."""
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return rng.choice(
        (
            f"What is {a} + {b}?",
            f"Count from {a} to {a + 20}.",
            f"Spell the word {rng.choice(THINGS)}.",
            f"Sort these numbers: {b}, {a}, {a + b}, {a * b}.",
            f"Tell me a story about {rng.choice(NAMES)}.",
        )
    )


def sentences(rng: random.Random, num_words: int) -> str:
    """At least `num_words` words of simple sentences."""
    return " ".join(
        f"{rng.choice(NAMES)} {rng.choice(VERBS)} the {rng.choice(COLORS)} {rng.choice(THINGS)}."
        for _ in range(-(-num_words // 5))
    )


def long_prompt(rng: random.Random, num_words: int) -> str:
    """A text with one fact in the middle, and a question about the fact."""
    name, code = rng.choice(NAMES), rng.randint(1000, 9999)
    before, after = sentences(rng, num_words // 2), sentences(rng, num_words // 2)
    return f"{before} The code of {name} is {code}. {after}\n\nWhat is the code of {name}?"


def shared_prefix(index: int, num_words: int) -> str:
    """System prompt `index` of the NUM_SHARED_PREFIXES: the same text for the same arguments, everywhere."""
    rng = random.Random(index)
    return f"You are assistant {index} of the library. Know this: {sentences(rng, num_words)} Answer briefly."
