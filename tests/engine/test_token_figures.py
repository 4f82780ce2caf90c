"""What a feature found out of each token comes with the tokens of the requests that ask for it, and with no others."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends import PROPOSERS
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.outputs import CompletionOutput, EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.worker.features import WORKER_FEATURES
from tests.engine.core_driver import KEY
from tests.engine.test_pairs import PROPOSER
from tests.tiny_models import hf_model, tiny_model
from tests.worker.worker_driver import decode_statically

FILE = """
from dataclasses import dataclass
from typing import ClassVar
from app.worker.rows.worker_feature import WorkerFeature

@dataclass(frozen=True)
class SizesAsked:
    token_figures: ClassVar = ("size",)

class Sizes(WorkerFeature):
    def __init__(self, table):
        self.sizes = table.weight.norm(dim=1)

    def after(self, step, results):
        results.token_figures["size"] = self.sizes[results.sampled_token_ids]

def create(context):
    return Sizes(context.forward.model.model.embed_tokens)
"""


@pytest.fixture
def feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "size_feature.py").write_text(FILE)
    (tmp_path / "echo_proposer.py").write_text(PROPOSER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("size_feature", "echo_proposer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(WORKER_FEATURES._table, "sizes", "size_feature:create")
    return importlib.import_module("size_feature")


@pytest.mark.parametrize(("static", "drafts"), [(False, False), (True, False), (True, True)])
def test_figures_travel_with_their_tokens(
    feature: Any, monkeypatch: pytest.MonkeyPatch, static: bool, drafts: bool
) -> None:
    if drafts:
        monkeypatch.setitem(PROPOSERS._table, "echo", "echo_proposer:create")
    config = EngineConfig(
        model=str(tiny_model("llama")), device="cpu", num_threads=1, executor="in_process", block_size=4, num_blocks=12,
        max_num_seqs=4, max_model_len=40,
    )  # fmt: skip
    executor = InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    if static:
        decode_statically(executor._worker, [1, 2, 4])
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    asks = {"with": (feature.SizesAsked(),), "without": (), "too": (feature.SizesAsked(),)}
    outputs: dict[str, list[EngineOutput]] = {name: [] for name in asks}
    for number, (name, asked) in enumerate(asks.items()):
        core.add_request(EngineRequest(name, [5, 9, 200, 31, 44, 6 + number], params, asks=asked))
    while core.has_work():
        for output in core.step():
            outputs[output.request_id].append(output)
    preempted = max(output.num_preemptions for found in outputs.values() for output in found)
    core.shutdown()
    assert preempted > 0  # so that tokens of requests without a row came, too
    embedding = hf_model(tiny_model("llama")).get_input_embeddings().weight
    for name, asked in asks.items():
        whole = outputs[name][-1].after(outputs[name][:-1])
        assert len(whole.new_token_ids) == 12
        assert (whole.token_figures is not None) == bool(asked)
        if whole.token_figures is not None:
            expected = embedding[torch.tensor(whole.new_token_ids)].norm(dim=1).tolist()
            assert whole.token_figures == {"size": pytest.approx(expected)}
            assert whole.first(5).token_figures == {"size": whole.token_figures["size"][:5]}
            completion = CompletionOutput(0)
            for output in outputs[name]:
                completion.append(output)
            assert completion.token_figures == whole.token_figures


def test_a_figure_that_no_feature_fills_fails_its_request_alone(feature: Any) -> None:
    del WORKER_FEATURES._table["sizes"]
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", num_threads=1, executor="in_process")
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
    core.start()
    params = SamplingParams(seed=3, max_tokens=2, ignore_eos=True)
    core.add_request(EngineRequest("a", [5, 9], params, asks=(feature.SizesAsked(),)))
    core.add_request(EngineRequest("b", [5, 9], params))
    final = {}
    while core.has_work():
        final.update({output.request_id: output for output in core.step() if output.finish_reason is not None})
    core.shutdown()
    assert (final["a"].error, final["b"].finish_reason) == ("internal error: the step brought no size", "length")
