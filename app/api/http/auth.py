"""API keys: who may call, and which tenant a caller is.

The server keeps SHA-256 digests only. A key that a client sends is digested and compared with every configured digest
in constant time, so neither a match nor its place can be told from the time taken. The tenant is derived here, never
taken from the client: it enters the root of the prefix cache (I5) and owns the responses that are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.http.errors import error_response
from app.config.admin import ADMIN_KEYS_FILE_VARIABLE, ADMIN_KEYS_VARIABLE, AdminConfig
from app.config.ingress import KEYS_FILE_VARIABLE, KEYS_VARIABLE, IngressConfig
from app.errors import AuthenticationError, ConfigError

logger = logging.getLogger("manta.api")

LOOK_S = 1.0  # between two looks at the files of keys
MIN_KEY_CHARS = 8
ANONYMOUS = ""  # the tenant of a server without keys

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/", "/status", "/docs"})
_OPEN_FOLDER = "/pages/"  # the files of the pages, which ask for the key


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key that is let in; the key itself is not kept."""

    digest: bytes  # SHA-256
    tenant: str

    @classmethod
    def parse(cls, entry: str, where: str) -> ApiKey:
        """`[tenant=]key` or `[tenant=]sha256:<hex>`. Without a tenant, each key is a tenant of its own.

        ConfigError says where a bad entry stands, and never what it is.
        """
        name, mark, rest = entry.partition("=")
        named = bool(mark and rest.strip("=") and _TENANT.fullmatch(name))  # a key may end in `=`, as base64 does
        key = rest if named else entry
        if key.startswith("sha256:"):
            text = key.removeprefix("sha256:").lower()
            if not _DIGEST.fullmatch(text):
                raise ConfigError(f"{where}: `sha256:` must be followed by 64 hexadecimal digits", param="api_keys")
            digest = bytes.fromhex(text)
        elif len(key) < MIN_KEY_CHARS:
            raise ConfigError(f"{where}: a key needs at least {MIN_KEY_CHARS} characters", param="api_keys")
        else:
            digest = hashlib.sha256(key.encode()).digest()
        return cls(digest, name if named else f"key-{digest.hex()[:16]}")


class ApiKeys:
    """The keys that are let in. None at all: everybody is, as one anonymous tenant.

    Files that change are read again, so keys rotate without a restart. One that cannot be read or holds no key changes
    nothing: half a file must neither lock everybody out nor open the server.
    """

    def __init__(self, keys: Iterable[ApiKey] = (), files: Iterable[tuple[str, str]] = ()) -> None:
        """`files`: (the option that names it, its path). ConfigError where one cannot be used."""
        self._fixed = tuple(keys)
        self._files = tuple(files)
        self._stamps = self._look()
        self._keys = self._read()
        self._next_look_s = time.monotonic() + LOOK_S

    @classmethod
    def load(cls, config: IngressConfig, environ: Mapping[str, str] = os.environ) -> ApiKeys:
        """The keys of the configuration, of its file, and of the environment together. ConfigError on a bad one."""
        keys = []
        for i, entry in enumerate(config.api_key_hashes):
            if "sha256:" not in entry:
                raise ConfigError(f"api_key_hashes.{i}: expected [tenant=]sha256:<hex>", param="api_key_hashes")
            keys.append(ApiKey.parse(entry, f"api_key_hashes.{i}"))
        if (listed := environ.get(KEYS_VARIABLE)) is not None:
            keys += _read_list(listed, KEYS_VARIABLE)
        named = ("api_keys_file", config.api_keys_file), (KEYS_FILE_VARIABLE, environ.get(KEYS_FILE_VARIABLE))
        return cls(keys, [(option, path) for option, path in named if path is not None])

    @classmethod
    def of_operators(cls, config: AdminConfig, environ: Mapping[str, str] = os.environ) -> ApiKeys:
        """Those of the operator's listener. ConfigError on a bad one, and where there is none."""
        listed, file = environ.get(ADMIN_KEYS_VARIABLE), environ.get(ADMIN_KEYS_FILE_VARIABLE)
        keys = [] if listed is None else _read_list(listed, ADMIN_KEYS_VARIABLE)
        named = ("admin.keys_file", config.keys_file), (ADMIN_KEYS_FILE_VARIABLE, file)
        found = cls(keys, [(option, path) for option, path in named if path is not None])
        if not found.required:
            raise ConfigError(
                f"admin.port is set, but no key: name a file in admin.keys_file, or set {ADMIN_KEYS_VARIABLE}",
                param="admin.keys_file",
            )
        return found

    @property
    def num_keys(self) -> int:
        """Counts the keys."""
        return len(self._keys)

    @property
    def required(self) -> bool:
        """True if a caller must have a key."""
        return bool(self._keys)

    def tenant(self, key: str | None) -> str | None:
        """Returns the tenant of a key; None when it is nobody's. Every digest is compared, whatever the outcome."""
        self._read_again()
        if not self._keys:
            return ANONYMOUS
        digest = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).digest()
        found = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known.tenant
        return found

    def _look(self) -> list[tuple[int, int, int] | None]:
        """Returns what tells one content of each file from the next; None: it cannot be seen."""
        return [_stamp(path) for _, path in self._files]

    def _read(self) -> tuple[ApiKey, ...]:
        return self._fixed + tuple(key for option, path in self._files for key in _read_file(path, option))

    def _read_again(self) -> None:
        """Take in files that have changed; looks once in LOOK_S."""
        now = time.monotonic()
        if not self._files or now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_S
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._keys = self._read()
            logger.info("API keys were read again: %d", len(self._keys))
        except ConfigError as error:
            logger.warning("the API keys stay as they were: %s", error.message)


class Authentication:
    """Lets in who has a key, by `Authorization: Bearer` or `x-api-key`, and writes the tenant into the state."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; 401 in the dialect of the route."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        key = _key_of(Headers(scope=scope))
        tenant = self._keys.tenant(key)
        if tenant is None and not _is_open(scope["path"]):
            words = "no API key: send it as `Authorization: Bearer` or `x-api-key`" if key is None else "wrong API key"
            await error_response(AuthenticationError(words), scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant or ANONYMOUS
        await self._app(scope, receive, send)


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).expanduser().stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def _key_of(headers: Headers) -> str | None:
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")


def _read_list(text: str, variable: str) -> list[ApiKey]:
    entries = text.replace(",", " ").split()
    if not entries:  # as a secret that was not filled in leaves it
        raise ConfigError(f"{variable} is set but holds no key: give one, or unset it", param="api_keys")
    return [ApiKey.parse(entry, f"{variable}, key {i}") for i, entry in enumerate(entries, 1)]


def _read_file(name: str, option: str) -> list[ApiKey]:
    if not name.strip():
        raise ConfigError(f"{option} is set but names no file: give one, or unset it", param="api_keys_file")
    path = Path(name).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror}", param="api_keys_file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}: {path} is no text: {error}", param="api_keys_file") from None
    entries = [(i, line.strip()) for i, line in enumerate(lines, 1)]
    keys = [ApiKey.parse(line, f"{path}:{i}") for i, line in entries if line and not line.startswith("#")]
    if not keys:  # an empty file must not open the server
        raise ConfigError(f"{option}: {path} holds no key", param="api_keys_file")
    return keys
