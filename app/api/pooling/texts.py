"""Texts to prompts: how many tokens of each a model takes, and the prompts and marks around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from app.api.http.work_pool import TOKENISE_S_PER_CHAR, RequestWork
from app.api.pooling.protocol import PoolingBody
from app.errors import UnsupportedError
from app.records.late_interaction import LateInteraction, Role
from app.records.pooling_info import PoolingInfo
from app.text.late_prompts import late_prompts
from app.text.pair_template import PairTemplate
from app.text.pooling_prompt import PoolingPrompt, TextPair, pooling_prompts, templated_prompts, without_prompt
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer


def pooling_of(model: ServedModel) -> PoolingInfo:
    """Returns how the model pools; UnsupportedError when it generates text instead."""
    if model.pooling is None:
        raise UnsupportedError(
            f"the model {model.name!r} generates text and gives no embeddings or scores; a model for them is served "
            "with `runner: pooling`",
            param="model",
        )
    return model.pooling


def pooled_room(body: PoolingBody, model: ServedModel, field: str) -> TextRoom:
    """The tokens that a prompt is cut to, at its end, or above which it is refused."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return TextRoom(model.bounds.max_total_tokens, field=field)
    return TextRoom(model.max_model_len if wanted == -1 else min(wanted, model.max_model_len), "first", field=field)


async def tokenise(
    work: RequestWork,
    model: ServedModel,
    pairs: Sequence[TextPair],
    room: TextRoom,
    last_limit: int | None = None,
    template: PairTemplate | None = None,
) -> list[PoolingPrompt]:
    """`pooling_prompts` of what `room` takes of each text, or `templated_prompts`, without blocking the event loop."""
    distinct = {text for pair in pairs for text in pair if text is not None}
    room.check(model.tokenizer, max(map(len, distinct), default=0))
    cost_s = TOKENISE_S_PER_CHAR * sum(map(len, distinct))
    return await work.run(cost_s, _fit_and_tokenise, model.tokenizer, pairs, room, last_limit, template)


def _fit_and_tokenise(
    tokenizer: Tokenizer,
    pairs: Sequence[TextPair],
    room: TextRoom,
    last_limit: int | None,
    template: PairTemplate | None,
) -> list[PoolingPrompt]:
    fitting = {text: room.fit(tokenizer, text) for pair in pairs for text in pair if text is not None}
    kept = [(fitting[first], None if second is None else fitting[second]) for first, second in pairs]
    limit = None if room.keeps == "all" else room.num_tokens
    keeps_end = room.keeps == "last"
    if template is not None:
        return templated_prompts(tokenizer, template, kept, limit, last_limit, keeps_end=keeps_end)
    return pooling_prompts(tokenizer, kept, limit, last_limit, keeps_end=keeps_end)


async def tokenise_late(
    work: RequestWork,
    model: ServedModel,
    late: LateInteraction,
    texts: Sequence[str],
    room: TextRoom,
    role: Role,
    max_text_tokens: int | None = None,
) -> list[PoolingPrompt]:
    """`late_prompts` of what `room` and the model's own lengths take of each text."""
    own = late.limit(role)
    if own is not None:
        room = replace(room, num_tokens=min(own, room.num_tokens), keeps="first")
    cost_s = TOKENISE_S_PER_CHAR * sum(map(len, texts))
    return await work.run(cost_s, _fit_late, model.tokenizer, late, texts, room, role, max_text_tokens)


def _fit_late(
    tokenizer: Tokenizer,
    late: LateInteraction,
    texts: Sequence[str],
    room: TextRoom,
    role: Role,
    max_text_tokens: int | None,
) -> list[PoolingPrompt]:
    fitting = [room.fit(tokenizer, text) for text in texts]
    limit = None if room.keeps == "all" else room.num_tokens
    return late_prompts(tokenizer, late, fitting, role, limit, max_text_tokens)


def prompted(
    model: ServedModel, prompt: str, made: list[PoolingPrompt], field: str, *, is_bare: bool = False
) -> list[PoolingPrompt]:
    """Prompts of texts that begin with a prompt, of which a model may skip the tokens."""
    if not pooling_of(model).skips_prompt:
        return made
    return without_prompt(model.tokenizer, prompt, made, field, is_bare=is_bare)
