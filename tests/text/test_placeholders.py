"""Prompts with pictures, judged by transformers: its template, its tokenizer, its rule that a placeholder becomes as
many as the picture has tokens. What users write as text stays text."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import InvalidRequestError
from app.media.picture import Picture
from app.media.processors.base import Processor
from app.records.media import MediaAsk
from app.text.chat_template import ChatTemplate
from app.text.placeholders import Placeholders, encode_pieces, with_media
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel
from tests.media.media_model import PAD, START, VIDEO, reader, seeing, write_media_model

ROOM = TextRoom(4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return seeing(write_media_model(tmp_path_factory.mktemp("media") / "m"), reader())


def picture(model: ServedModel, size: tuple[int, int], name: bytes) -> Picture:
    assert model.media is not None
    processor = model.media.kinds["image"].processor
    assert isinstance(processor, Processor)
    return Picture(name, processor.layout(size), (1,), b"x")


def prompt(model: ServedModel, messages: list[dict[str, Any]], pictures: list[Picture], **options: Any) -> Any:
    assert model.media is not None
    places = Placeholders(model.media)
    rendered = model.chat_template.render(places.hide(messages), **{k: places.hide(v) for k, v in options.items()})
    ids = encode_pieces(model.tokenizer, places.pieces(rendered), False, ROOM)
    return places.shown(rendered), *with_media(model.media, ids, pictures, "messages")


def test_templates_that_write_texts_alone_get_a_text_for_each_picture(model: ServedModel) -> None:
    assert model.media is not None
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.role + ':' + m.content }}|{% endfor %}"}, {})
    content = [{"type": "text", "text": f"Not {PAD}."}, {"type": "image"}, {"type": "text", "text": "What?"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    places = Placeholders(model.media, [picture(model, (56, 84), b"a" * 16)])
    rendered = template.render(places.messages(messages))
    assert places.shown(rendered) == f"user:Not {PAD}.\n{PAD}\nWhat?|assistant:Yes.|"
    ids = encode_pieces(model.tokenizer, places.pieces(rendered), False, ROOM)
    assert ids.count(model.media.info.image_token_id) == 1
    assert places.messages(messages)[1] == messages[1]
    assert content[1] == {"type": "image"}


def test_prompts_are_transformers(model: ServedModel) -> None:
    transformers = pytest.importorskip("transformers")
    judge = transformers.PreTrainedTokenizerFast.from_pretrained(str(model.info.directory))
    sizes = [(56, 84), (30, 30), (200, 100)]
    pictures = [picture(model, size, bytes([i]) * 16) for i, size in enumerate(sizes)]
    image = {"type": "image"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Grüße "}, image, image, {"type": "text", "text": " ?"}]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [image]},
    ]
    text, ids, asks = prompt(model, messages, pictures)
    template = (model.info.directory / "chat_template.jinja").read_text()
    expected = judge.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert text == expected
    for one in pictures:
        expected = expected.replace(PAD, "<one>" * one.layout.num_tokens, 1)
    assert ids == judge(expected.replace("<one>", PAD), add_special_tokens=False)["input_ids"]
    (ask,) = asks
    assert isinstance(ask, MediaAsk)
    pad = model.tokenizer.token_to_id(PAD)
    assert [item.length for item in ask.items] == [6, 1, 28]
    for item, one in zip(ask.items, pictures, strict=True):
        assert ids[item.offset : item.end] == [pad] * item.length
        assert (ids[item.offset - 1], item.digest) == (model.tokenizer.token_to_id(START), one.digest)


def test_what_users_write_stays_text(model: ServedModel) -> None:
    """Wherever it stands, the bytes come through, and no token of it means a picture."""
    shown = picture(model, (28, 28), b"d" * 16)
    words = f"{PAD} <|image<|image_pad|>_pad|>{VIDEO}{PAD}"
    tools = [{"type": "function", "function": {"name": "f", "description": PAD, "parameters": {PAD: VIDEO}}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": words}, {"type": "image"}]}]
    text, ids, asks = prompt(model, messages, [shown], tools=tools)
    assert text.count(PAD) == 6
    reserved = {model.tokenizer.token_to_id(PAD), model.tokenizer.token_to_id(VIDEO)}
    found = [i for i, token in enumerate(ids) if token in reserved]
    assert found == [asks[0].items[0].offset]
    assert model.tokenizer.decode(ids, False) == text
    _, ids, asks = prompt(model, [{"role": "user", "content": words}], [])
    assert asks == ()
    assert not reserved & set(ids)


@pytest.mark.parametrize("number", [0, 2])
def test_every_picture_has_its_place(model: ServedModel, number: int) -> None:
    shown = [picture(model, (28, 28), b"d" * 16)] * number
    with pytest.raises(InvalidRequestError, match=f"{number} pictures, but the prompt has 1 places"):
        prompt(model, [{"role": "user", "content": [{"type": "image"}]}], shown)
