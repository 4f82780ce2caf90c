"""The forms in which `LLM` takes prompts: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, either with
{"multi_modal_data": {"image": ..., "video": ...}} or {"audio": ...}."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from app.errors import InvalidRequestError
from app.records.media import MediaAsk, MediaKind

Prompt = str | Sequence[int] | Mapping[str, Any]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several; InvalidRequestError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


@dataclass(slots=True, frozen=True)
class Encoded:
    """A prompt as the engine takes it: its text where it had one, its tokens, and its pictures or sounds."""

    text: str | None
    token_ids: list[int]
    asks: tuple[MediaAsk, ...] = ()


@dataclass(slots=True, frozen=True)
class Given:
    """A picture, video or sound, in whichever form it came."""

    kind: MediaKind
    value: Any


def has_media(prompt: Prompt) -> bool:
    """True if a prompt brings something beside its text."""
    return isinstance(prompt, Mapping) and "multi_modal_data" in prompt


def split_media(prompt: Prompt) -> tuple[Prompt, list[Given]]:
    """A prompt without its `multi_modal_data`, and the pictures, videos or sounds in that; InvalidRequestError for
    other media."""
    if not has_media(prompt):
        return prompt, []
    assert isinstance(prompt, Mapping)
    rest, media = dict(prompt), prompt["multi_modal_data"] or {}
    del rest["multi_modal_data"]
    if not isinstance(media, Mapping) or set(media) - {"image", "video", "audio"}:
        known = 'multi_modal_data is an object with "image", "video" or "audio": one of them, or several'
        raise InvalidRequestError(f"{known}, not {media!r:.80}", param="multi_modal_data")
    images, sounds = media.get("image", []), media.get("audio", [])
    found = [Given("image", one) for one in (images if isinstance(images, list | tuple) else [images])]
    found += [Given("video", one) for one in videos_in(media.get("video", []))]
    # A tuple is one sound: its samples, and how many there are in a second.
    return rest, found + [Given("audio", one) for one in (sounds if isinstance(sounds, list) else [sounds])]


def videos_in(given: Any) -> list[Any]:
    """One video or several: a list of frames is one."""
    if not isinstance(given, list):
        return [given]
    is_frames = (
        bool(given) and not isinstance(given[0], str | bytes | tuple | list) and getattr(given[0], "ndim", 3) == 3
    )
    return [given] if is_frames else given


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """Returns what a prompt consists of, in whichever form it came; InvalidRequestError for a mapping with other
    keys."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not set(prompt) <= {"prompt", "prompt_token_ids"}:
            raise InvalidRequestError(
                f"a prompt has either prompt or prompt_token_ids, not {sorted(prompt)}", param="prompts"
            )
        prompt = cast("str | Sequence[int]", next(iter(prompt.values())))
    if not isinstance(prompt, str) and not isinstance(prompt, Iterable):
        raise _no_prompt(prompt)
    return prompt if isinstance(prompt, str) else list(prompt)


def check_conversations(messages: object) -> None:
    """InvalidRequestError for what is neither a conversation, a list of messages, nor a list of conversations."""
    if isinstance(messages, list | tuple):
        if all(isinstance(message, Mapping) for message in messages):
            return
        if all(isinstance(each, list | tuple) and all(isinstance(m, Mapping) for m in each) for each in messages):
            return
    raise InvalidRequestError(
        "messages: expected a list of messages such as {'role': 'user', 'content': 'Hello!'}, or a list of such lists, "
        f"not {type(messages).__name__} {messages!r:.80}",
        param="messages",
    )


def _no_prompt(given: object) -> InvalidRequestError:
    forms = "a text, token ids, {'prompt': text} or {'prompt_token_ids': ids}, or a list of these"
    return InvalidRequestError(f"prompts: expected {forms}, not {type(given).__name__} {given!r:.80}", param="prompts")


@contextmanager
def at_prompt(index: int) -> Iterator[None]:
    """Errors within name the prompt at fault by its place."""
    try:
        yield
    except InvalidRequestError as error:
        raise type(error)(f"prompts[{index}]: {error.message}", param=error.param) from error
