"""`manta models`: the architectures that are served, and what each is served for."""

from __future__ import annotations

import argparse

from app.cli.command import Command
from app.engine.models import MODELS, POOLING_MODELS

MODES = {"generate": frozenset(MODELS), "pooling": frozenset(POOLING_MODELS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option."""
    parser.add_argument("--runner", choices=sorted(MODES), help="only what is served so")


def run(args: argparse.Namespace) -> int:
    """A line for each architecture, as `architectures` of config.json names it."""
    wanted = {mode: table for mode, table in MODES.items() if args.runner in (None, mode)}
    names = sorted({name for table in wanted.values() for name in table})
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {', '.join(mode for mode, table in wanted.items() if name in table)}")
    return 0


COMMAND = Command("the architectures that are served", add_arguments, run)
