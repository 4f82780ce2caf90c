"""Which transport `step_transport: auto` takes. What they do is tested with workers, in the folder above."""

from __future__ import annotations

from app.engine.executor.transports import choose_transport


def test_auto_chooses_by_the_device_and_the_node() -> None:
    assert choose_transport("auto", "cpu", True)[0] == "socket"
    assert choose_transport("auto", "cuda:0", True)[0] == "compiled_graph"
    assert choose_transport("auto", "cuda:0", False)[0] == "socket"
    assert choose_transport("compiled_graph", "cuda:0", False)[0] == "compiled_graph"
