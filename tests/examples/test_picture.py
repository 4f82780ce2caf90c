"""The example with pictures, against the built-in model that sees behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.api.server.app import create_app
from app.config.engine import EngineConfig
from app.config.limits import RequestLimits
from app.text.model_media import ModelMedia
from tests.api.conftest import Server
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.examples.conftest import RunExample
from tests.media.media_model import reader

NAME = "tiny-chat-sees"


@pytest.fixture(scope="module")
def seeing_server() -> Iterator[Server]:
    client, own = EngineInThisProcess(NAME), reader()
    model = client.models[NAME]
    model.media = ModelMedia.of(model.info, model.tokenizer, own, EngineConfig(model=NAME))
    with Server(create_app(client, RequestLimits())) as server:
        yield server
    client.engine.shutdown()
    own.close()


def test_openai_picture(run_here: RunExample, seeing_server: Server) -> None:
    printed = run_here("openai_picture", seeing_server.url).splitlines()
    assert printed[-6:] == [
        "shapes: How many circles are there? There are 3 circles.",
        "shapes: What color is the square? The square is red.",
        "number: What number is this? The number is 407.",
        "number: Describe the picture. The number 407.",
        "chart: Which bar is the tallest? The green bar.",
        "chart: How high is the red bar? The red bar is 3 high.",
    ]
