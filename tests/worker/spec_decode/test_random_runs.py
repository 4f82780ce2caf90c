"""Random runs with each drafter that there is: tokens are those of an engine without drafts.

Two engines, one over static tensors, serve what comes at random times. Requests are aborted or wait for slow clients,
engines are held for a while or die; then the other goes on with what their clients have. Whole under `slow`: 1,000
runs a drafter, 14,000 together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.backends import PROPOSERS
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import KEY, assert_idle, run
from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode import drafters
from tests.worker.spec_decode.mtp_checkpoints import with_layer_behind
from tests.worker.spec_decode.test_chain import MADE, SHAPE
from tests.worker.worker_driver import decode_statically, replay_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_TOKENS, COUNT, PIECES = 14, 100, 10
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.9, "stop_token_ids": tuple(range(3, 40))},
]
# Each writes a checkpoint for the target, if it has one of its own, and gives the model's directory and the options.
Make = Callable[[Path], tuple[Path, dict[str, Any]]]


def _target() -> Path:
    return tiny_model("llama", **SHAPE)


def _of_checkpoint(method: str, make: Callable[[Path, Any], object]) -> Make:
    def made(folder: Path) -> tuple[Path, dict[str, Any]]:
        make(folder, hf_model(_target()))
        return _target(), {"method": method, "model": str(folder)}

    return made


def _of_model(family: str) -> Make:
    return lambda folder: (with_layer_behind(family, folder)[0], {"method": "mtp"})


DRAFTERS: dict[str, Make] = {
    "ngram": lambda folder: (_target(), {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    "suffix": lambda folder: (_target(), {"method": "suffix"}),
    "draft_model": lambda folder: (_target(), {"method": "draft_model", "model": str(_target())}),
    "dflash": _of_checkpoint("dflash", drafters.block),
    "dflash-2": _of_checkpoint("dflash", lambda folder, target: drafters.block(folder, target, "dflash2")),
    "dflash-windows": _of_checkpoint("dflash", lambda folder, target: drafters.block(folder, target, "dflash-windows")),
    "dspark": _of_checkpoint("dspark", lambda folder, target: drafters.block(folder, target, "dspark")),
    **{name: _of_checkpoint(*MADE[name]) for name in ("eagle3", "eagle", "medusa")},
    "mlp_speculator": _of_checkpoint(*MADE["mlp"]),
    "mtp": _of_model("glm4_moe"),
    "mtp-latent": _of_model("deepseek_v3"),
    "mtp-states": _of_model("qwen3_5"),
}
SAMPLE = {"draft_model": 8, "mtp-states": 4, "dspark": 4}  # runs in CI: right often, states, blocks


def test_the_list_is_whole() -> None:
    assert {name.split("-")[0] for name in DRAFTERS} == set(PROPOSERS._table)


@cache
def pool() -> tuple[EngineRequest, ...]:
    """What may be asked: some prompts repeat themselves, some begin alike."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 331) for _ in range(14)]
    made = []
    for number in range(24):
        prompt = [rng.randrange(3, 331) for _ in range(rng.randrange(1, 24))]
        prompt = [prompt * 2, shared + prompt, prompt][number % 3]
        params = SamplingParams(seed=3, max_tokens=MAX_TOKENS, ignore_eos=True, **WISHES[number % len(WISHES)])
        made.append(EngineRequest(f"{number}", prompt, params, choice_index=number))
    return tuple(made)


def engine(model: Path, speculation: dict[str, Any] | None, *, is_static: bool = False, **options: Any) -> EngineCore:
    usual = {"device": "cpu", "num_threads": 1, "executor": "in_process", "max_model_len": 96, "block_size": 4}
    sizes = {"num_blocks": 60, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_step_s": 0.0}
    config = EngineConfig(model=str(model), speculative_config=speculation, **{**usual, **sizes, **options})
    executor = InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    if is_static:
        decode_statically(executor._worker, [1, 2, 4])
        replay_prompts(executor._worker, 64)
    return core


@dataclass
class Client:
    """One that asked: what it has, and who is at work for it."""

    request: EngineRequest
    truth: list[int]
    engine: EngineCore
    request_id: str  # there
    tokens: list[int] = field(default_factory=list)
    is_waiting: bool = False  # takes nothing for a while


class Life:
    """One random run over two engines that live on."""

    def __init__(self, engines: list[EngineCore], truth: dict[str, list[int]], seed: int) -> None:
        self._rng, self._engines, self._truth = random.Random(seed), engines, truth
        self._name, self._num_ids = f"run {seed}", 0
        self._clients: dict[str, Client] = {}  # by their requests' ids, while they are at work
        self._held: dict[int, int] = {}  # engines that are held, for how many turns
        self.num_deaths = 0

    def run(self) -> None:
        """To the end of all that comes."""
        rng = self._rng
        coming = rng.sample(pool(), rng.randrange(2, 7))
        for _turn in range(4000):
            if not coming and not self._clients:
                break
            if coming and rng.random() < 0.3:
                request = coming.pop()
                self._ask(Client(request, self._truth[request.request_id], rng.choice(self._engines), ""))
            self._happen()
            for number, core in enumerate(self._engines):
                if self._held.get(number, 0) > 0:
                    self._held[number] -= 1
                    if not self._held[number]:
                        core.release("pause")
                if core.has_work():
                    self._take(core.step())
        assert not coming, self._name
        assert not self._clients, (self._name, [client.request_id for client in self._clients.values()])
        for core in self._engines:
            core.release("pause")
            while core.has_work():
                core.step()
            assert_idle(core)

    def _ask(self, client: Client) -> None:
        client.request_id, self._num_ids = f"{self._name}, {self._num_ids}", self._num_ids + 1
        client.is_waiting = False
        self._clients[client.request_id] = client
        output = tuple(client.tokens)
        client.engine.add_request(replace(client.request, request_id=client.request_id, output_token_ids=list(output)))

    def _happen(self) -> None:
        """Something, or mostly nothing."""
        rng, chance = self._rng, self._rng.random()
        clients = list(self._clients.values())
        if chance < 0.02 and clients:  # one leaves
            left = rng.choice(clients)
            del self._clients[left.request_id]
            left.engine.abort_requests([left.request_id])
        elif chance < 0.08 and clients:
            slow = rng.choice(clients)
            slow.is_waiting = not slow.is_waiting
            (slow.engine.pause if slow.is_waiting else slow.engine.resume)(slow.request_id)
        elif chance < 0.12:
            for client in clients:  # none waits for ever
                if client.is_waiting:
                    client.is_waiting = False
                    client.engine.resume(client.request_id)
        elif chance < 0.14:
            self._hold(rng.randrange(2))
        elif chance < 0.16:
            self._die(rng.randrange(2))

    def _hold(self, number: int) -> None:
        if not self._held.get(number, 0):
            self._engines[number].hold("pause")
            self._engines[number].freeze()
            self._held[number] = self._rng.randrange(1, 5)

    def _die(self, number: int) -> None:
        """What this engine still says reaches nobody."""
        dead, other = self._engines[number], self._engines[1 - number]
        moved = [client for client in self._clients.values() if client.engine is dead]
        self.num_deaths += bool(moved)
        for client in moved:
            del self._clients[client.request_id]
            dead.abort_requests([client.request_id])
            client.engine = other
            self._ask(client)

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            client = self._clients.get(output.request_id)
            if client is None:  # it left, or went elsewhere
                continue
            client.tokens += output.new_token_ids
            assert client.tokens == client.truth[: len(client.tokens)], (self._name, client.request.request_id)
            if output.finish_reason is not None:
                assert client.tokens == client.truth, (self._name, client.request.request_id, output.finish_reason)
                del self._clients[output.request_id]


def check(drafter: str, folder: Path, first: int, count: int) -> None:
    """Runs number `first` and on; what the engines of one leave, the next one finds."""
    model, asked = DRAFTERS[drafter](folder)
    plain = engine(model, None)
    truth = run(plain, pool()).tokens
    plain.shutdown()
    engines = [
        engine(model, {**asked, "num_speculative_tokens": 3}, is_static=True),
        engine(model, asked),  # as many as are worth it
    ]
    try:
        num_deaths = 0
        for number in range(first, first + count):
            life = Life(engines, truth, number)
            life.run()
            num_deaths += life.num_deaths
        figures = [core.stats().figures for core in engines]
    finally:
        for core in engines:
            core.shutdown()
    assert all(one["draft_tokens"] > 0 for one in figures)
    assert num_deaths or count < 50


@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.slow) for name in DRAFTERS]
)
def test_a_sample(drafter: str, tmp_path: Path) -> None:
    check(drafter, tmp_path, 0, SAMPLE.get(drafter, 12))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(100, 100 + PIECES * COUNT, COUNT))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ten_thousand_together(drafter: str, first: int, tmp_path: Path) -> None:
    check(drafter, tmp_path, first, COUNT)
