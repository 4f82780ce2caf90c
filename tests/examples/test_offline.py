"""Examples that hold the engine in their own process."""

from __future__ import annotations

from tests.examples.conftest import RunExample


def test_offline_inference(run_example: RunExample) -> None:
    printed = run_example("offline_inference")
    assert "chat: 17 + 25 = 42." in printed
    assert "ended by" in printed
    assert [f"choice {i}: 'Once upon a time" in printed for i in range(3)] == [True] * 3


def test_batch_of_prompts(run_here: RunExample) -> None:
    printed = run_here("batch_of_prompts", "24")
    assert "24/24" in printed  # the bar
    assert "24 of 24 right" in printed


def test_ray_data_batch(run_example: RunExample) -> None:
    assert "12 of 12 right" in run_example("ray_data_batch", "12")


def test_engine_steps(run_here: RunExample) -> None:
    printed = run_here("engine_steps")
    assert "second ends (stop): '6 × 7 = 42.'" in printed
    assert "first ends (stop): '1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12'" in printed
    assert printed.index("second ends") < printed.index("first ends")  # it came later, and was batched in
