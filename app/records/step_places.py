"""Places that captured steps with prompts have for rows that decode, and rows of steps that products like: what steps
are captured for (worker/graphs/prompt_step.py) the scheduler plans."""

from __future__ import annotations

DECODE_PLACES = (16, 48, 96, 128)
FULL_PLACES = (24, 32, 40, 64)  # of steps that fill rounds, where each place that is left is a prompt's
ROUND = 256  # rows: on an H200 products of 768 and of 1,024 take the least time a row, as all multiprocessors are busy
FEWEST_ROUNDS = 3  # of a step that is planned by them


def decode_places(num_decodes: int) -> int:
    """Places of a step that fills rounds, with so many rows that decode: with more than any captured one has, as many
    as they are."""
    return min((places for places in (*DECODE_PLACES, *FULL_PLACES) if places >= num_decodes), default=num_decodes)
