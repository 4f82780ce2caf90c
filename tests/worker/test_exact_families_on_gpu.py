"""`deterministic: batch` on a GPU, family by family: no sum is a library's, and the bits are the same alone, among
others from graphs, and behind cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.core import EngineCore
from app.records.request import EngineRequest
from app.worker.forward_pass import ForwardPass
from tests.engine.core_driver import Results, run
from tests.worker import test_exact_steps_on_gpu as on_gpu
from tests.worker.exact_models import FAMILIES
from tests.worker.test_exact_steps import Logprobs, assert_same, in_order

pytestmark = pytest.mark.gpu
LENGTHS = (1, 5, 17, 130, 64, 9, 131, 40)
OTHERS = 7  # times as many
SMALL = {"max_model_len": 200, "num_blocks": 4000, "max_num_batched_tokens": 1024}
# Operations whose order of adding may follow the number of rows.
SUMS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "sum", "mean", "_softmax", "softmax", "cumsum", "var_mean"}


class Sums(TorchDispatchMode):
    """Keeps the names of the library's sums within it."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).rpartition(".")[2]
        if name in SUMS:
            self.found.add(f"{name} of {[tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]}")
        return func(*args, **(kwargs or {}))


@contextmanager
def core_of(model: str, **options: Any) -> Iterator[EngineCore]:
    with on_gpu.core_of(model, make=FAMILIES[model], **{"max_num_seqs": 64, **options, **SMALL}) as core:
        yield core


def requests(prefix: str = "", start: int = 0, **params: Any) -> list[EngineRequest]:
    return on_gpu.requests(prefix, start, LENGTHS, **params)


def others() -> list[EngineRequest]:
    return [one for number in range(1, OTHERS + 1) for one in requests(f"other{number}/", 3 * number)]


def bits(results: Results, prefix: str = "") -> Logprobs:
    found: Logprobs = {}
    for number in range(len(LENGTHS)):
        name = f"{prefix}{number}"
        of_prompt = [one for one in results.prompt_logprobs.get(name, ()) if one is not None]
        found[str(number)] = [in_order(one) for one in (*of_prompt, *results.logprobs[name])]
    return found


def alone(model: str, monkeypatch: pytest.MonkeyPatch) -> Logprobs:
    """By ordinary steps, without a sum of the library's."""
    sums, found = Sums(), Results()
    with monkeypatch.context() as patch:
        for name in ("compute", "raw_logits"):
            patch.setattr(ForwardPass, name, _within(sums, getattr(ForwardPass, name)))
        with core_of(model, enable_prefix_caching=False, cuda_graphs="off", max_num_seqs=8) as core:
            for request in requests():
                run(core, [request], results=found)
    assert not sums.found
    return bits(found)


def _within(sums: Sums, call: Any) -> Any:
    def within(*args: Any) -> Any:
        with sums:
            return call(*args)

    return within


@pytest.mark.parametrize("model", FAMILIES)
def test_among_others_and_behind_a_cached_prefix(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = alone(model, monkeypatch)
    with core_of(model, cuda_graphs="on") as core:
        assert_same(bits(run(core, [*others(), *requests()])), truth)
        again = run(core, [*requests("again/", prompt_logprobs=None), *others()])
    assert_same(bits(again, "again/"), {name: places[-on_gpu.NUM_TOKENS :] for name, places in truth.items()})
