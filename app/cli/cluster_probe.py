"""Asks a Ray cluster what it has and what Serve runs there; prints one JSON object. `python -m app.cli.cluster_probe`.

A process of its own, because Ray's client cannot be interrupted: it prints and retries for minutes where nothing
answers or a token is wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(address: str) -> dict[str, Any]:
    """`cpus`, `gpus` and `serve` (port and application names, None when there is none); or `error` with `kind`."""
    import ray
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs
    from ray.exceptions import AuthenticationError

    try:
        resolved = address if "://" in address else canonicalize_bootstrap_address(address)
        if resolved is None:
            return {"kind": "gone", "error": "no cluster runs on this machine"}
        if "://" not in resolved:
            GcsClient(address=resolved)  # says at once that a token is wrong; `ray.init` tries for 20 s
        ray.init(address=resolved, namespace="serve", log_to_driver=False, logging_level="ERROR")
        total = ray.cluster_resources()
        found = {"cpus": total.get("CPU", 0.0), "gpus": total.get("GPU", 0.0), "serve": _serve()}
        return {"address": resolved, **found}
    except AuthenticationError as error:
        return {"kind": "token", "error": str(error).splitlines()[0]}
    except Exception as error:
        return {"kind": "gone", "error": (str(error).splitlines() or [type(error).__name__])[0]}


def _serve() -> dict[str, Any] | None:
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    details = client.get_serve_details()
    return {"port": details["http_options"]["port"], "applications": sorted(details.get("applications") or {})}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])), flush=True)
