"""`manta save-sharded`: a model's weights, cut for the ranks of one layout, so that each reads its own file only."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli.command import Command
from app.cli.options import add_options, build, given, options_of
from app.config.engine import EngineConfig
from app.models.model_check import check_model
from app.records.parallel_plan import LAYOUT, layout_flags

_FIELDS = {
    "load_format",
    "model_impl",
    "dtype",
    "runner",
    "pipeline_partition",
    *LAYOUT,
}
_OPTIONS = tuple(options_of(EngineConfig, skip=EngineConfig.model_fields.keys() - _FIELDS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments: where from, where to, for which layout."""
    parser.add_argument("model", metavar="MODEL", help="a model directory or a built-in model")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="a new directory")
    add_options(parser, "layout", _OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Cut and write; a line for each rank."""
    config = build(EngineConfig, {("model",): args.model, **given(args, _OPTIONS)}, _OPTIONS)
    check_model(config)
    from app.worker.save_sharded import save_sharded

    save_sharded(config, args.output, lambda rank: print(f"rank {rank + 1} of {config.world_size} saved", flush=True))
    print(f"serve it with: manta serve {args.output} {layout_flags(config)}")
    return 0


COMMAND = Command("cut a model's weights for the ranks of one layout", add_arguments, run)
