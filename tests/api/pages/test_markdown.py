"""markdown.js, in the browser that runs it; the expected trees are what CommonMark and GitHub's tables say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.pages.browser import Browser

RENDER = """
const done = arguments[arguments.length - 1];
import("/pages/markdown.js").then(({ renderMarkdown }) => {
  const box = document.createElement("div");
  const start = performance.now();
  box.append(renderMarkdown(arguments[0]));
  done([box.innerHTML, performance.now() - start]);
}, (error) => done([String(error), 0]));
"""


def render(browser: Browser, text: str) -> tuple[str, float]:
    html, elapsed_ms = browser.call("POST", "/execute/async", {"script": RENDER, "args": [text]})
    return html, elapsed_ms


@pytest.fixture
def page(browser: Browser, server: Any) -> Browser:
    browser.open(server.url)
    return browser


CASES = {
    "a *b* **c** ***d*** `e*f*` ~~g~~": (
        "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <code>e*f*</code> <del>g</del></p>"
    ),
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    r"\*not\* emphasis": "<p>*not* emphasis</p>",
    "**open": "<p>**open</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# A\n## B #\ntext": "<h3>A</h3><h4>B</h4><p>text</p>",
    "#hashtag": "<p>#hashtag</p>",
    "- a\n- b\n  - c\n    more\n- d": "<ul><li>a</li><li>b<ul><li>c<br>more</li></ul></li><li>d</li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "1. a\n\n2. b\n\nend": "<ol><li><p>a</p></li><li><p>b</p></li></ol><p>end</p>",
    "1. a\n\n   para\n2. b": "<ol><li><p>a</p><p>para</p></li><li><p>b</p></li></ol>",
    "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "&amp; <b> &lt;": "<p>&amp; &lt;b&gt; &lt;</p>",
}


@pytest.mark.parametrize("text", CASES)
def test_blocks_and_spans(page: Browser, text: str) -> None:
    html, _ = render(page, text)
    assert html.replace('<ol start="1">', "<ol>") == CASES[text]


def test_code_keeps_every_character(page: Browser) -> None:
    html, _ = render(page, "```py\nif a < b:\n\n    *x* = `y`\n```\nafter")
    assert "<span>py</span>" in html
    assert "<code>if a &lt; b:\n\n    *x* = `y`</code>" in html
    assert html.endswith("<p>after</p>")
    unclosed, _ = render(page, "```\nstill coming")
    assert "<code>still coming</code>" in unclosed


def test_table(page: Browser) -> None:
    html, _ = render(page, "| a | b |\n|:-:|--:|\n| 1 | `x\\|y` |\n| 2 |\n\nend")
    assert '<th class="center">a</th><th class="right">b</th>' in html
    assert '<td class="center">1</td><td class="right"><code>x|y</code></td>' in html
    assert '<td class="center">2</td><td class="right"></td>' in html
    assert html.endswith("<p>end</p>")


def test_links(page: Browser) -> None:
    html, _ = render(page, '[a](https://x.org/p_(q) "t") https://y.org/a_b. <http://z.org> [m](mailto:a@b.c)')
    for address in ("https://x.org/p_(q)", "https://y.org/a_b", "http://z.org", "mailto:a@b.c"):
        assert f'<a href="{address}" target="_blank" rel="noopener noreferrer nofollow">' in html
    for source in ("[a](javascript:x)", "[a](JaVaScRiPt:x)", "[a](data:text/html,x)", "[a](//x.org)", "[a](/metrics)"):
        assert "<a" not in render(page, source)[0]


HOSTILE = {
    "stars": "*" * 20_000,
    "brackets": "[" * 20_000,
    "ticks": "`" * 20_000,
    "quotes": "> " * 5_000,
    "items": "- " * 5_000,
    "open": "**a " * 5_000,
    "lines": "_a" * 10_000,
    "tables": "|-|\n" * 5_000,
    "deep": "\n".join("  " * i + "- x" for i in range(400)),
    "plain": "word " * 20_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_neither_hangs_nor_overflows(page: Browser, text: str) -> None:
    html, elapsed_ms = render(page, text)
    assert "Error" not in html
    assert elapsed_ms < 5000
