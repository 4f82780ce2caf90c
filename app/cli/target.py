"""The arguments that `manta serve` and `manta config` share: what to serve, where, and every option of it."""

from __future__ import annotations

import argparse
from typing import Any

from app.cli.configuration import SERVE_OPTIONS
from app.cli.options import add_options, given


def add_target(parser: argparse.ArgumentParser) -> None:
    """CONFIG.yaml or MODEL, the address, and the options of the configuration classes."""
    parser.add_argument(
        "target", nargs="?", default="tiny-chat", metavar="CONFIG.yaml|MODEL",
        help="a Serve configuration, a model directory, a built-in model, or one of a hub: organisation/name, or a "
        "well-known name such as qwen3:0.6b (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--host", help="address to listen on (default: the file's, else 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on (default: the file's, else 8000)")
    for title, options in SERVE_OPTIONS.items():
        add_options(parser, f"{title} options", options)


def options_given(args: argparse.Namespace) -> dict[tuple[str, ...], Any]:
    """The configuration's options that were given, by path."""
    return given(args, [option for options in SERVE_OPTIONS.values() for option in options])
