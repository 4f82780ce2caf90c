"""OpenAI's JavaScript client, unchanged, against transcriptions: every form of answer, a stream, a refusal.

It is looked for in `.javascript/` (`npm install --prefix .javascript openai`, as .ci/run does).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests import limits
from tests.api.conftest import Server
from tests.api.openai.audio.speech_model import Transcriber, served_speech, write_speech_model
from tests.media.audio.sounds import file_of, noise

CLIENT = Path(__file__).parents[4] / ".javascript"
SCRIPT = Path(__file__).parent / "client.mjs"
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client's program prints."""
    if NODE is None or not (CLIENT / "node_modules/openai").is_dir():
        pytest.skip("needs OpenAI's JavaScript client (npm install --prefix .javascript openai)")
    folder = tmp_path_factory.mktemp("javascript")
    transcriber = Transcriber(served_speech(write_speech_model(folder / "whisper")))
    transcriber.says = lambda request: " It is nine."
    (folder / "said.wav").write_bytes(file_of(noise(0.8)))
    with Server(create_app(transcriber, RequestLimits())) as server:
        environment = {**os.environ, "BASE_URL": f"{server.url}/v1", "SOUND": str(folder / "said.wav")}
        done = subprocess.run(
            [NODE, "--input-type=module"], input=SCRIPT.read_text(), cwd=CLIENT, env=environment, text=True,
            capture_output=True, timeout=limits.patience_s(), check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_forms_of_answers(found: dict[str, Any]) -> None:
    assert found["json"]["text"] == "It is nine."
    assert found["json"]["usage"] == {"type": "duration", "seconds": 1}
    assert found["text"] == "It is nine.\n"
    assert found["srt"].startswith("1\n00:00:00,000 --> 00:00:")
    assert found["translation"]["text"] == "It is nine."
    verbose = found["verbose"]
    assert verbose["language"] == "english"
    assert [word["word"] for word in verbose["words"]] == ["It", "is", "nine."]
    assert [segment["text"].strip() for segment in verbose["segments"]] == ["It is nine."]


def test_a_stream(found: dict[str, Any]) -> None:
    *deltas, done = found["events"]
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert "".join(event["delta"] for event in deltas) == done["text"] == "It is nine."
    assert done["type"] == "transcript.text.done"
    assert done["usage"]["type"] == "tokens"
    assert done["logprobs"]


def test_a_refusal(found: dict[str, Any]) -> None:
    error = found["error"]
    assert (error["kind"], error["status"], error["param"]) == ("BadRequestError", 400, "language")
    assert "tlhingan" in error["message"]
