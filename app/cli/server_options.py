"""The options of every command that talks to a running server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from app.cli.stream_client import Server

KEY_VARIABLES = ("MANTA_API_KEY", "OPENAI_API_KEY")  # the first that is set
DEFAULT_URL = "http://127.0.0.1:8000"


def add_server(parser: Any) -> None:
    """--url, --api-key and --model, to a parser or to a group of its options."""
    parser.add_argument("--url", default=DEFAULT_URL, help="server to talk to (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help=f"(default: {' or '.join(KEY_VARIABLES)} of the environment)")
    parser.add_argument("--model", help="name of the model (default: the server's first)")


def server_given(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Server:
    """Returns where to talk to, with the key of the option or of the environment. ConfigError on what is no address."""
    key = args.api_key or next((environ[name] for name in KEY_VARIABLES if environ.get(name)), None)
    return Server(args.url, key)
