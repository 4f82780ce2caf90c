"""Texts as a model reads them that compares them vector by vector: marked, cut, and queries lengthened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.errors import ConfigError, InvalidRequestError, UnsupportedError
from app.media.picture import Picture
from app.records.late_interaction import ExpandedQuery, LateInteraction, Role
from app.records.media import MediaAsk
from app.text.model_media import ModelMedia
from app.text.placeholders import with_media
from app.text.pooling_prompt import PoolingPrompt, pooling_prompts
from app.text.tokenizer import Tokenizer


def late_prompts(
    tokenizer: Tokenizer,
    late: LateInteraction,
    texts: Sequence[str],
    role: Role,
    limit: int | None = None,
    max_text_tokens: int | None = None,
) -> list[PoolingPrompt]:
    """One prompt for each text, in order, of at most `limit` tokens, and of as many as the model says. The text alone
    has at most `max_text_tokens`; InvalidRequestError as in `pooling_prompts`."""
    mark_id, before = _mark(tokenizer, late.mark(role))
    own = late.limit(role)
    most = min((one for one in (own, limit) if one is not None), default=None)
    end = tokenizer.encode(late.query_end, add_special_tokens=False) if role == "query" and late.query_end else []
    room = None if most is None else most - len(end) - (mark_id is not None)
    pairs = [(before + text, None) for text in texts]
    made = pooling_prompts(tokenizer, pairs, room, max_text_tokens, is_bare=late.is_bare)
    if mark_id is not None:
        made = [replace(one, token_ids=_marked(tokenizer, one.token_ids, mark_id)) for one in made]
    if end:
        made = [replace(one, token_ids=one.token_ids + end) for one in made]
    if role == "query" and late.expansion is not None:
        made = [_expanded(tokenizer, late, one) for one in made]
    skipped = _ids(tokenizer, late.skipped) if role in late.skips_in else frozenset()
    return [replace(one, kept=tuple(token not in skipped for token in one.token_ids)) for one in made]


def picture_prompt(
    tokenizer: Tokenizer, late: LateInteraction, media: ModelMedia, shown: Sequence[Picture], text: str, field: str
) -> tuple[list[int], tuple[MediaAsk, ...]]:
    """The prompt of a page's picture; InvalidRequestError where there is more than that, or a model that takes none."""
    if not late.picture:
        raise UnsupportedError(f"{field}: this model compares texts; it takes no pictures", param=field)
    if len(shown) != 1 or text:
        what = f"{len(shown)} pictures beside {len(text)} characters of text"
        raise InvalidRequestError(f"{field}: a prompt of this model is a text or a picture, not {what}", param=field)
    ids = tokenizer.encode(late.picture, add_special_tokens=False)
    return with_media(media, ids, shown, field)


def _mark(tokenizer: Tokenizer, mark: str) -> tuple[int | None, str]:
    """The token that a mark is, and what of it is text: the vocabulary has all of it, its first word, or neither."""
    words = mark.split(None, 1)
    for token in (mark, words[0]) if words else ():
        if (index := tokenizer.token_to_id(token)) is not None:
            return index, mark.removeprefix(token)
    return None, mark


def _marked(tokenizer: Tokenizer, token_ids: list[int], mark: int) -> list[int]:
    """The mark stands before the text, behind what the tokenizer begins with."""
    at = 1 if token_ids and token_ids[0] in tokenizer.special_token_ids else 0
    return [*token_ids[:at], mark, *token_ids[at:]]


def _expanded(tokenizer: Tokenizer, late: LateInteraction, prompt: PoolingPrompt) -> PoolingPrompt:
    expansion, count = late.expansion, len(prompt.token_ids)
    assert expansion is not None
    if count >= expansion.length:
        return prompt
    token_ids = [*prompt.token_ids, *[_filler(tokenizer, expansion.token)] * (expansion.length - count)]
    return replace(prompt, token_ids=token_ids, asks=() if expansion.is_seen else (ExpandedQuery(count),))


def _filler(tokenizer: Tokenizer, named: str | None) -> int:
    names = (tokenizer.special_tokens.get(name) for name in ("mask_token", "eos_token"))
    for token in (named,) if named is not None else names:
        index = None if token is None else tokenizer.token_to_id(token)
        if index is not None:
            return index
    raise ConfigError("the model lengthens queries by a token that its tokenizer lacks", param="tokenizer")


def _ids(tokenizer: Tokenizer, words: Sequence[str]) -> frozenset[int]:
    found = (tokenizer.token_to_id(word) for word in words)
    return frozenset(index for index in found if index is not None)
