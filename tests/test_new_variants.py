"""One new variant of each kind from a folder outside of the tree: one file and one line of a table, and no other edit.

Those that need more to be judged stand in their rooms: feature (worker/features/test_new_feature.py), model
family (models/families/test_new_family.py), quantization (quantization/test_selection.py), attention backend
(worker/attention/test_backend.py), endpoint (api/test_endpoints.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.api.generation.served_models import load_served_model
from app.backends import EXECUTORS, KV_CONNECTORS, PLATFORMS, ROUTING_POLICIES, STEP_TRANSPORTS
from app.checkpoints.model_info import ModelInfo
from app.cli import main
from app.config.engine import EngineConfig
from app.config.router import RouterConfig
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.serve.serve_args import parse_args
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.engine.kv_connector import create_connector
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS
from app.parsers.answer import ToolOptions, plan_parsers
from app.parsers.base import ParsedAnswer
from app.records.host_pool import HostPoolReport
from app.records.worker_info import WorkerInfo
from app.registry import Registry
from app.worker.logits_processors import LOGITS_PROCESSORS
from app.worker.worker import Worker
from tests.deployments.routing.test_load_book import QUERY, report
from tests.engine.core_driver import KEY, make_request, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

Add = Callable[[Registry[Any], str, str], None]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Add:
    """Write the file, and the line of the table: its variant is the file's `Variant`."""

    def add(table: Registry[Any], name: str, source: str) -> None:
        (tmp_path / f"variant_{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setitem(table._table, name, f"variant_{name}:Variant")
        monkeypatch.delitem(sys.modules, f"variant_{name}", raising=False)

    return add


POLICY = """
from app.deployments.routing.policies.base import NO_MATCHES, Decision, RoutingPolicy

class Variant(RoutingPolicy):
    def choose(self, candidates, query, matches=NO_MATCHES, now=0.0):
        return Decision(candidates[-1].report.replica_id)
"""


def test_a_routing_policy(add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    add(ROUTING_POLICIES, "last_one", POLICY)
    config = parse_args({"models": [{"name": "m"}], "router": {"policy": "last_one"}})
    book = LoadBook(create_policy(config.router.policy))
    for name in "abc":
        book.report(report(name))
    decision = book.route(QUERY)
    assert decision is not None
    assert decision.replica_id == "c"
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "round_robin|session_affinity|last_one" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


TOOLS = """
from app.parsers.base import ToolParser
from app.parsers.grammar import CallGrammar

class Variant(ToolParser):
    markers = ("CALL ",)

    def parse(self):
        while (yield from self.scan.content("CALL ")):
            name, _ = yield from self.scan.until(".", limit=64)
            self.scan.begin_call(name)
            self.scan.say_arguments("{}")

    @classmethod
    def call_grammar(cls, special):
        return CallGrammar("CALL {name}", ".", separator=" ", trigger="CALL ")
"""
REASONING = """
from app.parsers.think import ThinkParser

class Variant(ThinkParser):
    open, close = "(", ")"
    markers = ("(", ")")
"""


def test_parsers(add: Add) -> None:
    add(TOOL_PARSERS, "calls", TOOLS)
    add(REASONING_PARSERS, "brackets", REASONING)
    config = parse_args({"models": [{"name": "m", "tool_parser": "calls", "reasoning_parser": "brackets"}]})
    model = load_served_model(config.models[0])
    parser = plan_parsers(model, [1, 2, 3], ToolOptions({"now": {"type": "object"}})).new_parser()
    answer = ParsedAnswer()
    answer.add(parser.push("(hm)well CALL now.") + parser.flush())
    assert (answer.reasoning, answer.content) == ("hm", "well")
    assert [(call.name, call.arguments) for call in answer.calls] == [("now", "{}")]


PROCESSOR = """
from app.worker.logits_processors.base import LogitsProcessor

class Variant(LogitsProcessor):
    def read(self, request):
        return request.spec.sampling.seed == 77 or None

    def build(self, indices, states):
        self.indices = indices

    def apply(self, logits, step):
        logits[self.indices, 42] = 1e9
"""


def test_a_logits_processor(add: Add) -> None:
    add(LOGITS_PROCESSORS, "forty_two", PROCESSOR)
    prompt = [5, 9, 200, 31]
    expected = hf_greedy(hf_model(tiny_model("llama")), prompt, 4)
    driver = Driver(str(tiny_model("llama")), num_blocks=8)
    plain, touched = driver.run([Run(prompt, greedy(4)), Run(prompt, greedy(4, seed=77))])
    assert (plain.tokens, touched.tokens) == (expected, [42] * 4)


CONNECTOR = """
from app.engine.kv_connector.host_memory import HostMemory

class Variant(HostMemory):
    def match(self, hashes):
        return 0
"""


def test_a_kv_connector(add: Add) -> None:
    add(KV_CONNECTORS, "forgetful", CONNECTOR)
    info = WorkerInfo(8, "cpu", "float32", kv_connector=(HostPoolReport(4, 1),))
    for config, found in ((EngineConfig(kv_connector="forgetful"), 0), (EngineConfig(), 1)):
        connector = create_connector(config.kv_connector, info, None)
        assert connector is not None
        connector.take_evicted([b"a"], [0])
        assert connector.match([b"a"]) == found


COUNTING = """
from app.engine.kv_connector.base import KVConnector

class Variant(KVConnector):
    num_blocks = 0

    @classmethod
    def of(cls, reports, sink):
        return cls()

    def match(self, hashes):
        return 0

    def hold(self, hashes):
        pass

    def load(self, hashes, blocks):
        pass

    def take_evicted(self, hashes, blocks):
        pass

    def take_computed(self, hashes, blocks):
        self.num_blocks += len(hashes)

    def forget(self):
        pass

    def count_lookup(self, num_tokens, num_hit_tokens):
        pass

    def take_transfers(self):
        return None

    def figures(self):
        return {"counted_blocks": self.num_blocks}
"""


def test_a_kv_connector_that_moves_nothing(add: Add) -> None:
    """It has no half in the workers; it sees the blocks of a request once, whoever computes them again."""
    add(KV_CONNECTORS, "counting", COUNTING)
    options: dict[str, Any] = {"executor": "in_process", "kv_connector": "counting"}
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", num_threads=1, **options)
    core = EngineCore(config, ModelInfo.from_directory(config.model), create_executor(config), KEY)
    core.start()
    prompt = [5, 9, 200, 31] * config.block_size
    for name in "ab":
        run(core, [make_request(name, prompt, max_tokens=4, temperature=0.0, ignore_eos=True)])
    figures = core.stats().figures
    core.shutdown()
    assert figures["counted_blocks"] == 4


EXECUTOR = """
from app.engine.executor.in_process import InProcessExecutor

class Variant(InProcessExecutor):
    steps = 0

    def submit(self, step_message):
        Variant.steps += 1
        super().submit(step_message)
"""


def test_an_executor(add: Add) -> None:
    add(EXECUTORS, "counting", EXECUTOR)
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", num_threads=1, executor="counting")
    core = EngineCore(config, ModelInfo.from_directory(config.model), create_executor(config), KEY)
    core.start()
    results = run(core, [make_request("r", [5, 9, 200, 31], max_tokens=4, temperature=0.0, ignore_eos=True)])
    core.shutdown()
    assert results.tokens["r"] == hf_greedy(hf_model(tiny_model("llama")), [5, 9, 200, 31], 4)
    assert sys.modules["variant_counting"].Variant.steps >= 4


PLATFORM = """
from app.platforms.cpu import Cpu

class Variant(Cpu):
    name, label = "wide", "wide CPU"
    dtype = "bfloat16"
"""


def test_a_platform(add: Add, capsys: pytest.CaptureFixture[str]) -> None:
    """Chosen by name, and as the newest that is there: what it says is what the worker does."""
    add(PLATFORMS, "wide", PLATFORM)
    for device in ("wide", "auto"):
        config = EngineConfig(model=str(tiny_model("llama")), device=device, num_threads=1, num_blocks=8)
        worker = Worker(config)
        info = worker.start()
        worker.shutdown()
        assert info.dtype == "bfloat16"
        assert "dtype: bfloat16 (wide CPU)" in info.notes
        assert "attention: torch (wide CPU)" in info.notes
        assert any(note.startswith("device: wide") for note in info.notes)
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "auto|cpu|cuda|rocm|wide" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_choices_are_those_of_the_tables_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown step transport 'sockets'; did you mean socket"):
        EngineConfig(step_transport="sockets")
    monkeypatch.setitem(STEP_TRANSPORTS._table, "sockets", "nowhere:Nothing")
    assert EngineConfig(step_transport="sockets").step_transport == "sockets"
    for name in ("quantization", "attention_backend", "executor", "step_transport", "kv_connector"):
        with pytest.raises(ValueError, match=r"unknown .* 'no'; known: "):
            EngineConfig.model_validate({name: "no"})
    with pytest.raises(ValueError, match="unknown routing policy 'no'"):
        RouterConfig(policy="no")
