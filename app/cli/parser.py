"""The argument parser: errors are ConfigErrors of one line, and an unknown option suggests the one that was meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from app.cli.command import Command
from app.errors import ConfigError
from app.registry import Registry
from app.version import VERSION


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise the error as one line that points to the help."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser(commands: Registry[Command], named: str | None = None) -> Parser:
    """One subparser for each command, or for the one that is `named`: most of what the others import it has no use
    for."""
    parser = Parser(prog="manta", description="Serve, try and measure large language models.")
    parser.add_argument("--version", action="version", version=f"manta {VERSION}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in [named] if named is not None and named in commands else commands:
        command = commands.load(name)
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        positionals = subparser._get_positional_actions()
        names = [str(action.metavar or action.dest.upper()) for action in positionals]
        places = [
            f"[{name}]" if action.nargs in ("?", "*") else name for name, action in zip(names, positionals, strict=True)
        ]
        subparser.usage = " ".join([f"manta {name}", *places, "[options]"])
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; options may be written with underscores too. ConfigError names the first one at fault."""
    args, unknown = parser.parse_known_args([_with_dashes(word) for word in argv])
    options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if options:
        close = difflib.get_close_matches(options[0], _options(parser, args.command), 1)
        hint = f"did you mean {close[0]}?" if close else f"manta {args.command} --help lists them"
        raise ConfigError(f"{options[0]}: no such option; {hint}")
    if unknown:
        raise ConfigError(f"unexpected argument {unknown[0]!r}; manta {args.command} --help says what it takes")
    return args


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    if not name.startswith("--") or " " in name:
        return word
    return name.replace("_", "-") + equals + value


def _options(parser: Parser, command: str) -> list[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices[command]._option_string_actions)
    return []
