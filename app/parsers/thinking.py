"""Works out what `thinking_token_budget` means for a prompt of a model: the markers of its reasoning, as tokens."""

from __future__ import annotations

from app.errors import UnsupportedError
from app.parsers.answer import PROMPT_END_TOKENS
from app.parsers.base import ReasoningParser
from app.records.sampling_params import SamplingParams
from app.records.thinking_budget import ThinkingBudget
from app.text.tokenizer import Tokenizer

FIELD = "thinking_token_budget"


def thinking_budget(
    tokenizer: Tokenizer,
    parser: type[ReasoningParser] | None,
    prompt_token_ids: list[int],
    params: SamplingParams,
    field: str = FIELD,
    inside: bool | None = None,
) -> ThinkingBudget | None:
    """The budget of a request with this prompt; None where it has none (-1 means that too).

    `inside` says whether the answer begins inside the reasoning; where it is None the prompt's end tells.
    UnsupportedError names `field` when the model's reasoning cannot be told.
    """
    num_tokens = params.thinking_token_budget
    if num_tokens is None or num_tokens < 0:
        return None
    if parser is None:
        raise UnsupportedError("this model is not known to think", param=field)
    opening, closing = (
        tuple(tokenizer.encode(marker, add_special_tokens=False)) for marker in parser.reasoning_markers()
    )
    if inside is None:
        end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        inside = parser.starts_inside(end, None)
    return ThinkingBudget(num_tokens, () if inside else opening, closing)
