"""A served model with a small byte-level tokenizer, a scripted engine behind it, and uvicorn in a thread before it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from app.api.engine_client import RouteInfo
from app.api.server.app import create_app
from app.checkpoints.model_info import ModelInfo
from app.config.limits import RequestLimits
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.step import TokenLogprobs
from app.text.chat_template import ChatTemplate
from app.text.served_model import ServedModel
from app.text.tokenizer import Tokenizer
from tests import limits
from tests.limits import wait_until

TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> Answer with <tool_call>.<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "Grüße aus Köln, naïve café 東京 🙂👩‍👩‍👧 نص हिन्दी. ",
    'Tools: {"name": "add", "arguments": {"a": 1, "b": 2}} and a list of words, one, two, three. ',
]


def write_model(path: Path, max_len: int = 512, **generation_config: Any) -> Path:
    """A model directory with everything but weights."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**named, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    size = backend.get_vocab_size()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": size, "max_position_embeddings": max_len}
    (path / "config.json").write_text(json.dumps(config))
    eos = backend.token_to_id("<|im_end|>")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, **generation_config}))
    return path


def served(path: Path, name: str = "m", **options: Any) -> ServedModel:
    """The model in `path` as the ingress would serve it."""
    info = ModelInfo.from_directory(str(path))
    tokenizer = Tokenizer.from_directory(path)
    template = ChatTemplate.from_directory(path, tokenizer)
    return ServedModel(name, info, tokenizer, template, info.max_position_embeddings, created=1, **options)


class ScriptedClient:
    """An EngineClient whose engine answers by a script: token ids in `step` sized outputs, one end-of-sequence."""

    def __init__(self, *models: ServedModel) -> None:
        self.models = {name: model for model in models for name in (model.name, *model.aliases)}
        self.script: Callable[[EngineRequest], list[int]] = lambda request: request.prompt_token_ids
        self.step = 1
        self.last: dict[str, Any] = {}  # what the last output says beside its tokens
        self.delay_s = 0.0
        self.healthy = True
        self.fail_after: tuple[int, Exception] | None = None
        self.fail_once: Exception | None = None  # before any output
        self.gate: asyncio.Event | None = None  # who has given `gate_after` outputs waits for it
        self.gate_after = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.requests: list[EngineRequest] = []
        self.num_running = 0
        self.num_aborted = 0

    def open(self) -> None:
        """Open the gate, from any thread."""
        assert self.gate is not None
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.gate.set)

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncIterator[EngineOutput]:
        self._loop = asyncio.get_running_loop()
        self.requests.append(request)
        self.num_running += 1
        if route is not None:
            route.replica_id = "replica-7"
        try:
            for i, output in enumerate(self._outputs(self.models[model], request)):
                if (error := self.fail_once) is not None:
                    self.fail_once = None
                    raise error
                if self.fail_after is not None and i == self.fail_after[0]:
                    raise self.fail_after[1]
                await asyncio.sleep(self.delay_s)
                if self.gate is not None and i >= self.gate_after:
                    await self.gate.wait()
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1

    def _outputs(self, model: ServedModel, request: EngineRequest) -> Iterator[EngineOutput]:
        params = request.sampling
        eos = model.info.eos_token_ids[0]
        assert params.max_tokens is not None
        assert params.seed is not None
        script = [*self.script(request), eos]
        tokens, reason = (
            (script, "stop") if len(script) <= params.max_tokens else (script[: params.max_tokens], "length")
        )
        first: dict[str, Any] = {"num_cached_tokens": min(16, len(request.prompt_token_ids) // 2)}
        if params.prompt_logprobs is not None:
            scored = [logprobs_of(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:]]
            first["prompt_logprobs"] = [None, *scored]
        for start in range(0, len(tokens), self.step):
            part = tokens[start : start + self.step]
            named = params.logprob_token_ids
            logprobs = (
                None if params.logprobs is None else [logprobs_of(token, params.logprobs, named) for token in part]
            )
            is_last = start + self.step >= len(tokens)
            first |= self.last if is_last else {}
            yield EngineOutput(request.request_id, part, reason if is_last else None, logprobs=logprobs, **first)
            first = {}

    async def is_healthy(self) -> bool:
        return self.healthy

    async def metrics_text(self) -> str:
        return "vllm:num_requests_running 0\n"


def logprobs_of(token: int, k: int, named: Sequence[int] | None = None) -> TokenLogprobs:
    """Made-up but recognisable: the chosen token, then ids 10, 11, ... as the most likely, or those `named`."""
    top = list(range(10, 10 + k) if named is None else named)
    places = range(1, len(top) + 1)
    return TokenLogprobs([token, *top], [-token / 100, *(-0.1 * i for i in places)], [3, *places])


class PromptServer(uvicorn.Server):
    """Ends when it is asked to. uvicorn looks ten times a second, and waits a tenth more for what is open: thousands of
    tests would wait for both."""

    _asked: asyncio.Event
    _loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        self._asked, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if not await self.on_tick(0):
            await self._asked.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await limits.until(lambda: not (self.server_state.connections or self.server_state.tasks), "the last answer")

    def end(self) -> None:
        """Asks from any thread."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._asked.set)


class Server:
    """uvicorn in a thread, on a port that nobody else can take before it."""

    def __init__(self, app: Any) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self._server = PromptServer(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        self._thread.start()
        wait_until(lambda: self._server.started, "the server's start")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()
        self._thread.join(limits.patience_s())


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def served_model(model_dir: Path) -> ServedModel:
    return served(model_dir, aliases=("alias",))


@pytest.fixture
def client(served_model: ServedModel) -> ScriptedClient:
    return ScriptedClient(served_model)


@pytest.fixture
def write_model_dir() -> Callable[..., Path]:
    """`write_model`, for tests that need a model of their own."""
    return write_model


@pytest.fixture
def serve_model() -> Callable[..., ServedModel]:
    """`served`, for tests that need a model of their own."""
    return served


@pytest.fixture
def make_client() -> type[ScriptedClient]:
    return ScriptedClient


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    return wait_until


LIMITS = RequestLimits(max_body_bytes=200_000, max_n=8, max_prompts=16, max_logprobs=5, max_stop=4)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start a server over any client; all are stopped at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda client: stack.enter_context(Server(create_app(client, LIMITS)))


@pytest.fixture
def http_to() -> Iterator[Callable[[Any], httpx.Client]]:
    """A client of any application, which is served until the end."""
    with contextlib.ExitStack() as stack:

        def connect(app: Any) -> httpx.Client:
            url = stack.enter_context(Server(app)).url
            return stack.enter_context(httpx.Client(base_url=url, timeout=limits.patience_s(), verify=False))

        yield connect


@pytest.fixture
def server(client: ScriptedClient, serve: Callable[..., Server]) -> Server:
    return serve(client)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    json_type = {"content-type": "application/json"}
    # No TLS here: `verify` would read the certificates of the world for each test, 20 ms.
    with httpx.Client(base_url=server.url, timeout=limits.patience_s(), headers=json_type, verify=False) as http:
        yield http


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    transport = openai.DefaultHttpxClient(verify=False)
    own = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s(), "http_client": transport}
    with openai.OpenAI(base_url=f"{server.url}/v1", **own) as sdk:
        yield sdk
