"""Sets what Manta asks of the HAProxy that Serve puts before the ingresses, beyond what Ray's own settings can say.

Ray renders HAProxy's configuration from environment variables of the controller. The one for `retry-on` is written as
it is into the section `defaults`, after all options and timeouts there, so further lines of it are further settings.
This way they need neither a file nor a path on any node: the Serve YAML carries them to `serve run`, `serve deploy`
and KubeRay alike. What Ray does with the variable may change with its version: the server says at its start whether
the settings are in force.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

logger = logging.getLogger("manta.haproxy")

RAY_VERSION = "2.60"  # whose template SETTINGS were written for (ray/serve/_private/haproxy_templates.py)
SETTINGS = (
    # Ray turns both options on. By the first, HAProxy 2.8 misses that a client left whose body came after its headers,
    # as it does with the OpenAI SDK and `requests`: the request runs to its end, and HAProxy spins. Streams of small
    # pieces gain nothing by the second, and its pipes cost a file descriptor for every other connection.
    "no option splice-request",
    "no option splice-response",
    # Time to the end of the headers: a connection that never gets there would hold its place for good.
    "timeout http-request 10s",
)
ENVIRONMENT = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "\n".join(("conn-failure", *SETTINGS)),
    # A client's silence: it neither sends the rest of its body nor reads its answer; waiting for one does not count.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "120",
    # Connections; HAProxy wants two file descriptors for each, and does not start where the hard limit is lower.
    "RAY_SERVE_HAPROXY_MAXCONN": "8000",
}
CONFIG_FILE = "/tmp/haproxy-serve/haproxy.cfg"  # Ray's default; it puts a directory named by the node in between


OFF = (
    "HAProxy is off (RAY_SERVE_ENABLE_HA_PROXY is not 1), so Serve's own proxy takes the requests: a Python process, "
    "which costs CPU for each token and cancels whatever a request has begun when its client leaves. Copy env_vars of "
    "configs/serve/quickstart.yaml into controller_options and into the application"
)


def warn_of_lost_settings(node_id: str, environ: Mapping[str, str] = os.environ) -> None:
    """One warning where HAProxy runs without our settings: by its configuration file where that is on this node, else
    by the environment, which is meant to be the controller's too."""
    place = Path(environ.get("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC") or CONFIG_FILE)
    try:
        text = (place.parent / node_id / place.name).read_text(encoding="utf-8")
    except OSError:
        text = None
    if (fault := lost_settings(environ, text)) is not None:
        logger.warning("%s", fault)


def lost_settings(environ: Mapping[str, str], text: str | None = None) -> str | None:
    """Says what HAProxy lacks by its configuration `text`, else by `environ`, and what follows; None where all is
    well."""
    if environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        return OFF
    given = environ.get("RAY_SERVE_HAPROXY_RETRY_ON", "") if text is None else text
    lines = {line.strip() for line in given.splitlines()}
    lost = [setting for setting in SETTINGS if setting not in lines]
    if not lost:
        return None
    return (
        f"HAProxy runs without {', '.join(map(repr, lost))}: requests may run on after their clients have left, and "
        "unfinished headers lock others out. Copy RAY_SERVE_HAPROXY_RETRY_ON of configs/serve/quickstart.yaml into the "
        f"env_vars of controller_options and of the application (written for Ray {RAY_VERSION}; this is "
        f"{version('ray')})"
    )
