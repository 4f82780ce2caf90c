"""The documentation site builds without a warning, and has what it should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.configuration import SERVE_OPTIONS
from tests.docs.pages import DOCS, ROOT
from tests.limits import patience_s
from tools import cli_docs, config_docs, performance_charts

pytest.importorskip("mkdocs", reason="needs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience_s(), check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_navigation(site: Path) -> None:
    pages = {f"{path.stem}.html" for path in DOCS.glob("*.md")}
    navigation = (site / "404.html").read_text()
    links = {Path(link).name for link in re.findall(r'href="([^"#]+\.html)"', navigation)}
    assert pages | {"index.html", "performance.html", "contributing.html", "configuration.html", "cli.html"} <= links


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\"\s>]+)", text)
        loaded += re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?([^\"\s>]+)", text)
        loaded += re.findall(r"<link[^>]*href=\"?([^\"\s>]+)[^>]*rel=\"?stylesheet", text)
        assert loaded or page.name.startswith("loadtest-"), page.name
        assert not [url for url in loaded if "//" in url], page.name


def test_the_picture_and_the_lists(site: Path) -> None:
    page = (site / "design.html").read_text()
    assert 'src="graph.svg"' in page
    assert (site / "graph.svg").exists()
    assert "<li>Metrics: prometheus-client writes the page" in page, "a list right below its sentence"


def test_the_charts_show_the_figures_of_the_json(site: Path) -> None:
    page = (site / "performance.html").read_text()
    figures = json.loads((ROOT / "benchmarks/side_by_side.json").read_text())
    assert page.count("<svg class=chart") + page.count('<svg class="chart"') == len(figures["decode_ms"])
    for row in figures["decode_ms"].values():
        for who in ("Manta", "vLLM"):
            for batch, ms in row[who]:
                assert f"<title>{who}: {ms:.4g} at {batch}</title>" in page
    assert "<title>floor: 3.508 at 1</title>" in page, "Llama-8B's weights at the memory's speed"


def test_the_readme_shows_the_figures_of_the_json() -> None:
    assert (ROOT / "README.md").read_text() == performance_charts.readme(), "python -m tools.performance_charts --write"


def test_links_between_pages_of_the_repository(site: Path) -> None:
    index = (site / "index.html").read_text()
    assert 'href="performance.html"' in index  # benchmarks/RESULTS.md
    assert 'href="running.html"' in index
    assert "examples</a>" not in index  # a folder


def test_links_in_code_stay() -> None:
    from tools.docs_site import site_text

    text = "see [a](docs/llm.md#x), [b](app/config/)\n- c\n```\n[a](docs/llm.md)\n- d\n```"
    expected = "see [a](llm.md#x), b\n\n- c\n```\n[a](docs/llm.md)\n- d\n```"
    assert site_text(text, "index.md") == expected
    assert site_text("[a](../benchmarks/RESULTS.md) [b](https://x.org/y)", "llm.md") == (
        "[a](performance.md) [b](https://x.org/y)"
    )


def test_a_page_that_the_navigation_does_not_name(tmp_path: Path) -> None:
    from mkdocs.config import load_config

    from tools.docs_site import SECTION, on_config

    for name in ("running.md", "new.md"):
        (tmp_path / name).write_text("# A page")
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(tmp_path))
    on_config(config)
    how_to = next(entry[SECTION] for entry in config.nav if SECTION in entry)
    assert how_to[-1] == "new.md"
    assert "running.md" not in how_to


def test_all_options_of_a_configuration() -> None:
    page = config_docs.page()
    for option in (option for group in SERVE_OPTIONS.values() for option in group):
        assert f"| `{option.flag}` | " in page, option.flag
        assert f"| `{option.path[-1]}` | " in page
    assert "| `block_size` | integer >= 1 | `16` | `--block-size` | Tokens per KV-cache block. |" in page
    assert "| `scheduling_policy` | `fcfs`, `priority` |" in page


def test_all_options_of_the_commands() -> None:
    page = cli_docs.page()
    for name, parser in cli_docs.subparsers().items():
        part = page.partition(f"\n## manta {name}\n")[2].partition("\n## ")[0]
        for action in parser._actions:
            assert action.help is None or all(flag in part for flag in action.option_strings), (name, action.dest)
    assert "manta convert FILE [options]" in page
    assert "None [options]" not in page
