"""The command `manta`: one file per subcommand, one line each in COMMANDS.

A mistake of the user ends as one line on stderr and exit code 2, never as a traceback; a failure outside (no server,
failed requests) ends with 1. Heavy packages (torch, Ray) are imported only inside the commands that need them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from app.cli.command import Command, CommandError
from app.cli.parser import build_parser, parse
from app.cli.vllm_command_line import translate
from app.errors import ConfigError, EngineDeadError, MantaError
from app.registry import Registry

COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "serve": "app.cli.serve:COMMAND",
        "chat": "app.cli.chat:COMMAND",
        "generate": "app.cli.generate:COMMAND",
        "run-batch": "app.cli.batch.command:COMMAND",
        "bench": "app.cli.bench.command:COMMAND",
        "drain": "app.cli.drain:COMMAND",
        "config": "app.cli.config:COMMAND",
        "models": "app.cli.models:COMMAND",
        "save-sharded": "app.cli.save_sharded:COMMAND",
        "quantize": "app.cli.quantize:COMMAND",
        "convert": "app.converters.convert:COMMAND",
        "convert-tokenizer": "app.converters.convert_tokenizer:COMMAND",
        "check-determinism": "app.cli.check_determinism:COMMAND",
        "collect-env": "app.cli.collect_env:COMMAND",
    },
)
# What commands of earlier versions became.
MOVED = {"run": "run-batch IN OUT.jsonl, which takes the same lines and options"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0, 1 for a failure outside, 2 for a mistake in what was asked."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in MOVED:
            raise ConfigError(f"manta {arguments[0]} is now manta {MOVED[arguments[0]]}")
        if arguments[:1] == ["serve"]:
            ours, notes = translate(arguments[1:])
            arguments = ["serve", *ours]
            for note in notes:
                print(f"manta: {note}", file=sys.stderr)
        args = parse(build_parser(COMMANDS, next(iter(arguments), None)), arguments)
        return COMMANDS.load(args.command).run(args)
    except MantaError as error:
        for line in error.message.splitlines() or [type(error).__name__]:
            print(f"manta: error: {line}", file=sys.stderr)
        return 1 if isinstance(error, CommandError | EngineDeadError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe went away; Python would complain once more when it flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
