"""Pairs of texts with pictures as a language model is asked about them, within their template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from app.errors import UnsupportedError
from app.media.picture import Picture
from app.text.model_media import ModelMedia
from app.text.pair_template import PairTemplate
from app.text.placeholders import Placeholders, encode_pieces, with_media
from app.text.pooling_prompt import PoolingPrompt
from app.text.prompt_size import TextRoom
from app.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class SeenText:
    """One side of a pair: pictures, and the text behind them."""

    text: str
    pictures: Sequence[Picture] = ()


def seen_pair(
    tokenizer: Tokenizer,
    template: PairTemplate | None,
    media: ModelMedia,
    pair: tuple[SeenText, SeenText],
    room: TextRoom,
) -> PoolingPrompt:
    """The prompt of a pair with pictures, which is never cut. UnsupportedError where the template shows none; errors as
    of `with_media`."""
    if template is None or not template.picture:
        raise UnsupportedError("this model compares texts; it takes no pictures", param=room.field)
    in_order = pair[::-1] if template.document_first else pair
    shown = [picture for side in in_order for picture in side.pictures]
    places = Placeholders(media, shown)
    texts = [template.picture * len(side.pictures) + str(places.hide(side.text)) for side in pair]
    rendered = replace(template, head=places.hide(template.head)).text(*texts)
    ids = encode_pieces(tokenizer, places.pieces(rendered), False, room)
    ids, asks = with_media(media, ids, shown, room.field)
    return PoolingPrompt([*ids, *template.ends], asks=asks)
