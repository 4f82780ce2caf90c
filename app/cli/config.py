"""`manta config`: the whole effective configuration, and where each value came from."""

from __future__ import annotations

import argparse

from app.cli.annotated_yaml import annotate
from app.cli.command import Command
from app.cli.configuration import Configuration, YamlPath, resolve
from app.cli.target import add_target, options_given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `manta serve`."""
    add_target(parser)


def run(args: argparse.Namespace) -> int:
    """Print it as YAML: what is printed can be served."""
    configuration = resolve(args.target, options_given(args), args.host, args.port)
    print(annotate(configuration.effective(), lambda place: _origin(configuration, place)), end="")
    return 0


def _origin(configuration: Configuration, place: YamlPath) -> str:
    """The nearest origin known: a list or mapping given as one value has it at its own place."""
    for length in range(len(place), 0, -1):
        origin = configuration.origins.get(place[:length])
        if origin is not None:
            return origin
    return "default"


COMMAND = Command("print the effective configuration and where each value came from", add_arguments, run)
