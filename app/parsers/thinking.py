"""What `thinking_token_budget` means for a prompt of a model: the markers of its reasoning, as tokens."""

from __future__ import annotations

from app.api.engine_client import ServedModel
from app.api.parsers.answer import PROMPT_END_TOKENS, load_reasoning_parser
from app.api.parsers.base import ReasoningParser
from app.engine.sampling_params import SamplingParams
from app.engine.thinking_budget import ThinkingBudget
from app.errors import UnsupportedError
from app.text.tokenizer import Tokenizer

FIELD = "thinking_token_budget"


def served_budget(
    model: ServedModel,
    prompt_token_ids: list[int],
    params: SamplingParams,
    field: str = FIELD,
    inside: bool | None = None,
) -> ThinkingBudget | None:
    """`thinking_budget` of a prompt of a served model."""
    if params.thinking_token_budget is None:
        return None
    return thinking_budget(model.tokenizer, load_reasoning_parser(model), prompt_token_ids, params, field, inside)


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
