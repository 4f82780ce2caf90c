"""Short questions to an OpenAI-compatible server: its models, and its tokenizer where it shows it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from app.cli.command import CommandError
from app.cli.stream_client import Server

TIMEOUT_S = 20.0


def list_models(server: Server) -> list[str]:
    """Names that may stand in `model`. CommandError when no server answers, or not as one."""
    answer = ask(server, "/v1/models")
    names = [entry.get("id") for entry in answer.get("data") or [] if isinstance(entry, dict)]
    if not names:
        raise CommandError(f"{server.base}/v1/models lists no model: is this an OpenAI-compatible server?")
    return [str(name) for name in names]


def choose_model(server: Server, name: str | None) -> str:
    """`name` if the server knows it, its first model if none is given."""
    names = list_models(server)
    if name is not None and name not in names:
        raise CommandError(f"{server.base} serves no model {name!r}; it serves {', '.join(names)}")
    return name or names[0]


def ask(server: Server, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET, or POST of `body`. CommandError says in one line why there is no answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.base + path, data=data, headers=server.headers())
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        hint = f"; {_key_hint(server)}" if error.code == 401 else ""
        raise CommandError(f"{server.base}{path}: HTTP {error.code} {error.reason}{hint}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise CommandError(
            f"no server answers at {server.base} ({reason}): start one with `manta serve`, or give its --url"
        ) from None
    except ValueError:
        raise CommandError(
            f"{server.base}{path} does not answer in JSON: is this an OpenAI-compatible server?"
        ) from None
    if not isinstance(answer, dict):
        raise CommandError(f"{server.base}{path} answers {str(answer)[:80]!r}: is this an OpenAI-compatible server?")
    return answer


def _key_hint(server: Server) -> str:
    if server.api_key:
        return "the key is not accepted; give another with --api-key or MANTA_API_KEY"
    return "the server wants a key; give it with --api-key or MANTA_API_KEY"
