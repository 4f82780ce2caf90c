"""The ports of Serve itself, beside the one that clients use: two Serves on a machine cannot share them.

HAProxy fails on one that is taken, with a line in a log only. The fallback proxy does not fail: its socket has
SO_REUSEPORT, so that two Serves would answer each other's requests until their first ingress stands.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from app.errors import ConfigError

if TYPE_CHECKING:
    from app.cli.configuration import Configuration

SERVE_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
}


def taken_port(document: dict[str, Any]) -> str | None:
    """The first of these ports that `document` wants and that another holds, as a line; None when all are free."""
    variables = _variables(document)
    if not _has_haproxy(variables):
        return None
    for name, default in SERVE_PORTS.items():
        port = str(variables.get(name, default))
        if port.isdigit() and not is_free(int(port)):
            return (
                f"port {port} ({name}) is taken, likely by another Serve on this machine: stop it, set {name} in the "
                "env_vars of a YAML, or give --port, with which free ones are chosen"
            )
    return None


def choose_ports(configuration: Configuration) -> dict[str, int]:
    """Puts free ports into a document that is written anew, for those that nobody has set and that are taken."""
    document, chosen = configuration.document, dict[str, int]()
    variables = _variables(document)
    if not configuration.changed or not _has_haproxy(variables):
        return chosen
    for name, default in SERVE_PORTS.items():
        if name not in variables and not is_free(default):
            chosen[name] = _free_port({configuration.address[1], *SERVE_PORTS.values(), *chosen.values()})
    places = [document["controller_options"], *(document["applications"][i] for i in configuration.applications)]
    for place in places if chosen else ():
        environment = place.setdefault("runtime_env", {}).setdefault("env_vars", {})
        environment.update({name: str(port) for name, port in chosen.items()})
    return chosen


def is_free(port: int, host: str = "0.0.0.0") -> bool:
    """True if something could listen on `port` of this machine."""
    try:
        bind(host, port)
    except OSError:
        return False
    return True


def bind(host: str, port: int) -> None:
    """OSError (socket.gaierror for an unknown host) when nothing can listen there."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _free_port(others: set[int]) -> int:
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("0.0.0.0", 0))
            port = int(probe.getsockname()[1])
        if port not in others:
            return port
    raise ConfigError(f"no free port for Serve: set {', '.join(SERVE_PORTS)} in the env_vars of a YAML")


def _variables(document: dict[str, Any]) -> dict[str, str]:
    """The environment of Serve's controller."""
    runtime_env = (document.get("controller_options") or {}).get("runtime_env") or {}
    return {**os.environ, **(runtime_env.get("env_vars") or {})}


def _has_haproxy(variables: dict[str, str]) -> bool:
    return variables.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
