"""The table of pictures' limits: each route that takes pictures, and how a picture exceeds each limit of `media`
(app/config/media.py).

A new route that reads JSON fails tests/api/test_picture_limits.py until it has a line in SHOWING or in TEXT_ONLY, and a
new option of `media` until it has one in CARRIERS or in ELSEWHERE.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from tests.media.pictures import file_of, picture

Body = dict[str, Any]
Show = Callable[[Sequence[str]], Body]


def _chat(urls: Sequence[str]) -> list[Body]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


def _files(urls: Sequence[str]) -> list[Body]:
    """A file has no address."""
    if any(url.startswith("http") for url in urls):
        return _chat(urls)
    return [{"role": "user", "content": [{"type": "file", "file": {"file_data": url}} for url in urls]}]


def _input(urls: Sequence[str]) -> list[Body]:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": url} for url in urls]}]


def _output(urls: Sequence[str]) -> list[Body]:
    """Of a call."""
    said = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    shown = [{"type": "input_image", "image_url": url} for url in urls]
    return [said, {"type": "function_call_output", "call_id": "c", "output": shown}]


def _blocks(urls: Sequence[str]) -> list[Body]:
    return [{"type": "image", "source": _source(url)} for url in urls]


def _source(url: str) -> Body:
    if url.startswith("http"):
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}


def _result(urls: Sequence[str]) -> list[Body]:
    """Of a tool."""
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": _blocks(urls)}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}, _user([result])]


def _user(content: list[Body]) -> Body:
    return {"role": "user", "content": content}


_MESSAGES: tuple[Show, ...] = (
    lambda urls: {"model": "m", "messages": [_user(_blocks(urls))]},
    lambda urls: {"model": "m", "messages": _result(urls)},
)
_RESPONSES: tuple[Show, ...] = (lambda urls: {"input": _input(urls)}, lambda urls: {"input": _output(urls)})
SHOWING: Mapping[str, tuple[Show, ...]] = {
    "/v1/chat/completions": (lambda urls: {"messages": _chat(urls)}, lambda urls: {"messages": _files(urls)}),
    "/v1/chat/completions/batch": (lambda urls: {"messages": [_chat(urls)]},),
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
    "/v1/messages": tuple(lambda urls, one=one: {**one(urls), "max_tokens": 2} for one in _MESSAGES),
    "/v1/messages/count_tokens": _MESSAGES,
    "/tokenize": (lambda urls: {"messages": _chat(urls)},),
}
_PLAIN = "its bodies have no messages"
_POOLS = "vectors of texts"
TEXT_ONLY = {
    "/v1/chat/completions/render": "refuses pictures: chat/test_pictures.py::test_limits_of_a_prompt",
    "/v1/responses/compact": "what is compacted shows nothing: openai/test_responses_compact.py",
    "/v1/completions": _PLAIN,
    "/v1/completions/render": _PLAIN,
    "/generate": _PLAIN,
    "/generative_scoring": _PLAIN,
    "/inference/v1/generate": _PLAIN,
    "/detokenize": _PLAIN,
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify", "/v2/embed", "/v1/embed"), _POOLS),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), _POOLS),
    "/v1/batches": "each line goes to a route of its own: batches/test_pictures.py",
    "/v1/messages/batches": "each request goes to a route of its own: batches/test_pictures.py",
    "/v1/chat/completions/{completion_id}": _PLAIN,
    "/v1/uploads": _PLAIN,
    "/v1/uploads/{upload_id}/complete": _PLAIN,
}


def url_of(width: int, height: int, seed: int = 0) -> str:
    """A picture as a data URL."""
    return f"data:image/png;base64,{base64.b64encode(file_of(picture(width, height, seed))).decode()}"


@dataclass(frozen=True)
class Excess:
    """One limit, set so low that the pictures exceed it."""

    urls: tuple[str, ...]
    says: str
    media: Mapping[str, Any] = field(default_factory=dict)  # options of the reader
    limits: Mapping[str, Any] = field(default_factory=dict)  # of the server
    engine: Mapping[str, Any] = field(default_factory=dict)
    statuses: tuple[int, ...] = (400,)


ONE = url_of(56, 84)
BROKEN = "data:image/png;base64,QUJD"
PLAIN = f"data:image/png;base64,{base64.b64encode(file_of(Image.new('RGB', (999, 999)))).decode()}"
CARRIERS: Mapping[str, Excess] = {
    "max_image_bytes": Excess((ONE,), r"has \d+ bytes; a picture may have 100", {"max_image_bytes": 100}),
    "max_image_pixels": Excess((ONE,), r"has 56 x 84 pixels; at most 4703 in all", {"max_image_pixels": 4703}),
    "max_image_side": Excess((ONE,), r"84 pixels; .* and 83 along a side", {"max_image_side": 83}),
    "max_images": Excess((ONE, ONE), "2 pictures; at most 1 a prompt", {"max_images": 1}),
    "max_prompt_bytes": Excess(
        (ONE, ONE), "has 28224 bytes of pixels with the others; a prompt may have 20000", {"max_prompt_bytes": 20_000}
    ),
    "allowed_media_domains": Excess(("http://images.example/a.png",), "takes pictures as data URLs only"),
    "limit_mm_per_prompt": Excess((ONE, ONE), "2 pictures; at most 1", engine={"limit_mm_per_prompt": {"image": 1}}),
    "max_model_len": Excess((PLAIN,) * 17, r"the pictures up to this one have \d+ tokens; .* holds (512|1024)"),
    "max_bodies_bytes": Excess(
        tuple(url_of(112, 112, seed) for seed in range(3)),
        # The conversations of a batch are requests of their own beside its body, which they do not know.
        r"makes the request take \d+ bytes with all before it; at most 200000 are held|leaves it no room; try later",
        limits={"max_bodies_bytes": 400_000},
        statuses=(400, 429),
    ),
}
ELSEWHERE = {
    "decode_timeout_s": "tests/media/test_reader.py::test_time_is_bounded",
    "decode_memory_bytes": "tests/media/test_reader.py::test_a_picture_that_is_too_much_costs_a_process",
    "max_decoders": "tests/media/test_reader.py::test_processes_are_few",
    "cache_bytes": "tests/media/test_reader.py::test_a_file_that_came_before_is_not_decoded_again",
    "max_sounds": "tests/api/chat/test_sounds.py::test_limits_of_a_prompt",
    "max_sound_s": "tests/media/audio/test_reader.py::test_errors_say_what_is_wrong",
    "max_videos": "tests/api/chat/test_videos.py::test_limits_of_a_prompt",
    "max_video_bytes": "tests/api/chat/test_videos.py::test_limits_of_a_prompt",
    "max_video_s": "tests/media/videos/test_reader.py::test_limits",
    "max_video_frames": "tests/media/videos/test_reader.py::test_limits",
    "max_video_pixels": "tests/media/videos/test_reader.py::test_limits",
    "engine_bytes": "tests/deployments/replica/test_media_room.py::test_pixels_count_until_their_request_is_gone",
    "fetch_timeout_s": "tests/media/test_fetching.py::test_answers_and_redirects",
    "max_redirects": "tests/media/test_fetching.py::test_answers_and_redirects",
}
