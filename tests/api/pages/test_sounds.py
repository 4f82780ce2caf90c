"""The chat page records a sound with a browser's microphone (a file stands for it): a model that hears gets it in a
message, another one what is said in it, written down by a model that transcribes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.encoder_input import EncoderInput
from app.records.media import MediaAsk
from tests.api.conftest import ScriptedClient, Server, served, write_model
from tests.api.openai.audio.speech_model import Transcriber, served_speech, write_speech_model
from tests.api.pages.browser import CHROMIUM, DRIVER, ENTER, Browser, chromium
from tests.media.audio.sounds import file_of, noise
from tests.media.media_model import reader
from tests.media.sound_model import hearing, write_sound_model

DONE = "document.querySelectorAll('.answer:not([aria-busy])').length === arguments[0]"
RECORDING = "document.querySelector('#record').getAttribute('aria-pressed') === arguments[0]"


@pytest.fixture(scope="module")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that hears a file, and asks nobody whether it may."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "said.wav").write_bytes(file_of(noise(1.0)))
    hears = f"--use-file-for-fake-audio-capture={folder / 'said.wav'}"
    with chromium(folder, "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream", hears) as browser:
        yield browser


def record(browser: Browser) -> None:
    """Half a second of it."""
    browser.wait_for("!document.querySelector('#record').hidden")
    browser.click("#record")
    browser.wait_for(RECORDING, "true")
    browser.run("window.begun = performance.now()")
    browser.wait_for("performance.now() - window.begun > 500")
    browser.click("#record")
    browser.wait_for(RECORDING, "false")


def test_a_model_that_hears_gets_the_sound(microphone: Browser, tmp_path: Path) -> None:
    own = reader()
    client = ScriptedClient(hearing(write_sound_model(tmp_path / "m", "voxtral"), own))
    client.script = lambda request: [40]
    with Server(create_app(client, RequestLimits())) as server:
        microphone.open(server.url)
        record(microphone)
        microphone.wait_for("document.querySelectorAll('#sounds audio').length === 1")
        record(microphone)
        microphone.wait_for("document.querySelectorAll('#sounds audio').length === 2")
        microphone.click("#sounds button")
        microphone.type("#prompt", "What is said?" + ENTER)
        microphone.wait_for(DONE, 1)
        microphone.wait_for("document.querySelector('.user audio').duration > 0.2")
        assert microphone.complaints() == []
    own.close()
    ask = client.requests[-1].asked(MediaAsk)
    assert ask is not None
    assert [item.kind for item in ask.items] == ["audio"]


def test_what_is_said_comes_into_the_prompt(microphone: Browser, tmp_path: Path) -> None:
    transcriber = Transcriber(served_speech(write_speech_model(tmp_path / "whisper")))
    transcriber.says = lambda request: " and nine"
    writes = served(write_model(tmp_path / "text"), "a-model-that-writes")
    transcriber.models = {writes.name: writes, **transcriber.models}
    with Server(create_app(transcriber, RequestLimits())) as server:
        microphone.open(server.url)
        microphone.wait_for("document.querySelector('#model').value === 'a-model-that-writes'")
        microphone.type("#prompt", "Seven")
        record(microphone)
        # On a busy machine the recording may last longer than the second that this model hears at a time.
        microphone.wait_for("/^Seven( and nine)+$/.test(document.querySelector('#prompt').value)")
        assert microphone.complaints() == []
    heard = [request.asked(EncoderInput) for request in transcriber.transcripts]
    assert max(one.array().std() for one in heard if one is not None) > 0.1  # not silence


def test_nothing_is_recorded_for_models_of_text(microphone: Browser, tmp_path: Path) -> None:
    with Server(create_app(ScriptedClient(served(write_model(tmp_path / "text"), "text")), RequestLimits())) as server:
        microphone.open(server.url)
        microphone.wait_for("document.querySelector('#model').value === 'text'")
        assert microphone.run("return document.querySelector('#record').hidden")
