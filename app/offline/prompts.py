"""The forms in which `LLM` takes prompts: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from app.errors import InvalidRequestError

Prompt = str | Sequence[int] | Mapping[str, Any]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several: list[Any] = list(prompts)
    return [several] if several and isinstance(several[0], int) else several


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """What a prompt consists of, in whichever form it came; InvalidRequestError for a mapping with other keys."""
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not set(prompt) <= {"prompt", "prompt_token_ids"}:
            raise InvalidRequestError(
                f"a prompt has either prompt or prompt_token_ids, not {sorted(prompt)}", param="prompts"
            )
        prompt = cast("str | Sequence[int]", next(iter(prompt.values())))
    return prompt if isinstance(prompt, str) else list(prompt)


@contextmanager
def at_prompt(index: int) -> Iterator[None]:
    """Errors within name the prompt at fault by its place."""
    try:
        yield
    except InvalidRequestError as error:
        raise type(error)(f"prompts[{index}]: {error.message}", param=error.param) from error
