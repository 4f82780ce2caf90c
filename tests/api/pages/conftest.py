"""A browser, where this machine has one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.api.http.auth import ApiKey, ApiKeys
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.pages.browser import CHROMIUM, DRIVER, Browser, chromium


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser a module; starting it takes a second."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def application(client: Any) -> Any:
    """The HTTP application over the scripted client."""
    return create_app(client, RequestLimits())


@pytest.fixture
def guarded(client: Any) -> Any:
    """The same for those who have the key "right-key"."""
    return create_app(client, RequestLimits(), keys=ApiKeys([ApiKey.parse("right-key", "test")]))


@pytest.fixture
def make_server(server: Any) -> Iterator[Callable[[Any], Any]]:
    """Serve any ASGI application; all are stopped at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda app: stack.enter_context(type(server)(app))


@pytest.fixture
def browser(window: Browser) -> Browser:
    """The browser at a size and scheme that tests can rely on. Each test's server is an origin of its own, so that
    nothing stored by one test is seen by the next."""
    window.resize(1200, 850)
    window.prefer("light")
    window.complaints()
    return window
