"""Prompts and arrivals of the benchmark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from app.cli.bench.workload import Shape, TokenSource, arrival_times, random_work, read_work, token_source
from app.cli.command import CommandError
from app.cli.stream_client import Server
from app.errors import ConfigError
from tests.cli.fake_server import FakeServer

SOURCE = TokenSource(range(10, 20), lambda ids: " ".join(map(str, ids)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_are_gamma_and_take_exactly_their_time(burstiness: float) -> None:
    times = arrival_times(4000, 20.0, burstiness, np.random.default_rng(0))
    assert times[-1] == pytest.approx(4000 / 20)
    gaps = np.diff([0.0, *times])
    assert (gaps >= 0).all()
    assert stats.kstest(gaps, stats.gamma(burstiness, scale=1 / (20 * burstiness)).cdf).pvalue > 0.001


def test_arrivals_all_at_once_or_even() -> None:
    rng = np.random.default_rng(0)
    assert arrival_times(3, float("inf"), 1.0, rng) == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, float("inf"), rng) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_random_work() -> None:
    work = random_work(200, Shape(20, 10, prefix_len=5, range_ratio=0.5), SOURCE, False, np.random.default_rng(1))
    prompts = [each.prompt for each in work]
    assert {tuple(prompt[:5]) for prompt in prompts} == {tuple(prompts[0][:5])}
    lengths, outputs = [len(prompt) - 5 for prompt in prompts], [each.output_len for each in work]
    assert (min(lengths), max(lengths), min(outputs), max(outputs)) == (10, 30, 5, 15)
    assert set().union(*prompts) <= set(range(10, 20))
    again = random_work(200, Shape(20, 10, prefix_len=5, range_ratio=0.5), SOURCE, False, np.random.default_rng(1))
    assert work == again
    exact = random_work(3, Shape(7, 2), SOURCE, False, np.random.default_rng(1))
    assert [(len(each.prompt), each.output_len) for each in exact] == [(7, 2)] * 3
    assert isinstance(random_work(1, Shape(7, 2), SOURCE, True, np.random.default_rng(1))[0].prompt, str)


def test_dataset(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "output_len": 3}\n')
    assert [(w.prompt, w.output_len) for w in read_work(file, 3, 8)] == [("a", 8), ([1, 2], 3), ("a", 8)]
    for wrong in ("x", "{}", '{"prompt": "a", "output_len": 0}', "[]"):
        file.write_text('{"prompt": "a"}\n' + wrong)
        with pytest.raises(ConfigError, match=r"d.jsonl:2: "):
            read_work(file, 3, 8)
    with pytest.raises(ConfigError, match="No such file"):
        read_work(tmp_path / "nowhere", 1, 1)


def test_token_sources() -> None:
    local = token_source(Server("http://127.0.0.1:9"), "fake", "tiny-chat")
    assert len(local.token_ids) > 100
    assert local.decode(list(local.token_ids[300:302]))
    answers = {"/tokenize": {"tokens": [5, 3, 5]}, "/detokenize": {"prompt": "text"}}
    with FakeServer([], answers) as server:
        remote = token_source(Server(server.url), "fake", None)
        assert list(remote.token_ids) == [3, 5]
        assert remote.decode([3]) == "text"
    with FakeServer([]) as server, pytest.raises(CommandError, match="give --tokenizer DIR"):
        token_source(Server(server.url), "fake", None)
