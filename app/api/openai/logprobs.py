"""Log-probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from app.api.generation.events import Collected
from app.api.http.json_response import written
from app.api.http.work_pool import WRITE_S_PER_LOGPROB
from app.records.step import TokenLogprobs
from app.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # JSON has no infinity


def writing_cost_s(collected: Iterable[Collected]) -> float:
    """Estimate of the time that writing the logprobs of an answer takes, for a WorkPool."""
    return sum(
        entries_cost_s(entries)
        for one in collected
        for entries in (one.output.logprobs or (), one.prompt_logprobs or ())
    )


def entries_cost_s(entries: Sequence[TokenLogprobs | None]) -> float:
    """The same for the logprobs of some tokens."""
    width = max((len(entry.token_ids) for entry in entries[:2] if entry is not None), default=0)
    return WRITE_S_PER_LOGPROB * len(entries) * width


class TokenNames(Protocol):
    """Names tokens; a Tokenizer calls them by their text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...


class TokenIdNames:
    """Calls tokens `token_id:5`, as vLLM does for `return_tokens_as_token_ids`: no two have one name."""

    def token_bytes(self, token_id: int) -> bytes:
        """The name, in ASCII."""
        return b"token_id:%d" % token_id


def token_names(tokenizer: Tokenizer, as_ids: bool) -> TokenNames:
    """Returns what names the tokens in logprobs."""
    return TokenIdNames() if as_ids else tokenizer


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: TokenNames) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: content[{token, logprob, bytes, top_logprobs}]."""
    return {"content": [chat_position(entry, tokenizer) for entry in entries], "refusal": None}


def written_chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: TokenNames) -> dict[str, Any]:
    """The same, for `json_response`: each position is JSON already."""
    return {"content": [written(chat_position(entry, tokenizer)) for entry in entries], "refusal": None}


class DescribedTokens(Protocol):
    """Tokens with what is known of each: a whole choice, or a piece of its stream."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        ...

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One per token, where asked for."""
        ...


def chat_token_fields(
    tokens: DescribedTokens, names: TokenNames, *, logprobs: bool, token_ids: bool, is_whole: bool
) -> dict[str, Any]:
    """Returns what `choices[]` of a chat says of its tokens, of what the client wants; a piece without any says
    nothing. The whole is for `json_response`."""
    fields: dict[str, Any] = {}
    if logprobs and (tokens.logprobs or is_whole):
        write = written_chat_logprobs if is_whole else chat_logprobs
        fields["logprobs"] = write(tokens.logprobs or (), names)
    if token_ids and (tokens.token_ids or is_whole):
        fields["token_ids"] = tokens.token_ids
    return fields


def chat_position(entry: TokenLogprobs, tokenizer: TokenNames) -> dict[str, Any]:
    """One position of `content`."""
    tokens = [_chat_token(token_id, value, tokenizer) for token_id, value in _pairs(entry)]
    return {**tokens[0], "top_logprobs": tokens[1:]}


def _chat_token(token_id: int, logprob: float, tokenizer: TokenNames) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def completion_logprobs(
    entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offsets: Sequence[int], tokenizer: TokenNames
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: one list each, null where a prompt's first token has none."""
    return {
        "tokens": [_completion_token(token_id, tokenizer) for token_id in token_ids],
        "token_logprobs": [None if entry is None else max(entry.logprobs[0], _FLOOR) for entry in entries],
        "top_logprobs": [None if entry is None else _top(entry, tokenizer) for entry in entries],
        "text_offset": list(offsets),
    }


def _top(entry: TokenLogprobs, tokenizer: TokenNames) -> dict[str, float]:
    """Most likely tokens first; the chosen one is always among them."""
    pairs = _pairs(entry)
    top: dict[str, float] = {}
    for token_id, value in (*pairs[1:], pairs[0]):
        top.setdefault(_completion_token(token_id, tokenizer), value)
    return top


def _completion_token(token_id: int, tokenizer: TokenNames) -> str:
    """The token's text; a part of a character is written by its bytes, so that two parts stay two keys."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> list[msgspec.Raw | None]:
    """`prompt_logprobs` as vLLM writes it: per position, token id -> {logprob, rank, decoded_token}.

    For `json_response`: each position is JSON already.
    """
    return [None if entry is None else written(_by_token_id(entry, tokenizer)) for entry in entries]


def _by_token_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for (token_id, value), rank in zip(_pairs(entry), entry.ranks, strict=True):
        described = {"logprob": value, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        found.setdefault(str(token_id), described)
    return found


def _pairs(entry: TokenLogprobs) -> list[tuple[int, float]]:
    return [(token_id, max(value, _FLOOR)) for token_id, value in zip(entry.token_ids, entry.logprobs, strict=True)]
