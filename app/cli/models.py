"""`manta models`: the architectures that are served, what each is served for, and what it can then."""

from __future__ import annotations

import argparse
from typing import Any

from app.checkpoints.transformers_catalog import causal_architectures, entry_of
from app.cli.command import Command
from app.models import MODELS, POOLING_MODELS
from app.registry import Registry

THROUGH = "generate (through transformers)"
MODES: dict[str, Registry[Any]] = {"generate": MODELS, "pooling": POOLING_MODELS}
# What a model can, run so: what generates is split by heads and by layers, what pools by heads.
ABLE = {"generate": "TP, PP, quantized", "pooling": "TP"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option."""
    parser.add_argument("--runner", choices=sorted(MODES), help="only what is served so")


def run(args: argparse.Namespace) -> int:
    """A line for each architecture, as `architectures` of config.json names it, with the package of a plugin."""
    wanted = {mode: table for mode, table in MODES.items() if args.runner in (None, mode)}
    own = {name for table in wanted.values() for name in table}
    through = {
        name for name in causal_architectures() if "generate" in wanted and name not in MODELS and _may_run(name)
    }
    width = max(map(len, own | through))
    for name in sorted(own | through):
        served = {mode: table.plugin(name) for mode, table in wanted.items() if name in table}
        packages = dict.fromkeys(f"  {plugin}" for plugin in served.values() if plugin is not None)
        uses = [*(f"{mode} ({ABLE[mode]})" for mode in served), *([THROUGH] if name in through else [])]
        print(f"{name:<{width}}  {', '.join(uses)}{''.join(packages)}")
    return 0


def _may_run(name: str) -> bool:
    """True if transformers' modules of an architecture take our attention, as far as their source says."""
    entry = entry_of(name)
    return entry is not None and entry.may_run


COMMAND = Command("the architectures that are served", add_arguments, run)
