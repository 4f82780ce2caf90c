"""Pairs with pictures, and pages: where their prompts are made, what they hold, and how many pixels one has."""

from __future__ import annotations

import base64
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.api.chat.media_parts import ImagePart
from app.api.http.held_bytes import HeldBytes, Holding
from app.api.http.work_pool import RequestWork, WorkPool
from app.api.pooling import pictures
from app.api.pooling.pictures import read_pages, read_pairs
from app.api.pooling.protocol import ScoredText
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.media.picture import Picture
from app.media.reader import MediaReader
from app.records.late_interaction import LateInteraction
from app.text.pair_template import _QWEN3_VL
from app.text.pooling_prompt import PoolingPrompt
from app.text.prompt_size import TextRoom
from tests.limits import patience_s, run
from tests.media.media_model import END, PAD, START, reader, seeing, write_media_model
from tests.media.pictures import file_of, picture

TEMPLATE = replace(_QWEN3_VL, picture=f"{START}{PAD}{END}")
FILES = [file_of(picture(60, 60, seed)) for seed in range(2)]
ROOM = TextRoom(4096, field="documents")
MANY = [ScoredText("a")] * 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media_model(tmp_path_factory.mktemp("pairs") / "m")


@pytest.fixture
def own_reader() -> Iterator[MediaReader]:
    found = reader()
    yield found
    found.close()


def shown(file: bytes, field: str) -> ScoredText:
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    return ScoredText("", ImagePart.of(url, None, field))


def read(
    path: Path, own: MediaReader, documents: list[ScoredText], held: HeldBytes | None = None, threads: int = 1
) -> Any:
    """The prompts of pairs with one picture as their query, each made after the other."""
    work = RequestWork(WorkPool(threads), holding=Holding(held or HeldBytes(1 << 30), ""))
    pairs = [(shown(FILES[0], "query.image"), document) for document in documents]
    return run(read_pairs(work, seeing(path, own), TEMPLATE, pairs, RequestLimits(), ROOM))


def test_many_short_documents_beside_a_picture_are_not_written_on_the_event_loop(
    path: Path, own_reader: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template stands in the prompt of each, however short the texts are."""
    threads: list[str] = []
    plain = pictures._seen_pairs

    def noted(*arguments: Any) -> list[PoolingPrompt]:
        threads.append(threading.current_thread().name)
        return plain(*arguments)

    monkeypatch.setattr(pictures, "_seen_pairs", noted)
    assert len(read(path, own_reader, MANY)) == len(MANY)
    assert threads
    assert all(name.startswith("work") for name in threads)


def let_two_meet(own: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two reads are both under way before either is done."""
    meeting, began, plain = threading.Barrier(2), itertools.count(), own.read

    def met(*arguments: Any) -> Picture:
        if next(began) < 2:
            meeting.wait(patience_s())
        return plain(*arguments)

    monkeypatch.setattr(own, "read", met)


def test_pictures_of_many_prompts_are_read_side_by_side(
    path: Path, own_reader: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand where they were asked for."""
    let_two_meet(own_reader, monkeypatch)
    others = [shown(file_of(picture(40 + 30 * seed, 40, seed)), f"documents.{seed}.image") for seed in range(5)]
    together = read(path, own_reader, others, threads=3)
    monkeypatch.undo()
    apart = [prompt for document in others for prompt in read(path, own_reader, [document])]
    assert [prompt.token_ids for prompt in together] == [prompt.token_ids for prompt in apart]
    digests = [[[item.digest for item in prompt.asks[0].items] for prompt in prompts] for prompts in (together, apart)]
    assert digests[0] == digests[1]


def test_pages_are_read_side_by_side(path: Path, own_reader: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand where they were asked for."""
    let_two_meet(own_reader, monkeypatch)
    late, work = LateInteraction(picture=f"{START}{PAD}{END}"), RequestWork(WorkPool(3))
    pages = [shown(file_of(picture(40 + 30 * seed, 40, seed)), f"documents.{seed}.image").image for seed in range(5)]

    def prompts(*parts: ImagePart | None) -> list[PoolingPrompt]:
        given = [part for part in parts if part is not None]
        return run(read_pages(work, seeing(path, own_reader), late, given, RequestLimits(), ROOM))

    together = prompts(*pages)
    monkeypatch.undo()
    apart = [prompt for page in pages for prompt in prompts(page)]
    assert [prompt.token_ids for prompt in together] == [prompt.token_ids for prompt in apart]
    digests = [[prompt.asks[0].items[0].digest for prompt in prompts] for prompts in (together, apart)]
    assert digests[0] == digests[1]
    assert len({*digests[0]}) == len(pages)


def test_a_refused_picture_leaves_nothing_of_the_others_held(
    path: Path, own_reader: MediaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given up, and their files are given back once, before the refusal goes out."""
    bad, go, plain = file_of(picture(33, 33, 9)), threading.Event(), own_reader.read
    held = HeldBytes(1 << 30)

    def look(data: Any, *further: Any) -> Picture:
        if data == bad:
            raise InvalidRequestError("is broken")
        go.wait(patience_s())
        return plain(data, *further)

    monkeypatch.setattr(own_reader, "read", look)
    documents = [shown(FILES[1], "documents.0.image"), shown(bad, "documents.1.image")]
    pairs = [(shown(FILES[0], "query.image"), document) for document in documents]
    work = RequestWork(WorkPool(3), holding=Holding(held, ""))

    async def refused() -> tuple[Any, int]:
        with pytest.raises(InvalidRequestError, match="is broken") as caught:
            await read_pairs(work, seeing(path, own_reader), TEMPLATE, pairs, RequestLimits(), ROOM)
        return caught.value.param, held.total

    try:
        assert run(refused()) == ("documents.1.image", 0)
    finally:
        go.set()


def test_a_picture_counts_as_often_as_prompts_show_it(path: Path, own_reader: MediaReader) -> None:
    held = HeldBytes(1 << 30)
    (alone,) = read(path, own_reader, MANY[:1], held)
    of_one, num_tokens = held.total, alone.asks[0].items[0].length
    held = HeldBytes(1 << 30)
    read(path, own_reader, MANY, held)
    assert held.total - of_one == 8 * num_tokens * (len(MANY) - 1)
    with pytest.raises(InvalidRequestError, match="send fewer or smaller") as refused:
        read(path, own_reader, MANY, HeldBytes(2 * (held.total - 1)))
    assert refused.value.param == "query.image"


def test_the_pixels_of_both_sides_are_one_prompts(path: Path, own_reader: MediaReader) -> None:
    documents = [ScoredText("a"), shown(FILES[1], "documents.1.image")]
    _, both = read(path, own_reader, documents)
    first, second = (len(item.pixels) for item in both.asks[0].items)
    for most in first + second, first + second - 1:
        own = reader(max_prompt_bytes=most)
        try:
            if most == first + second:
                assert len(read(path, own, documents)) == 2
                continue
            with pytest.raises(InvalidRequestError, match="bytes of pixels") as refused:
                read(path, own, documents)
            assert refused.value.param == "documents.1.image"
        finally:
            own.close()
