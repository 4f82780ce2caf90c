"""The page of all commands and their options, made from the parser of `manta`: `python -m tools.cli_docs`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from app.cli import COMMANDS
from app.cli.parser import build_parser
from tools.markdown import cell, table

INTRODUCTION = """# Command line

Every command of `manta` and all of its options, as `manta COMMAND --help` prints them. Names may be written with dashes
or underscores. [What the commands are for](manta.md).
"""


def page() -> str:
    """The page's text."""
    out = [INTRODUCTION]
    for name, parser in subparsers().items():
        out += [f"\n## manta {name}\n", f"{parser.description}\n", f"```text\n{parser.usage}\n```"]
        for group in parser._action_groups:
            if group._group_actions:
                title = {"positional arguments": "Arguments", "options": "Options"}.get(group.title or "", group.title)
                out += [f"\n**{title}**\n", *table(("", "meaning"), _rows(parser, group._group_actions))]
    return "\n".join(out) + "\n"


def subparsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    actions = build_parser(COMMANDS)._actions
    return dict(next(each for each in actions if isinstance(each, argparse._SubParsersAction)).choices)


def _rows(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> Iterator[tuple[str, str]]:
    """What is typed, and what it means."""
    formatter = parser._get_formatter()
    for action in actions:
        place = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
        typed = ", ".join(action.option_strings) if action.option_strings else ""
        text = formatter._expand_help(action) if action.help else ""
        yield f"`{cell(f'{typed} {place}'.strip())}`", cell(text)


if __name__ == "__main__":
    print(page(), end="")
