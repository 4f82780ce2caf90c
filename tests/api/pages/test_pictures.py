"""The chat page sends pictures that were chosen, dropped or pasted, and shows them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.media import MediaAsk
from tests.api.conftest import ScriptedClient, Server
from tests.api.pages.browser import ENTER, Browser
from tests.media.media_model import reader, seeing, write_media_model
from tests.media.pictures import file_of, picture

DONE = "document.querySelectorAll('.answer:not([aria-busy])').length === arguments[0]"
GIVE = """
const bytes = Uint8Array.from(atob(arguments[0]), (letter) => letter.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], "a.png", { type: arguments[1] }));
const event = arguments[2] === "drop" ? new DragEvent("drop", { dataTransfer: transfer, bubbles: true })
  : new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true });
document.querySelector("#prompt").dispatchEvent(event);
"""


@pytest.fixture
def seeing_client(tmp_path: Path) -> Iterator[ScriptedClient]:
    own = reader()
    client = ScriptedClient(seeing(write_media_model(tmp_path / "m"), own))
    client.script = lambda request: [40]
    yield client
    own.close()


def test_pictures_are_sent_and_shown(browser: Browser, seeing_client: ScriptedClient, tmp_path: Path) -> None:
    file = tmp_path / "chosen.png"
    file.write_bytes(file_of(picture(56, 56)))
    data = base64.b64encode(file_of(picture(56, 84))).decode()
    with Server(create_app(seeing_client, RequestLimits())) as server:
        browser.open(server.url)
        browser.wait_for("document.querySelector('#model').value === 'm'")
        browser.type("#files", str(file))
        browser.wait_for("document.querySelectorAll('#pictures img').length === 1")
        browser.run(GIVE, data, "image/png", "drop")
        browser.wait_for("document.querySelectorAll('#pictures img').length === 2")
        browser.run(GIVE, data, "image/png", "paste")
        browser.wait_for("document.querySelectorAll('#pictures img').length === 3")
        browser.click("#pictures button")
        browser.wait_for("document.querySelectorAll('#pictures img').length === 2")
        browser.type("#prompt", "What are they?" + ENTER)
        browser.wait_for(DONE, 1)
        browser.wait_for(
            "[...document.querySelectorAll('.user img')].filter((img) => img.naturalHeight === 84).length === 2"
        )
        ask = seeing_client.requests[-1].asked(MediaAsk)
        assert ask is not None
        assert [item.grid for item in ask.items] == [(1, 6, 4)] * 2
        browser.run(GIVE, data, "image/svg+xml", "drop")
        browser.wait_for_text(".notice", "only PNG, JPEG, WebP and GIF")
        assert browser.complaints() == []
