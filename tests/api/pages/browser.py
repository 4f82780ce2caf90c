"""A headless Chromium, driven over the W3C WebDriver protocol by plain HTTP; no package of its own."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests import limits

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of an element's id
ENTER, SHIFT, ESCAPE, TAB, NULL = "\ue007", "\ue008", "\ue00c", "\ue004", "\ue000"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One command of the protocol; RuntimeError says what the driver says."""
        answer = self._http.request(method, f"/session/{self._session}{path}", json=body)
        value = answer.json()["value"]
        if answer.is_error:
            raise RuntimeError(f"{value['error']}: {value['message']}")
        return value

    def open(self, url: str) -> None:
        """Load a page and wait until it has loaded."""
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The result of a function body in the page."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, selector: str) -> dict[str, str]:
        """The first element that a CSS selector matches."""
        found: dict[str, str] = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return found

    def texts(self, selector: str) -> list[str]:
        """Visible text of all elements that a CSS selector matches."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", selector
        )
        return found

    def click(self, selector: str) -> None:
        """Click where the element is; fails if something covers it."""
        self.call("POST", f"/element/{self.find(selector)[ELEMENT]}/click", {})

    def type(self, selector: str, keys: str) -> None:
        """Type into an element."""
        self.call("POST", f"/element/{self.find(selector)[ELEMENT]}/value", {"text": keys})

    def press(self, *keys: str) -> None:
        """Press and release keys wherever the focus is."""
        actions = [
            step for key in keys for step in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
        ]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def focus(self) -> str:
        """Id (or tag) of the element that has the focus."""
        focused: str = self.run("const e = document.activeElement; return e.id || e.name || e.tagName")
        return focused

    def wait_for(self, script: str, *args: Any) -> Any:
        """The first truthy result of an expression; AssertionError when none comes."""
        limit = limits.Limit(10.0)
        while not (value := self.run(f"return {script}", *args)):
            if not limit.left_s():
                limit.fail(f"{script} {args}; the page says: {self.run('return document.body.innerText')}")
            limits.pause(0.03)
        return value

    def wait_for_text(self, selector: str, text: str) -> None:
        """Return once an element's visible text contains `text`."""
        script = "[...document.querySelectorAll(arguments[0])].some((e) => e.innerText.includes(arguments[1]))"
        self.wait_for(script, selector, text)

    def resize(self, width: int, height: int) -> None:
        """Size of the page, whatever the window around it takes."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """The system's colour scheme, "light" or "dark"."""
        self.devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        """A command of Chromium's own protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def complaints(self) -> list[str]:
        """What the page wrote to the console since the last call, at level severe; refused content is there too."""
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        """The window as PNG."""
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))


@contextmanager
def chromium(folder: Path, *arguments: str) -> Iterator[Browser]:
    """A fresh browser with its profile in `folder`, and further arguments; everything ends with the block."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "driver.log"
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}", f"--log-path={log}"], stdout=subprocess.DEVNULL, env=environment
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=limits.patience_s(), trust_env=False) as http:
            browser = Browser(http, _session(http, folder, arguments))
            yield browser
            browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(limits.patience_s())


def _session(http: httpx.Client, folder: Path, arguments: tuple[str, ...]) -> str:
    options = {"binary": CHROMIUM, "args": [*ARGUMENTS, *arguments, f"--user-data-dir={folder / 'profile'}"]}
    wishes = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    limit = limits.Limit(20.0)
    while True:
        try:
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wishes}})
            break
        except httpx.TransportError:
            if not limit.left_s():
                raise
            limits.pause(0.05)
    value = answer.json()["value"]
    if answer.is_error:
        raise RuntimeError(f"{value['error']}: {value['message']}")
    return str(value["sessionId"])
