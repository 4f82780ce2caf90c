"""The feature in a worker: an input is encoded once while its slot is its own, and slots go to whom has waited."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.worker.media import encoder_graphs, encoder_inputs
from app.worker.media.encoder_graphs import EncoderGraphs
from app.worker.media.encoder_inputs import EncoderInputs
from app.worker.media.media import HITS, QUERIES
from app.worker.media.one_input import OneInput
from tests.tiny_sounds import noise, tiny_whisper
from tests.worker.media.test_encoder_graphs import FakeRecorder
from tests.worker.worker_driver import Driver, Run, greedy


def driver_of(**options: Any) -> Driver:
    return Driver(str(tiny_whisper()), **{"max_model_len": 64, "num_blocks": 32, "max_num_seqs": 2, **options})


def feature_of(driver: Driver) -> EncoderInputs:
    assert driver.worker._parts is not None
    return next(one for one in driver.worker._parts.features._all if isinstance(one, EncoderInputs))


def calls_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many inputs each call of the encoder has."""
    feature, calls = feature_of(driver), list[int]()
    write = feature._write
    monkeypatch.setattr(feature, "_write", lambda *given: (calls.append(len(given[0])), write(*given))[1])
    return calls


def test_an_input_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of()
    calls = calls_of(driver, monkeypatch)
    run = lambda seed: Run([3, 4, 5], greedy(2), asks=(noise(seed),))  # noqa: E731
    first, second = driver.run([run(1), run(1)])
    assert first.tokens == second.tokens
    assert calls == [1]
    driver.run([run(1), run(2)])
    assert calls == [1, 1]
    driver.run([run(2), run(1)])
    assert calls == [1, 1]
    driver.run([run(3)])  # in place of one of them
    driver.run([run(1), run(2)])
    assert sum(calls) == 4
    feature_of(driver).weights_change(whole=True)
    driver.run([run(1)])
    assert sum(calls) == 5
    driver.worker.shutdown()


def test_calls_are_as_large_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of(max_num_seqs=4, max_num_batched_tokens=110)  # of 50 positions each
    calls = calls_of(driver, monkeypatch)
    runs = driver.run([Run([3, 4], greedy(3), asks=(noise(seed),)) for seed in range(3)])
    assert calls == [2, 1]
    for seed, own in enumerate(runs):
        assert driver.run([Run([3, 4], greedy(3), asks=(noise(seed),))])[0].tokens == own.tokens
    with torch.inference_mode():
        feature_of(driver).run_largest()
    assert calls[-1] == 2
    driver.worker.shutdown()


def test_figures_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of()
    assert driver.info.encoder_tokens == 2 * 50
    layers, heads, blocks = 2, 2, 4  # of 16 positions
    each = layers * 2 * heads * 32 * 4 * 16 * blocks
    assert driver.worker._parts is not None
    assert driver.worker._parts.cache.spec.bytes_per_encoded == each
    assert any(note.startswith(f"encoded inputs: {each / (1 << 20):.2f} MiB a request") for note in driver.info.notes)
    counted: dict[str, float] = {}
    execute = driver.worker.execute

    def count(step: Any) -> Any:
        outputs = execute(step)
        for output in outputs:
            for name, value in output.figures.items():
                counted[name] = counted.get(name, 0) + value
        return outputs

    driver.worker.execute = count  # type: ignore[method-assign]
    driver.run([Run([3, 4, 5], greedy(2), asks=(noise(1),)), Run([3, 4, 5], greedy(2), asks=(noise(1),))])
    assert counted == {QUERIES: 2, HITS: 1}
    driver.worker.shutdown()


def test_one_input_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a graph that repeats the call: a single input by it, several as they were; changed weights are recorded."""
    monkeypatch.setattr(encoder_graphs, "Recorder", FakeRecorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(FakeRecorder, "made", 0)
    monkeypatch.setattr(FakeRecorder, "bytes_each", 0)
    plain = driver_of(max_num_seqs=4)
    runs = [Run([3, 4, 5], greedy(4), asks=(noise(seed),)) for seed in range(4)]
    expected = [plain.run([run])[0].tokens for run in runs]
    plain.worker.shutdown()
    assert FakeRecorder.made == 0  # a CPU has no graphs
    monkeypatch.setattr(
        encoder_inputs,
        "create_graphs",
        lambda config, encoder, device: EncoderGraphs(OneInput(encoder), device, [encoder.info.num_positions]),
    )
    driver = driver_of(max_num_seqs=4)
    feature = feature_of(driver)
    with torch.inference_mode():
        feature.run_largest()
    assert FakeRecorder.made == 1
    replays = 0
    (recorded,) = feature._graphs._recorded.values()  # type: ignore[attr-defined]
    replay = recorded.graph.replay

    def counted() -> None:
        nonlocal replays
        replays += 1
        replay()

    recorded.graph.replay = counted
    assert driver.run([runs[0]])[0].tokens == expected[0]
    assert driver.run([runs[1]])[0].tokens == expected[1]
    assert replays == 2
    assert [run.tokens for run in driver.run(runs[2:])] == expected[2:]
    with torch.inference_mode():
        feature.weights_change(whole=True)
        feature.weights_return()
    assert FakeRecorder.made == 2
    assert driver.run([runs[0]])[0].tokens == expected[0]
    driver.worker.shutdown()
