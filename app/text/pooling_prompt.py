"""Texts and pairs of texts as a pooling model reads them: special tokens around them, cut where they are too long."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.errors import InvalidRequestError
from app.records.step import Float32Array
from app.text.pair_template import PairTemplate
from app.text.tokenizer import Tokenizer

TextPair = tuple[str, str | None]


@dataclass(slots=True, frozen=True)
class PoolingPrompt:
    """Token ids, and where the second text of a pair begins for models that mark it."""

    token_ids: list[int]
    second_text_at: int | None = None
    asks: tuple[object, ...] = ()  # what it brings for features of the worker, as in EngineRequest
    kept: tuple[bool, ...] | None = None  # of the vectors of its tokens; None: all
    num_skipped: int = 0  # of its first tokens, which count for nothing in a mean

    def counted(self, vectors: Float32Array) -> Float32Array:
        """Leaves out the vectors of tokens that do not count, [T, E] -> [K, E]."""
        return vectors if self.kept is None else vectors[list(self.kept)]


def without_prompt(
    tokenizer: Tokenizer, prompt: str, made: Sequence[PoolingPrompt], field: str, *, is_bare: bool = False
) -> list[PoolingPrompt]:
    """Prompts of texts that begin with this one, whose tokens count for nothing: as many as it has by itself, less one
    that ends texts. InvalidRequestError, which names the texts' `field`, where no token would count."""
    ids = tokenizer.encode(prompt, add_special_tokens=not is_bare) if prompt else []
    count = len(ids) - (not is_bare and bool(ids) and ids[-1] in tokenizer.special_token_ids)
    if count and any(len(one.token_ids) <= count for one in made):
        what = f"a text has no token behind the {count} of its prompt, which count for nothing, or is cut before"
        raise InvalidRequestError(what, param=field)
    return [replace(one, num_skipped=count) for one in made] if count else list(made)


def pooling_prompts(
    tokenizer: Tokenizer,
    pairs: Sequence[TextPair],
    max_tokens: int | None = None,
    max_last_tokens: int | None = None,
    *,
    keeps_end: bool = False,
    is_bare: bool = False,
) -> list[PoolingPrompt]:
    """One prompt for each text, or pair of texts, in order; of texts that are `is_bare`, without special tokens.

    A prompt of more than `max_tokens` loses the ends of its texts, of the longer one first, and keeps its special
    tokens, as transformers does it; with `keeps_end`, their beginnings. `max_last_tokens` bounds the last text of each
    alone. InvalidRequestError when
    nothing of the texts would be left.
    """
    distinct = list(dict.fromkeys(text for pair in pairs for text in pair if text is not None))
    plain = dict(zip(distinct, tokenizer.encode_plain(distinct), strict=True))
    prompts = []
    for first, second in pairs:
        parts = [plain[first]] if second is None else [plain[first], plain[second]]
        if max_last_tokens is not None:
            parts[-1] = _cut(parts[-1], max_last_tokens)
        if max_tokens is not None:
            special = 0 if is_bare else tokenizer.num_special_tokens(len(parts) == 2)
            parts = _fit(parts, max_tokens - special, keeps_end)
        if is_bare:
            prompts.append(PoolingPrompt([token for part in parts for token in part.ids]))
            continue
        joined = tokenizer.join(*parts)
        types: list[int] = joined.type_ids
        prompts.append(PoolingPrompt(joined.ids, types.index(1) if 1 in types else None))
    return prompts


def templated_prompts(
    tokenizer: Tokenizer,
    template: PairTemplate,
    pairs: Sequence[TextPair],
    max_tokens: int | None = None,
    max_last_tokens: int | None = None,
    *,
    keeps_end: bool = False,
) -> list[PoolingPrompt]:
    """`pooling_prompts` of pairs within a template, which is never cut."""
    prompts: list[PoolingPrompt] = []
    for first, second in pairs:
        if second is None or template.holds(first):
            prompts += pooling_prompts(tokenizer, [(first, second)], max_tokens, max_last_tokens, keeps_end=keeps_end)
            continue
        if max_last_tokens is not None:
            second = cut_text(tokenizer, second, max_last_tokens)
        ids = _templated(tokenizer, template, first, second)
        if max_tokens is not None and len(ids) > max_tokens:
            ids = _fitted(tokenizer, template, (first, second), max_tokens, keeps_end)
        prompts.append(PoolingPrompt(ids))
    return prompts


def _templated(tokenizer: Tokenizer, template: PairTemplate, query: str, document: str) -> list[int]:
    return [*tokenizer.encode(template.text(query, document), add_special_tokens=False), *template.ends]


def cut_text(tokenizer: Tokenizer, text: str, max_tokens: int) -> str:
    """The first tokens of a text as a text."""
    (whole,) = tokenizer.encode_plain([text])
    return _text_of(tokenizer, whole, _cut(whole, max_tokens), text)


def _fitted(
    tokenizer: Tokenizer, template: PairTemplate, pair: tuple[str, str], max_tokens: int, keeps_end: bool
) -> list[int]:
    """At most `max_tokens` tokens of a pair within its template. A text that is cut may have more tokens beside the
    template than by itself: then it is cut further."""
    plain, room = tokenizer.encode_plain(pair), max_tokens - template.num_tokens(tokenizer)
    while True:
        parts = _fit(plain, room, keeps_end)
        texts = [_text_of(tokenizer, *three) for three in zip(plain, parts, pair, strict=True)]
        ids = _templated(tokenizer, template, *texts)
        if len(ids) <= max_tokens:
            return ids
        room -= len(ids) - max_tokens


def _text_of(tokenizer: Tokenizer, whole: Any, part: Any, text: str) -> str:
    """The text of a part of `text`, whose encoding is `whole`: without halves of characters at its ends, and a space
    that only decoding puts before it."""
    if part is whole:
        return text
    found = tokenizer.decode(part.ids, skip_special_tokens=False).strip("\ufffd")
    return found if found in text else found.removeprefix(" ")


def _fit(parts: list[Any], room: int, keeps_end: bool) -> list[Any]:
    """Cut so that all parts together have at most `room` tokens: the longer one down to the shorter, then both."""
    lengths = [len(part.ids) for part in parts]
    if sum(lengths) <= room:
        return parts
    if room < len(parts):
        raise InvalidRequestError("leaves no room for text beside the special tokens", param="truncate_prompt_tokens")
    if len(parts) == 1:
        return [_cut(parts[0], room, keeps_end)]
    shorter = min(lengths)
    each = (room - shorter, shorter) if room - shorter >= shorter else (room - room // 2, room // 2)
    first_is_longer = lengths[0] > lengths[1]
    limits = each if first_is_longer else each[::-1]
    return [_cut(part, limit, keeps_end) for part, limit in zip(parts, limits, strict=True)]


def _cut(encoding: Any, limit: int, keeps_end: bool = False) -> Any:
    """The first `limit` tokens, or the last; the encoding itself is shared and stays whole."""
    if len(encoding.ids) <= limit:
        return encoding
    cut = copy.deepcopy(encoding)
    cut.truncate(limit, direction="left" if keeps_end else "right")
    return cut
