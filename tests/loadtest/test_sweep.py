"""The sweep: its command line, its report over a scripted server, and (slow) over the quickstart."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.serve_process import ROOT
from loadtest.sweep import build_parser, main
from tests import limits
from tests.loadtest.conftest import TTFT_S, ScriptedServer


class _Outside(HTMLParser):
    """Collects what a page would load from elsewhere, and checks that its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "line", "polyline", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline", "circle"):
            assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--host --serve"),
        (["--host", "http://x"], "--users --rates"),
        (["--host", "http://x", "--users", "1", "--rates", "1"], "not allowed with"),
        (["--host", "http://x", "--users", "1,x"], "'x' is not a positive number"),
        (["--host", "http://x", "--users", "1.5"], "not whole numbers"),
        (["--host", "http://x", "--rates", "0"], "'0' is not a positive number"),
        (["--host", "http://x", "--users", "1", "--goodput", "speed:3"], "--goodput: 'speed:3'"),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--help"])
    assert "--warmup" in capsys.readouterr().out


def test_report_of_rates(scripted: ScriptedServer, tmp_path: Path) -> None:
    options = ["--duration", "3", "--warmup", "1", "--goodput", "ttft:60000"]
    status = main(["--host", scripted.url, "--rates", "4,12", "--out", str(tmp_path), *options])
    assert status == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [level["load"] for level in summary["levels"]] == [4, 12]
    slow, fast = (level["summary"] for level in summary["levels"])
    assert slow["requests_per_s"] < fast["requests_per_s"]
    assert fast["goodput_per_s"] > 0
    assert 1e3 * TTFT_S <= fast["latency"]["ttft"]["p50_ms"] < fast["latency"]["e2e"]["p50_ms"]
    assert all(level["client_cores"] > 0 for level in summary["levels"])
    page = (tmp_path / "report.html").read_text()
    outside = _Outside()
    outside.feed(page)
    assert outside.loaded == []  # nothing beside the page is needed
    assert outside.open == []
    assert page.count("<svg") == 4 + 2 * 2  # four plots of the sweep, two of each level
    assert "No request failed" in page
    assert (tmp_path / "rate-4_stats.csv").exists()


def test_failures_show(scripted: ScriptedServer, tmp_path: Path) -> None:
    options = ["--duration", "2", "--warmup", "1", "--kinds", "ChatUser", "--locust", "--model error"]
    assert main(["--host", scripted.url, "--users", "2", "--out", str(tmp_path), *options]) == 1
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"\d+ requests failed", page)
    assert "the engine died" in page


def test_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--host", "http://127.0.0.1:9", "--users", "1", "--out", str(tmp_path)])
    assert "http://127.0.0.1:9/v1/models: <urlopen error" in capsys.readouterr().err


def test_locust_that_does_not_start(scripted: ScriptedServer, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="NoSuchUser"):
        main(["--host", scripted.url, "--users", "1", "--kinds", "NoSuchUser", "--out", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quickstart_under_every_kind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.sweep", "--serve", "configs/serve/quickstart.yaml", "--users", "2,12",
         "--duration", "20", "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=limits.patience_s(200), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    levels = json.loads((tmp_path / "summary.json").read_text())["levels"]
    assert [level["summary"]["num_failed"] for level in levels] == [0, 0]
    assert len(levels[1]["summary"]["by_kind"]) == 5
