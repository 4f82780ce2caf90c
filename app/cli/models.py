"""`manta models`: the architectures that are served, and what each is served for."""

from __future__ import annotations

import argparse
from typing import Any

from app.cli.command import Command
from app.engine.models import MODELS, POOLING_MODELS
from app.registry import Registry

MODES: dict[str, Registry[Any]] = {"generate": MODELS, "pooling": POOLING_MODELS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option."""
    parser.add_argument("--runner", choices=sorted(MODES), help="only what is served so")


def run(args: argparse.Namespace) -> int:
    """A line for each architecture, as `architectures` of config.json names it, with the package of a plugin."""
    wanted = {mode: table for mode, table in MODES.items() if args.runner in (None, mode)}
    names = sorted({name for table in wanted.values() for name in table})
    width = max(map(len, names))
    for name in names:
        served = {mode: table.plugin(name) for mode, table in wanted.items() if name in table}
        packages = dict.fromkeys(f"  {plugin}" for plugin in served.values() if plugin is not None)
        print(f"{name:<{width}}  {', '.join(served)}{''.join(packages)}")
    return 0


COMMAND = Command("the architectures that are served", add_arguments, run)
