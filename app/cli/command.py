"""Defines a subcommand of `manta`, and the error of what went wrong outside of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import MantaError


class CommandError(MantaError):
    """Something outside failed (a server, a request): exit code 1, where a mistake in the arguments is 2."""


@dataclass(frozen=True, slots=True)
class Command:
    """`run` returns the exit code; a MantaError that it raises is printed as one line."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
