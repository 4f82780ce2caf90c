"""Pairs with pictures within a template: a picture before its text, users' own words for pictures as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import UnsupportedError
from app.text.pair_prompt import SeenText, seen_pair
from app.text.pair_template import PairTemplate
from app.text.prompt_size import TextRoom
from tests.media.media_model import END, PAD, START, reader, seeing, write_media_model
from tests.media.pictures import file_of, picture

TEMPLATE = PairTemplate("Q:", " D:", " =", picture=f"{START}{PAD}{END}")
ROOM = TextRoom(512, field="documents")


def test_a_picture_stands_before_its_text(tmp_path: Path) -> None:
    own = reader()
    model = seeing(write_media_model(tmp_path / "m"), own)
    media, tokenizer = model.media, model.tokenizer
    assert media is not None
    shown = media.read("image", file_of(picture(60, 60)))
    own.close()
    pair = SeenText(f"like {PAD}"), SeenText("boats", [shown])
    found = seen_pair(tokenizer, TEMPLATE, media, pair, ROOM)
    pad, count = tokenizer.token_to_id(PAD), shown.layout.num_tokens
    assert pad is not None
    assert found.token_ids.count(pad) == count
    half = len(PAD) // 2
    before = tokenizer.encode(f"Q:like {PAD[:half]}", False) + tokenizer.encode(f"{PAD[half:]} D:{START}", False)
    after = tokenizer.encode(f"{END}boats =", False)
    assert found.token_ids == [*before, *[pad] * count, *after]
    (ask,) = found.asks
    assert [(item.offset, item.length) for item in ask.items] == [(len(before), count)]  # type: ignore[attr-defined]
    for template in (None, replace(TEMPLATE, picture="")):
        with pytest.raises(UnsupportedError, match="takes no pictures") as caught:
            seen_pair(tokenizer, template, media, pair, ROOM)
        assert caught.value.param == "documents"
