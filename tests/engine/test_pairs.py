"""All pairs of what requests may ask for and of how engines may run: the tokens are those of the plain engine (I6).

A request feature is a line of REQUESTS, an engine mode one of MODES: whoever adds one to the engine adds its line here.
Each pair has two requests, which share their steps with others'. A pair that cannot be is named in REFUSED.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends import PROPOSERS
from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine import control
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.errors import MantaError
from app.records.adapter import AdapterAsk
from app.records.bad_words import BadWords
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams, StructuredOutputs
from app.structured.sandboxed_compile import SandboxedCompile
from tests.adapters import pair as two_matrices
from tests.adapters import write_adapter
from tests.engine.core_driver import KEY, Results, run
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import decode_statically

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.1},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {7: 3.0, 90: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(3, 200))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": tuple(range(3, 150))},
    "bad_words": {"asks": (BadWords(((9,), (17, 30), (45,))),)},
    "resumed": {"output_token_ids": [11, 12, 13]},
    "choice": {"choice_index": 3},
    "grammar": {"structured_outputs": StructuredOutputs(regex="([ -~]{2}|[0-9])*")},
    "adapter": {"adapter": True},
}
MODES: dict[str, dict[str, Any]] = {
    "one step in flight": {"max_inflight_steps": 1},
    "four steps in flight": {"max_inflight_steps": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    "small chunks": {"max_num_batched_tokens": 9},
    "few blocks": {"num_blocks": 13},
    "host tier": {"kv_host_memory_bytes": 1 << 18, "num_blocks": 16},
    "static steps": {"static": True},
    "drafts": {"drafts": True},
    "adapters": {"enable_lora": True},
}
REFUSED: dict[frozenset[str], str] = {  # pair -> the words of its refusal
    frozenset({"no prefix cache", "host tier"}): "enable_prefix_caching",
    frozenset({"allowed_token_ids", "grammar"}): "excludes structured_outputs",
}
TOKENIZER = str(ModelInfo.from_directory("tiny-chat").directory)
OF_REQUEST = {"asks", "placement", "output_token_ids", "choice_index"}
PROPOSER = """
import torch
from app.worker.spec_decode.base import Proposer

class Echo(Proposer):
    num_draft_tokens = 2
    is_capturable = True

    @classmethod
    def create(cls, context):
        return cls()

    def propose(self, proposal):
        known = proposal.columns.num_tokens[proposal.rows].long()
        return torch.stack(((known * 7) % 331, (known * 5) % 331), dim=1)
"""


@pytest.fixture
def proposer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_proposer.py").write_text(PROPOSER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "echo_proposer", raising=False)
    importlib.invalidate_caches()


def requests(names: list[tuple[str, ...]]) -> list[EngineRequest]:
    """Two for each group of features, of unlike length."""
    made = []
    for group in names:
        number = zlib.crc32("+".join(group).encode()) % 1000
        options: dict[str, Any] = {}
        for name in group:
            options.update(REQUESTS[name])
        if options.pop("adapter", False):
            ask = AdapterAsk("own", AdapterFiles.read(tiny_adapter(), 16).digest())
            options["asks"] = (*options.get("asks", ()), ask)
        own = {key: options.pop(key) for key in OF_REQUEST & options.keys()}
        for half, length in enumerate((5, 14)):
            prompt = [(number * 31 + half * 7 + i * i) % 320 + 5 for i in range(length)]
            params = SamplingParams(**{"seed": number, "max_tokens": 8, "ignore_eos": True, **options})
            made.append(EngineRequest(f"{'+'.join(group)}/{half}", prompt, params, **own))
    return made


@cache
def tiny_adapter() -> Path:
    torch.manual_seed(1)
    tensors = {name: tensor * 0.5 for name, tensor in two_matrices().items()}
    return write_adapter(tiny_model("llama") / "adapter", tensors)


def generate(names: list[tuple[str, ...]], *modes: str) -> Results:
    """The requests together, in an engine of these modes."""
    has_adapter = any("adapter" in group for group in names)
    options: dict[str, Any] = {"num_blocks": 400, "enable_lora": has_adapter}
    for mode in modes:
        options.update(MODES[mode])
    static, drafts = options.pop("static", False), options.pop("drafts", False)
    options["num_blocks"] = min([options["num_blocks"], *(MODES[m].get("num_blocks", 400) for m in modes)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SandboxedCompile, "check", lambda *_: None)  # a process for each engine, for grammars of our own
        if drafts:
            patch.setitem(PROPOSERS._table, "echo", "echo_proposer:Echo")
            options["speculative_config"] = {"method": "echo", "num_speculative_tokens": 2}
        config = EngineConfig(
            model=str(tiny_model("llama")), device="cpu", num_threads=1, executor="in_process", block_size=4,
            max_num_seqs=8, max_model_len=40, tokenizer=TOKENIZER, **options,
        )  # fmt: skip
        executor = InProcessExecutor(config)
        core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
        core.start()
        try:
            if static:
                decode_statically(executor._worker, [1, 2, 4, 8])
            if has_adapter:
                control.run(core, "load_adapter", {"name": "own", "path": str(tiny_adapter())})
            return run(core, requests(names))
        finally:
            core.shutdown()


def test_pairs_of_request_features() -> None:
    """Beside other neighbours, and with one step in flight: the same tokens."""
    pairs: list[tuple[str, ...]] = list(combinations(REQUESTS, 2))
    names = [pair for pair in pairs if frozenset(pair) not in REFUSED]
    for pair in set(pairs).difference(names):
        with pytest.raises(MantaError, match=REFUSED[frozenset(pair)]):
            generate([pair])
    found = generate(names)
    assert len(found.tokens) == 2 * len(names)
    assert found.tokens == generate(names[::-1], "one step in flight").tokens


@pytest.fixture(scope="module")
def plain() -> Results:
    return generate([(name,) for name in REQUESTS])


@pytest.mark.usefixtures("proposer")
@pytest.mark.parametrize("mode", MODES)
def test_request_features_in_each_mode(mode: str, plain: Results) -> None:
    found = generate([(name,) for name in REQUESTS], mode)
    assert found.tokens == plain.tokens
    for name, final in plain.final.items():
        assert found.final[name].finish_reason == final.finish_reason


@pytest.mark.usefixtures("proposer")
@pytest.mark.parametrize("pair", list(combinations(MODES, 2)), ids=" and ".join)
def test_pairs_of_modes(pair: tuple[str, str], plain: Results) -> None:
    names: list[tuple[str, ...]] = [("greedy",), ("penalties",), ("logprobs",), ("grammar",), ("adapter",)]
    why = REFUSED.get(frozenset(pair))
    if why is not None:
        with pytest.raises((MantaError, ValueError), match=why):
            generate(names, *pair)
        return
    found = generate(names, *pair)
    assert found.tokens == {name: plain.tokens[name] for name in found.tokens}


def test_the_adapter_changes_tokens(plain: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REQUESTS, "adapter", {})
    base = generate([("adapter",)])
    assert all(base.tokens[name] != plain.tokens[name] for name in base.tokens)


def test_few_pairs_are_refused() -> None:
    """At most 2 %."""
    count = len(REQUESTS) + len(MODES)
    assert len(REFUSED) <= 0.02 * count * (count - 1) / 2
