"""The status page in a real browser: figures from scripted metrics against what they must come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.telemetry.exposition import render
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot
from tests.api.pages.browser import ENTER, Browser


class Engines:
    """Two replicas' real recorders; the exposition is the one that the ingress renders."""

    def __init__(self) -> None:
        self.recorders = {
            index: MetricsRecorder({"model_name": 'm "x"', "engine": str(index)}, max_tokens=512) for index in range(2)
        }
        for recorder in self.recorders.values():
            recorder.set("vllm:cache_config_info", 1, "16", "100", "1600", "12.5")
        self.total = 0

    def set(self, index: int, **values: float) -> None:
        names = {"hits": "prefix_cache_hits_total", "queries": "prefix_cache_queries_total"}
        names |= {"output": "generation_tokens_total", "running": "num_requests_running"}
        names |= {"waiting": "num_requests_waiting", "kv": "kv_cache_usage_perc"}
        for name, value in values.items():
            self.recorders[index].set(f"vllm:{names[name]}", value)

    async def text(self) -> str:
        self.total += 150
        self.set(0, output=self.total)
        self.recorders[1].observe("vllm:time_to_first_token_seconds", 0.03)
        return render([decode_snapshot(recorder.snapshot()) for recorder in self.recorders.values()])


@pytest.fixture
def engines(client: Any) -> Engines:
    made = Engines()
    made.set(0, running=3, waiting=1, kv=0.5, hits=30, queries=40)
    made.set(1, running=2, waiting=0, kv=0.25, hits=0, queries=0)
    client.metrics_text = made.text
    return made


def tile(browser: Browser, title: str) -> str:
    script = """return [...document.querySelectorAll('#tiles section')]
      .find((tile) => tile.querySelector('h3').textContent === arguments[0]).querySelector('.figure').textContent"""
    text: str = browser.run(script, title)
    return text


def test_figures(browser: Browser, server: Any, engines: Engines) -> None:
    browser.open(f"{server.url}/status")
    browser.wait_for_text("#health", "Healthy: 2 replicas.")
    assert tile(browser, "Requests running") == "5"
    assert tile(browser, "Requests waiting") == "1"
    assert tile(browser, "KV cache in use") == "38 %"
    rows = browser.run(
        "return [...document.querySelectorAll('#replicas tr')].map((r) => [...r.cells].map((c) => c.innerText.trim()))"
    )
    assert [row[:6] for row in rows] == [
        ['m "x"', "0", "3", "1", "50 % of 1,600 tokens", "75 %"],
        ['m "x"', "1", "2", "0", "25 % of 1,600 tokens", "–"],
    ]
    engines.set(0, hits=40, queries=80)
    browser.wait_for("!document.querySelector('.figure').textContent.includes('–')")
    # 150 tokens each reading, one every 1.5 seconds and what a reading takes.
    assert 60 <= float(tile(browser, "Output tokens/s")) <= 101
    assert tile(browser, "Prefix cache hits") == "25 %"
    assert tile(browser, "TTFT, median") == "30.0 ms"
    assert len(browser.run("return document.querySelector('#tiles path:last-child').getAttribute('d')")) > 10
    assert browser.complaints() == []


def test_trouble_is_said(browser: Browser, client: Any, server: Any, engines: Engines) -> None:
    client.healthy = False
    browser.open(f"{server.url}/status")
    browser.wait_for_text("#health", "A model has no replica that can make progress (2 replicas answering).")
    client.healthy = True
    browser.wait_for_text("#health", "Healthy: 2 replicas.")
    server.__exit__(None, None, None)
    browser.wait_for_text("#health", f"No answer from {server.url} since")
    assert tile(browser, "Requests running") == "5"


METRICS = """
const done = arguments[arguments.length - 1];
import("/pages/metrics.js").then(({ Reading, rate, share, quantile }) => {
  const [before, now] = [new Reading(arguments[0], 10), new Reading(arguments[1], 12)];
  const quantiles = [0.5, 0.99].map((q) => quantile("t", q, now, before));
  done([rate("c", now, before), share("h", "q", now, before), ...quantiles]);
}, (error) => done(String(error)));
"""


def exposition(counter: float, hits: int, queries: int, buckets: tuple[int, ...]) -> str:
    labels = '{model_name="m",engine="0"}'
    lines = [
        f"vllm:num_requests_running{labels} 1",
        f"c{labels} {counter}",
        f"h{labels} {hits}",
        f"q{labels} {queries}",
    ]
    for bound, count in zip(("1.0", "2.0", "+Inf"), buckets, strict=True):
        lines.append(f't_bucket{{model_name="m",engine="0",le="{bound}"}} {count}')
    return "\n".join(["# HELP c Some text.", *lines]) + "\n"


def test_api_key(browser: Browser, make_server: Callable[[Any], Any], guarded: Any, engines: Engines) -> None:
    url = make_server(guarded).url
    browser.open(f"{url}/status")
    browser.wait_for_text("#health", "The figures need an API key.")
    browser.type(".key-form input", "wrong-key" + ENTER)
    browser.wait_for_text(".key-form p", "This API key is not accepted by the server.")
    browser.type(".key-form input", "right-key" + ENTER)
    browser.wait_for_text("#health", "Healthy: 2 replicas.")
    assert tile(browser, "Requests running") == "5"
    assert browser.texts(".key-form") == []
    browser.open(url)  # the chat page of the same tab has the key
    browser.wait_for("document.querySelector('#model').value === 'm'")


def test_rates_shares_and_quantiles(browser: Browser, server: Any) -> None:
    browser.open(server.url)
    first, then = exposition(5, 1, 10, (4, 4, 4)), exposition(9, 4, 20, (4, 14, 14))
    script = {"script": METRICS, "args": [first, then]}
    assert browser.call("POST", "/execute/async", script) == pytest.approx([2.0, 0.3, 1.5, 1.99])
    restarted = {"script": METRICS, "args": [then, exposition(3, 0, 0, (0, 0, 0))]}
    assert browser.call("POST", "/execute/async", restarted) == [1.5, None, None, None]


def test_two_tiles_beside_each_other_on_a_phone(browser: Browser, server: Any, engines: Engines) -> None:
    browser.resize(390, 800)
    browser.open(f"{server.url}/status")
    browser.wait_for_text("#health", "Healthy: 2 replicas.")
    first, second = browser.run(
        "return [...document.querySelectorAll('#tiles section')].slice(0, 2).map((e) => e.getBoundingClientRect().top)"
    )
    assert first == second
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
