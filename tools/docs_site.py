"""What MkDocs asks while it builds the site (`hooks` in mkdocs.yml).

Pages that stand outside of docs/ and pages that are made from the code join it under the names of PAGES and GENERATED;
links between them are turned to where their targets are on the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools import cli_docs, config_docs, performance_charts

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # file of the repository -> page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "performance.md",
    "benchmarks/history/gpus_to_2026-11-23.md": "performance_to_2026-11-23.md",
    "benchmarks/history/gpu_tests.md": "earlier_gpu_tests.md",
    "app/assets/tiny-chat/README.md": "tiny-chat.md",
    "app/assets/tiny-chat-hears/README.md": "tiny-chat-hears.md",
    "app/assets/tiny-chat-sees/README.md": "tiny-chat-sees.md",
}
GENERATED: dict[str, Callable[[], str]] = {"configuration.md": config_docs.page, "cli.md": cli_docs.page}
SECTION = "How to"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
BLOCK = re.compile(r"- |\d+\. |\|")  # the first line of a list's item, or of a table


def on_config(config: MkDocsConfig) -> None:
    """Put the pages of docs/ that the navigation does not name to the end of SECTION."""
    named = set(_names(config.nav))
    section = next(entry[SECTION] for entry in config.nav or () if SECTION in entry)
    section += [path.name for path in sorted(Path(config.docs_dir).glob("*.md")) if path.name not in named]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add what does not stand in docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        content = performance_charts.page(text) if page == "performance.md" else text
        files.append(File.generated(config, page, content=content))
    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page's text as MkDocs needs it; errors about it name the page."""
    return site_text(markdown, page.file.src_uri)


def site_text(markdown: str, page: str) -> str:
    """`markdown` with links that lead to pages of the site, and a blank line before each list and table.

    GitHub's Markdown needs no such line. A link to what is no page (code, folders) becomes its text.
    """
    source = next((name for name, made in PAGES.items() if made == page), f"docs/{page}")
    lines, before, fenced = [], "", False
    for line in markdown.split("\n"):
        if line.startswith("```"):
            fenced = not fenced
        if not fenced:
            line = LINK.sub(lambda match: _link(match, source), line)
            if BLOCK.match(line) and before.strip() and not BLOCK.match(before) and not before.startswith(" "):
                lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines)


def _link(match: re.Match[str], source: str) -> str:
    image, text, target = match.groups()
    path, hash_sign, anchor = target.partition("#")
    if not path or ":" in path:
        return match.group()
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = PAGES.get(found, found.removeprefix("docs/") if found.startswith("docs/") else None)
    return text if page is None else f"{image}[{text}]({page}{hash_sign}{anchor})"


def _names(nav: Any) -> Iterator[str]:
    """Every page that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _names(part)
