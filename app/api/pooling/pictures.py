"""Prompts that show pictures: pages alone, and pairs of which either side may have one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from app.api.chat.media import read_apart
from app.api.chat.media_parts import ImagePart
from app.api.http.work_pool import TOKENISE_S_PER_CHAR, RequestWork
from app.api.pooling.protocol import ScoredText
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.media.picture import Picture
from app.media.reader import in_field
from app.records.late_interaction import LateInteraction
from app.text.late_prompts import picture_prompt
from app.text.pair_prompt import SeenText, seen_pair
from app.text.pair_template import PairTemplate
from app.text.pooling_prompt import PoolingPrompt
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

TOKEN_BYTES = 8  # in a prompt's list
SHOW_S_PER_TOKEN = 3e-8  # of a core, to write a picture's token into a prompt


async def read_pages(
    work: RequestWork,
    model: ServedModel,
    late: LateInteraction,
    parts: Sequence[ImagePart],
    limits: RequestLimits,
    room: TextRoom,
) -> list[PoolingPrompt]:
    """The prompts of pages, each a picture alone, in their order."""
    if not parts:
        return []
    refuse_cut(room)
    fields = [part.field("") for part in parts]
    found = await read_apart(work, model, list(zip(fields, parts, strict=True)), limits, room)
    cost_s = SHOW_S_PER_TOKEN * sum(picture.layout.num_tokens for picture in found)
    return await work.run(cost_s, _pages, model, late, found, fields)


def _pages(
    model: ServedModel, late: LateInteraction, shown: Sequence[Picture], fields: Sequence[str]
) -> list[PoolingPrompt]:
    assert model.media is not None
    prompts = []
    for picture, field in zip(shown, fields, strict=True):
        ids, asks = picture_prompt(model.tokenizer, late, model.media, [picture], "", field)
        prompts.append(PoolingPrompt(ids, asks=asks))
    return prompts


async def read_pairs(
    work: RequestWork,
    model: ServedModel,
    template: PairTemplate | None,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    limits: RequestLimits,
    room: TextRoom,
) -> list[PoolingPrompt]:
    """The prompts of pairs with pictures, each of which is read once."""
    refuse_cut(room)
    parts = {one.image.url: one.image for pair in pairs for one in pair if one.image is not None}
    asked = [(part.field(""), part) for part in parts.values()]
    found = await read_apart(work, model, asked, limits, room)
    shown = {url: [picture] for url, picture in zip(parts, found, strict=True)}
    assert model.media is not None
    room.check(model.tokenizer, max(len(first.text) + len(second.text) for first, second in pairs))
    _check_values(pairs, shown, model.media.reader.config.max_prompt_bytes)
    num_tokens = _hold_tokens(work, pairs, parts, shown)
    around = 0 if template is None else len(template.text("", ""))
    num_chars = sum(around + len(first.text) + len(second.text) for first, second in pairs)
    cost_s = TOKENISE_S_PER_CHAR * num_chars + SHOW_S_PER_TOKEN * num_tokens
    return await work.run(cost_s, _seen_pairs, model, template, pairs, shown, room)


def _check_values(
    pairs: Sequence[tuple[ScoredText, ScoredText]], shown: Mapping[str, Sequence[Picture]], most: int
) -> None:
    """InvalidRequestError names a picture that is too much beside the other one of its pair: both are one prompt's."""
    for pair in pairs:
        images = [one.image for one in pair if one.image is not None]
        num_bytes = sum(len(picture.pixels) for image in images for picture in shown[image.url])
        if num_bytes > most:
            field = images[-1].field("")
            what = f"has {num_bytes} bytes of pixels with the query's; a prompt may have {most}: send smaller ones"
            raise InvalidRequestError(f"{field}: {what}", param=field)


def _hold_tokens(
    work: RequestWork,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    parts: Mapping[str, ImagePart],
    shown: Mapping[str, Sequence[Picture]],
) -> int:
    """Tokens of pictures in all prompts, which hold them as often as pairs show them; see Holding.add_picture."""
    uses = Counter(one.image.url for pair in pairs for one in pair if one.image is not None)
    found = 0
    for url, part in parts.items():
        num_tokens = uses[url] * sum(picture.layout.num_tokens for picture in shown[url])
        with in_field(part.field("")):
            work.holding.add_picture(TOKEN_BYTES * num_tokens)
        found += num_tokens
    return found


def _seen_pairs(
    model: ServedModel,
    template: PairTemplate | None,
    pairs: Sequence[tuple[ScoredText, ScoredText]],
    shown: Mapping[str, Sequence[Picture]],
    room: TextRoom,
) -> list[PoolingPrompt]:
    assert model.media is not None
    sides = [
        tuple(SeenText(one.text, () if one.image is None else shown[one.image.url]) for one in pair) for pair in pairs
    ]
    return [seen_pair(model.tokenizer, template, model.media, (first, second), room) for first, second in sides]


def refuse_cut(room: TextRoom) -> None:
    """InvalidRequestError where prompts are to be cut: a picture is not."""
    if room.keeps != "all":
        raise InvalidRequestError("a picture is not cut", param="truncate_prompt_tokens")
