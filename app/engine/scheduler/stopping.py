"""When a request ends by its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

from app.records.outputs import FinishReason
from app.records.request_state import Request


@dataclass(slots=True, frozen=True)
class Appended:
    """Says what became of the tokens that a step brought a request."""

    num_tokens: int  # that it took; the others are past its end
    stop: tuple[FinishReason, int | None] | None  # finish reason and stop reason, if they end it
    ends_grammar: bool


def append_tokens(request: Request, tokens: list[int]) -> Appended:
    """Append the tokens up to the one that ends the request. Raises GrammarFailure."""
    for count, token in enumerate(tokens, start=1):
        request.token_ids.append(token)
        stop, ends_grammar = check_stop(request), grammar_ends(request)
        if stop is not None or ends_grammar:
            return Appended(count, stop, ends_grammar)
    return Appended(len(tokens), None, False)


def check_stop(request: Request) -> tuple[FinishReason, int | None] | None:
    """(finish reason, stop reason) if the latest token ends the request, else None.

    Stop tokens count from `min_tokens` on; the model's own end token leaves the stop reason empty. The length limit
    covers max_tokens and the context.
    """
    params = request.spec.sampling
    token = request.token_ids[-1]
    if request.num_output_tokens >= params.min_tokens:
        if not params.ignore_eos and token in request.eos_token_ids:
            return "stop", None
        if token in request.stop_token_ids:
            return "stop", token
    if request.num_tokens >= request.max_total_tokens:
        return "length", None
    return None


def grammar_ends(request: Request) -> bool:
    """Take the latest token into the request's grammar; whether nothing can follow it.

    Such an end needs no end token, so `min_tokens` and `ignore_eos` cannot ask for what the grammar forbids. Raises
    GrammarFailure when the token cannot follow those before it. An end token is asked about too: where a mask failed,
    or left nothing to choose from, one may come that ends an answer which does not match.
    """
    if request.matcher is None:
        return False
    request.matcher.accept(request.token_ids[-1])
    return request.matcher.is_complete
