"""What stands on the pages is so: links lead somewhere, commands parse, Python compiles."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from app.cli import COMMANDS
from app.cli.parser import Parser, build_parser, parse
from app.errors import ConfigError
from tests.docs.pages import DOCS, LINK, PAGES, ROOT, anchors, blocks, codes, name_of, prose

MADE = {"configuration.md", "cli.md"}  # by the site's build
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert not broken


def commands(text: str) -> list[str]:
    """Commands of `manta` and `make` in blocks of shell and in inline code, without variables before them."""
    lines = [line for block in blocks(text, "sh", "bash") for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    lines += [code for code in codes(prose(text)) if "[" not in code]
    found = [re.fullmatch(r"(?:\w+=\S+ )*(?:\.venv/bin/)?((?:manta|make) +[a-z].*)", line.strip()) for line in lines]
    return [match[1] for match in found if match]


@cache
def parser() -> Parser:
    return build_parser(COMMANDS)


def complaint(command: str) -> str | None:
    """What the program that runs it would say of its arguments."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        missing = [word for word in words[1:] if "=" not in word and word not in TARGETS]
        return f"no target {missing[0]}" if missing else None
    try:
        parse(parser(), [word for word in words[1:] if word != "--help"])
    except ConfigError as error:
        # Prose names a command alone; what it needs stands beside it.
        return None if len(words) == 2 and words[1] in COMMANDS else error.message
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse(page: Path) -> None:
    assert {command: said for command in commands(page.read_text()) if (said := complaint(command))} == {}


def test_what_does_not_parse() -> None:
    block = "A=1 .venv/bin/manta serve x --max-modl-len 3  # c\nmanta \\\n chat --nope\nmake lunch X=1\n"
    text = f"```sh\n{block}```\n`make tea`"
    found = commands(text)
    assert len(found) == 4
    assert all(map(complaint, found))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_compiles(page: Path) -> None:
    for block in blocks(page.read_text(), "python", "py"):
        compile(block, name_of(page), "exec")


def test_pages_are_found() -> None:
    assert len(PAGES) > 20
    assert not MADE & {path.name for path in DOCS.glob("*.md")}, "made by the site's build"
    assert sum(len(commands(page.read_text())) for page in PAGES) > 30


def test_the_readme_takes_ten_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150, "what is deeper goes to docs/"
