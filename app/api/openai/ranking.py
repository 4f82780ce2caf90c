"""`best_of`: of more choices than are shown, the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from app.api.generation.events import Collected


def best_choices(collected: Sequence[Collected], n: int) -> list[Collected]:
    """The `n` most likely choices of each prompt, best first and numbered anew; all must have logprobs.

    Likely is, as OpenAI says of `best_of`, the highest log probability per token.
    """
    best: list[Collected] = []
    for _, entries in groupby(collected, key=lambda entry: entry.choice.prompt_index):
        best += sorted(entries, key=_logprob_per_token, reverse=True)[:n]
    for index, entry in enumerate(best):
        entry.output.index = index
    return best


def _logprob_per_token(entry: Collected) -> float:
    output = entry.output
    return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))
