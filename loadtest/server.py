"""What the load generator asks a server before the load begins."""

from __future__ import annotations

import json
import urllib.request


def authorization(api_key: str) -> dict[str, str]:
    """Headers that carry the key; none without one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def first_model(host: str, api_key: str) -> str:
    """The first model that the server lists. OSError says what went wrong: no answer, or not a list of models."""
    url = f"{host.rstrip('/')}/v1/models"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=authorization(api_key)), timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except OSError as error:
        raise OSError(f"{url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise OSError(f"{url} does not list models as OpenAI's API does") from error
