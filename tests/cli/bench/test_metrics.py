"""The definitions of `vllm bench serve`, on event times written down by hand, and against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from app.cli.bench.metrics import calculate, parse_goodput
from app.cli.stream_client import StreamResult
from app.errors import ConfigError


def result(begin: float, *events: float, tokens: int = 0, prompt: int = 10, error: str | None = None) -> StreamResult:
    return StreamResult(begin, [begin + at for at in events], tokens, prompt, "", error)


# Times in seconds after the POST. The second's server put two tokens into a chunk; the third has a single token; the
# fourth sent no usage; the fifth failed after its first token.
RECORDED = [
    result(0.0, 0.1, 0.2, 0.4, tokens=3),
    result(0.0, 0.3, 0.5, tokens=5),
    result(1.0, 0.2, tokens=1),
    result(1.0, 0.4, 0.5, 0.6),
    result(2.0, 0.9, tokens=7, error="cut"),
]


def test_by_hand() -> None:
    figures = calculate(RECORDED, 2.0, (50, 90), {"ttft": 300, "tpot": 120})
    assert (figures["completed"], figures["failed"]) == (4, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (40, 3 + 5 + 1 + 3)
    assert figures["request_throughput"] == pytest.approx(2.0)
    assert figures["output_throughput"] == pytest.approx(6.0)
    assert figures["total_token_throughput"] == pytest.approx(26.0)
    # TTFT 100, 300, 200, 400
    assert figures["mean_ttft_ms"] == pytest.approx(250)
    assert figures["median_ttft_ms"] == pytest.approx(250)
    assert figures["p90_ttft_ms"] == pytest.approx(370)
    # TPOT (400 - 100) / 2 = 150, (500 - 300) / 4 = 50, (600 - 400) / 2 = 100; the single token has none
    assert figures["mean_tpot_ms"] == pytest.approx(100)
    assert figures["p90_tpot_ms"] == pytest.approx(140)
    # gaps 100, 200, 200, 100, 100: pooled, and of chunks rather than tokens
    assert figures["mean_itl_ms"] == pytest.approx(140)
    assert figures["median_itl_ms"] == pytest.approx(100)
    # E2EL 400, 500, 200, 600
    assert figures["mean_e2el_ms"] == pytest.approx(425)
    assert figures["std_e2el_ms"] == pytest.approx(np.std([400, 500, 200, 600]))
    # the first misses TPOT, the fourth TTFT; the second meets TTFT exactly; the third's TPOT counts as 0
    assert figures["request_goodput"] == pytest.approx(2 / 2.0)
    # [0, 0.4), [0, 0.5), [1.0, 1.2), [1.0, 1.6)
    assert figures["max_concurrent_requests"] == 2


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(0)
    results = [result(i, *rng.random(20).cumsum(), tokens=20) for i in range(50)]
    figures = calculate(results, 60.0, (25, 99, 99.9))
    for percentile, key in ((25, "p25"), (99, "p99"), (99.9, "p99.9")):
        e2e = [r.event_times[-1] - r.begin for r in results]
        assert figures[f"{key}_e2el_ms"] == pytest.approx(1e3 * np.percentile(e2e, percentile))
        gaps = np.concatenate([np.diff(r.event_times) for r in results])
        assert figures[f"{key}_itl_ms"] == pytest.approx(1e3 * np.percentile(gaps, percentile))


def test_back_to_back_requests_do_not_overlap() -> None:
    assert calculate([result(0.0, 0.25), result(0.25, 0.5)], 1.0)["max_concurrent_requests"] == 1


def test_nothing_completed() -> None:
    figures = calculate([result(0.0, error="x")], 1.0, (99,), {"ttft": 1})
    assert (figures["completed"], figures["request_goodput"], figures["p99_ttft_ms"]) == (0, 0, 0)


def test_end_to_end_objective() -> None:
    assert calculate(RECORDED, 1.0, (), {"e2el": 550})["request_goodput"] == pytest.approx(3)
    assert calculate(RECORDED, 1.0, (), {"e2el": 450})["request_goodput"] == pytest.approx(2)


def test_parse_goodput() -> None:
    assert parse_goodput(["ttft:500", "tpot:30.5"]) == {"ttft": 500, "tpot": 30.5}
    for wrong in ("itl:3", "ttft", "ttft:x", "tpot:-1", "e2el:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            parse_goodput([wrong])
