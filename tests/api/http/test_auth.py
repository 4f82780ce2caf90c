"""API keys: who is let in, where, and what a tenant shares."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from starlette.routing import WebSocketRoute

from app.api.http.auth import ApiKey, ApiKeys
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import ConfigError

KEYS = ApiKeys([ApiKey.parse("alice=key-of-alice", ""), ApiKey.parse("bob=key-of-bob", "")])
HI = {"messages": [{"role": "user", "content": "hi"}]}
ALICE = {"authorization": "Bearer key-of-alice"}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def call(app: Any, method: str, path: str, headers: dict[str, str] | None = None, **kwargs: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.request(method, path, headers=headers, **kwargs)

    return asyncio.run(send())


@pytest.fixture
def app(client: Any) -> Any:
    return create_app(client, RequestLimits(), keys=KEYS)


OPEN = {"/health", "/live", "/ping", "/", "/status", "/docs"}  # and /ready, which only a fleet has


def test_every_route_but_health_and_the_pages_asks_for_a_key(app: Any) -> None:
    """Over the application's own table, so that a new route cannot be forgotten."""
    asked = {}
    for route in app.routes:
        path = route.path.replace("{response_id}", "resp_1")
        if isinstance(route, WebSocketRoute):  # test_sockets.py asks these
            continue
        for method in sorted(route.methods - {"HEAD"}):
            asked[path] = call(app, method, path).status_code == 401
    opened = {path for path, is_asked in asked.items() if not is_asked}
    assert opened - {path for path in opened if path.startswith("/pages/")} == OPEN
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/metrics", "/tokenize", "/docs"} <= asked.keys()
    assert call(app, "GET", "/nowhere").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [ALICE, {"authorization": "bearer  key-of-alice"}, {"x-api-key": "key-of-alice"}, {"x-api-key": "key-of-bob"}],
)
def test_a_key_lets_in(app: Any, headers: dict[str, str]) -> None:
    assert call(app, "POST", "/v1/chat/completions", headers, json=HI).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer key-of-mallory"},
        {"authorization": "Basic key-of-alice"},
        {"authorization": "key-of-alice"},
        {"authorization": f"Bearer {digest('key-of-alice')}"},
        {"authorization": f"Bearer sha256:{digest('key-of-alice')}"},
        {"x-api-key": "key-of-alic"},
        {"x-api-key": "Key-Of-Alice"},
        {"x-api-key": ""},
        {"authorization": "Bearer ' OR '1'='1"},
        {"x-api-key": "' UNION SELECT 'key-of-alice' --"},
    ],
)
def test_the_rest_is_kept_out_in_the_route_s_dialect(app: Any, headers: dict[str, str], client: Any) -> None:
    refused = call(app, "POST", "/v1/chat/completions", headers, json=HI)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["type"] == "authentication_error"
    refused = call(app, "POST", "/v1/messages", headers, json=HI)
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    assert refused.json()["error"]["type"] == "authentication_error"
    assert client.requests == []


def test_both_sdks_raise_what_they_call_it(app: Any) -> None:
    async def talk() -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(api_key="wrong", base_url="http://test/v1", http_client=http).models.list()
        http2 = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        for name in ({"api_key": "key-of-alice"}, {"auth_token": "key-of-alice"}):
            sdk = anthropic.AsyncAnthropic(base_url="http://test", http_client=http2, **name)  # type: ignore[arg-type]
            hi: Any = HI["messages"]
            assert (await sdk.messages.create(model="m", max_tokens=5, messages=hi)).content
        sdk = anthropic.AsyncAnthropic(api_key="wrong", base_url="http://test", http_client=http2)
        with pytest.raises(anthropic.AuthenticationError):
            await sdk.messages.count_tokens(model="m", messages=hi)

    asyncio.run(talk())


def test_tenants_share_no_prefix_blocks(app: Any, client: Any) -> None:
    """I5: the tenant enters the root of the block hashes, and no client can take another's."""

    def root(key: str, path: str = "/v1/completions", **fields: Any) -> bytes:
        body = {"prompt": "hi"} if path == "/v1/completions" else {**HI, "input": "hi", "max_tokens": 5, "model": "m"}
        if path == "/v1/messages":
            body.pop("input")
        if path == "/v1/responses":
            body = {"input": "hi"}
        answer = call(app, "POST", path, {"x-api-key": key}, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        return bytes(client.requests[-1].placement.cache_root)

    alice = root("key-of-alice")
    assert alice
    assert alice == root("key-of-alice", "/v1/messages") == root("key-of-alice", "/v1/responses")
    others = [root("key-of-bob"), root("key-of-alice", cache_salt="s"), root("key-of-bob", cache_salt="s")]
    others += [root("key-of-bob", cache_salt="alice"), root("key-of-bob", cache_salt="5:alice")]
    assert len({alice, *others}) == 6


def test_keys_from_configuration_file_and_environment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    file = tmp_path / "keys"
    file.write_text(f"# people\nalice=key-of-alice\n\nsha256:{digest('hashed-key')}\nbase64-key==\n")
    other = tmp_path / "other"
    other.write_text("bob=key-of-bob\n")
    config = IngressConfig(api_keys_file=str(file), api_key_hashes=(f"carol=sha256:{digest('key-of-carol')}",))
    environ = {"MANTA_API_KEYS": "key-one-two, dave=key-of-dave", "MANTA_API_KEYS_FILE": str(other)}
    keys = ApiKeys.load(config, environ)
    for name in ("alice", "bob", "carol", "dave"):
        assert keys.tenant(f"key-of-{name}") == name
    unnamed = {keys.tenant(key) for key in ("hashed-key", "base64-key==", "key-one-two")}
    assert len(unnamed) == 3
    assert None not in unnamed
    assert keys.tenant("alice=key-of-alice") is None
    assert keys.tenant(None) is None
    assert "key-of" not in caplog.text
    assert ApiKeys.load(IngressConfig(), {}).tenant(None) == ""


@pytest.mark.parametrize("text", ["", "# nobody\n", "short\n", "sha256:12\n", "alice=short\n"])
def test_a_bad_file_lets_nobody_in(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="keys"):
        ApiKeys.load(IngressConfig(api_keys_file=str(file)), {})


def test_bad_sources_are_named_without_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.load(IngressConfig(api_keys_file=str(tmp_path / "none")), {})
    with pytest.raises(ConfigError, match=r"api_key_hashes\.0") as error:
        ApiKeys.load(IngressConfig(api_key_hashes=("secret-key",)), {})
    assert "secret-key" not in str(error.value)
    for name in ("MANTA_API_KEYS", "MANTA_API_KEYS_FILE"):  # a secret that was not filled in must not open the server
        for empty in ("", " \n"):
            with pytest.raises(ConfigError, match=f"{name} is set but"):
                ApiKeys.load(IngressConfig(), {name: empty})
    with pytest.raises(ConfigError, match="api_keys_file is set but"):
        ApiKeys.load(IngressConfig(api_keys_file=""), {})
    with pytest.raises(ConfigError, match="MANTA_API_KEYS, key 2") as error:
        ApiKeys.load(IngressConfig(), {"MANTA_API_KEYS": "long-enough,sec"})
    assert "sec" not in str(error.value).replace("MANTA_API_KEYS, key 2", "")


def test_keys_rotate_without_a_restart(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.http.auth.LOOK_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("alice=key-of-alice\nbob=key-of-bob-1\n")
    keys = ApiKeys.load(IngressConfig(api_keys_file=str(file)), {"MANTA_API_KEYS": "carol=key-of-carol"})
    app = create_app(client, RequestLimits(), keys=keys)

    def let_in(key: str) -> bool:
        return call(app, "GET", "/v1/models", {"x-api-key": key}).status_code == 200

    assert [let_in(key) for key in ("key-of-alice", "key-of-bob-1", "key-of-bob-2", "key-of-carol")] == [1, 1, 0, 1]
    (tmp_path / "next").write_text("alice=key-of-alice\nbob=key-of-bob-2\n")
    (tmp_path / "next").replace(file)  # as a mounted secret changes
    assert [let_in(key) for key in ("key-of-alice", "key-of-bob-1", "key-of-bob-2", "key-of-carol")] == [1, 0, 1, 1]
    for broken in ("", "# none\n", "short\n"):
        file.write_text(broken)
        assert [let_in(key) for key in ("key-of-alice", "key-of-bob-2", "nobody-s-key")] == [1, 1, 0]
    file.unlink()
    assert [let_in(key) for key in ("key-of-alice", "key-of-bob-2", "nobody-s-key")] == [1, 1, 0]
