"""Anthropic's own SDK before the scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

from tests import limits


@pytest.fixture
def claude(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=limits.patience_s()) as sdk:
        yield sdk


@pytest.fixture
def say(client: Any, served_model: Any) -> Callable[[str], None]:
    """Make the model write a text, token by token."""

    def script(text: str) -> None:
        client.script = lambda request: served_model.tokenizer.encode(text, False)

    return script


@pytest.fixture
def prompt_of(client: Any, served_model: Any) -> Callable[[], str]:
    """The text of the prompt that the engine saw last."""
    return lambda: str(served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False))
