"""`manta bench` against a server whose timings are known."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tests import limits
from tests.cli.conftest import Manta
from tests.cli.fake_server import FakeServer, Script, Seen

TOKENS = {"/tokenize": {"tokens": list(range(100, 160))}}
WARM = Script([0.0], 1, 1)


def test_figures_are_the_servers(manta: Manta, tmp_path: Path) -> None:
    """What the server noted when it sent each event, and what the client reports, agree.

    On a busy machine either side may be held up between the event and its time stamp, so the best of a few runs counts.
    """
    scripts = [Script([0.1 + 0.02 * i, *[0.03 + 0.01 * (i % 3)] * 5], 11, 64) for i in range(8)]
    worst = []
    for _ in range(5):
        with FakeServer([WARM, *scripts], TOKENS) as server:
            done = manta("bench", "--url", server.url, "--num-prompts", 8, "--input-len", 64, "--output-len", 11,
                         "--percentiles", "50,90,99", "--out", tmp_path / "b.json", "--save-detailed",
                         "--goodput", "ttft:10000")  # fmt: skip
        assert done.code == 0, done.err
        assert "time to first token" in done.out
        (heads,) = [line.split() for line in done.out.splitlines() if line.split()[:1] == ["milliseconds"]]
        assert heads == ["milliseconds", "mean", "median", "p90", "p99"], "p50 is the median"
        figures = json.loads((tmp_path / "b.json").read_text())
        assert figures["completed"] == 8
        assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (8 * 64, 8 * 11)
        assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
        assert [len(request["itls"]) for request in figures["requests"]] == [5] * 8
        worst.append(max(abs(figures[key] - value) for key, value in expected_figures(server.seen[1:]).items()))
        if worst[-1] < 15 * limits.slowness(0.0):
            return
    pytest.fail(f"figures are milliseconds off: {worst}")


def expected_figures(seen: list[Seen]) -> dict[str, float]:
    """Milliseconds by the server's clock; eleven tokens each."""
    ttft = [s.sent[0] - s.arrived for s in seen]
    e2el = [s.sent[-1] - s.arrived for s in seen]
    samples = {
        "ttft": ttft,
        "e2el": e2el,
        "tpot": [(e - t) / 10 for e, t in zip(e2el, ttft, strict=True)],
        "itl": np.concatenate([np.diff(s.sent) for s in seen]),
    }
    assert min(ttft) >= 0.099  # the script was kept
    figures = {f"mean_{name}_ms": 1e3 * float(np.mean(each)) for name, each in samples.items()}
    for percentile in (50, 90, 99):
        figures |= {
            f"p{percentile}_{n}_ms": 1e3 * float(np.percentile(each, percentile)) for n, each in samples.items()
        }
    return figures


def test_what_it_sends(manta: Manta) -> None:
    with FakeServer([WARM], TOKENS) as server:
        done = manta("bench", "--url", server.url, "--num-prompts", 3, "--input-len", 20, "--output-len", 4,
                     "--extra-body", '{"temperature": 0}', "--api-key", "k")  # fmt: skip
        seen = server.seen
    assert done.code == 0
    assert [len(s.body["prompt"]) for s in seen] == [20] * 4  # with the warm-up
    assert len({tuple(s.body["prompt"]) for s in seen}) == 4
    for s in seen:
        assert {key: s.body[key] for key in ("model", "max_tokens", "temperature", "ignore_eos")} == {
            "model": "fake", "max_tokens": 4, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        assert s.headers["authorization"] == "Bearer k"


def test_chat(manta: Manta) -> None:
    with FakeServer([WARM]) as server:
        done = manta("bench", "--url", server.url, "--num-prompts", 2, "--endpoint", "chat", "--tokenizer", "tiny-chat",
                     "--input-len", 5, "--no-ignore-eos")  # fmt: skip
    assert done.code == 0
    body = server.seen[-1].body
    assert server.seen[-1].path == "/v1/chat/completions"
    assert body["messages"][0]["role"] == "user"
    assert body["max_completion_tokens"] == 128
    assert "ignore_eos" not in body


def test_request_rate_and_concurrency(manta: Manta) -> None:
    with FakeServer([WARM, Script([0.0, 0.06], 2)], TOKENS) as server:
        manta("bench", "--url", server.url, "--num-prompts", 8, "--request-rate", 20, "--input-len", 4)
        arrivals = [s.arrived for s in server.seen[1:]]
        assert max(arrivals) - min(arrivals) >= 0.15  # eight of them take 0.4 s
        del server.seen[:]
        manta("bench", "--url", server.url, "--num-prompts", 4, "--max-concurrency", 1, "--input-len", 4)
        spans = [(s.arrived, s.sent[-1]) for s in server.seen[1:]]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_failures(manta: Manta) -> None:
    with FakeServer([WARM, Script([0.0], 1), Script([0.0], 1, ending="error")], TOKENS) as server:
        done = manta("bench", "--url", server.url, "--num-prompts", 3, "--input-len", 4, "--max-concurrency", 1)
    assert done.code == 1
    assert "1 completed, 2 failed" in done.out
    assert "failed: 2 x the engine died" in done.err
    with FakeServer([Script([], ending="status")], TOKENS) as server:
        done = manta("bench", "--url", server.url, "--num-prompts", 3)
    assert done.code == 1
    assert done.err.strip() == "manta: error: the warm-up request failed: 400 Bad Request: the context is too short"


def test_mistakes(manta: Manta) -> None:
    assert "--request-rate: 0 is not above 0" in manta("bench", "--request-rate", 0).mistake
    assert "--num-prompts: 0 is less than 1" in manta("bench", "--num-prompts", 0).mistake
    assert "--goodput 'x:1'" in manta("bench", "--goodput", "x:1").mistake
    assert "--percentiles" in manta("bench", "--percentiles", "101").mistake
    assert "--extra-body" in manta("bench", "--extra-body", "[").mistake
    assert "expected something like" in manta("bench", "--url", "nowhere").mistake
    done = manta("bench", "--url", "http://127.0.0.1:9")
    assert done.code == 1
    assert "start one with `manta serve`" in done.err
    with FakeServer([]) as server:
        assert "serves no model 'x'; it serves fake" in manta("bench", "--url", server.url, "--model", "x").err
