"""Places that captured steps with prompts have for rows that decode, and rows of steps that products like: what steps
are captured for (worker/graphs/prompt_step.py) the scheduler plans."""

from __future__ import annotations

DECODE_PLACES = (16, 48, 96, 128)
ROUND = 256  # rows: on an H200 products of 768 and of 1,024 take the least time a row, as all multiprocessors are busy


def decode_places(num_decodes: int) -> int:
    """Places of a step with so many rows that decode: with more than any captured one has, as many as they are."""
    return next((places for places in DECODE_PLACES if places >= num_decodes), num_decodes)
