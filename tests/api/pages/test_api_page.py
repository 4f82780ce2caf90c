"""The API's page in a real browser, which reaches nothing but the server: Swagger UI is served by us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.api.pages.browser import ENTER, Browser


def test_shows_the_routes_from_our_own_files(browser: Browser, server: Any) -> None:
    browser.open(f"{server.url}/docs")
    browser.wait_for_text(".opblock-summary-path", "/v1/chat/completions")
    loaded = browser.run("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert all(address.startswith((f"{server.url}/", "data:")) for address in loaded), loaded
    assert browser.complaints() == []


def test_a_request_is_tried_out(browser: Browser, server: Any) -> None:
    browser.open(f"{server.url}/docs")
    browser.wait_for_text(".opblock-summary-path", "/v1/models")
    row = "[...document.querySelectorAll('.opblock-get')].find((e) => e.innerText.includes('/v1/models\\n') || \
e.querySelector('.opblock-summary-path').innerText === '/v1/models')"
    browser.run(f"{row}.querySelector('.opblock-summary-control').click()")
    browser.wait_for(f"{row}.querySelector('.try-out__btn')")
    browser.run(f"{row}.querySelector('.try-out__btn').click()")
    browser.wait_for(f"{row}.querySelector('.execute')")
    browser.run(f"{row}.querySelector('.execute').click()")
    browser.wait_for(f"{row}.querySelector('.live-responses-table')?.innerText.includes('200')")


def test_api_key(browser: Browser, make_server: Callable[[Any], Any], guarded: Any) -> None:
    browser.open(f"{make_server(guarded).url}/docs")
    browser.wait_for_text(".key-form p", "This server wants an API key.")
    browser.type(".key-form input", "wrong-key" + ENTER)
    browser.wait_for_text(".key-form p", "This API key is not accepted by the server")
    browser.type(".key-form input", "right-key" + ENTER)
    browser.wait_for_text(".opblock-summary-path", "/v1/chat/completions")
    assert browser.texts(".key-form") == []
