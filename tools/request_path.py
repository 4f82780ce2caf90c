"""What a request passes through: the classes that carry it, the files that know its fields, and the calls of a chat.

    python -m tools.request_path [--json FILE]

Static counts come from the syntax trees of `app/`. The calls are those of one streamed chat over an engine in this
process, seen by `sys.setprofile` on every thread, from the HTTP application to the first call of a kernel. The CPU time
is that of the same chat, all of it, over an engine that costs nothing, and of a further token (text and event): of one
that waits with others, and of one that comes alone. Compare two revisions in turns, on one machine.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

APP = Path(__file__).resolve().parents[1] / "app"
RECORDS = {"dataclass", "Struct", "BaseModel", "NamedTuple"}
# Fields that say "this is a request or its output"; a record with three of them carries one.
CARRIED = {
    *("request_id", "prompt_token_ids", "token_ids", "output_token_ids", "sampling_params", "pooling_params", "work"),
    *("choice_index", "priority", "cache_root", "cache_salt", "root_hash", "asks", "spec"),
    *("new_token_ids", "sampled_token_ids", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs"),
}
THREE = 3
ROUNDS, CHATS = 21, 20  # of measuring: the least of so many rounds
MANY = 200  # tokens of a chat that tells what one costs
FIELDS = ("priority", "cache_salt", "cache_root", "stop_reason", "num_cached_tokens")


@dataclass
class CallPath:
    """The calls of one streamed chat up to the first kernel, and those back."""

    calls: int
    crossing_files: int
    files: int
    threads: int
    repeated: dict[str, int]


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Each file of `app/`, parsed."""
    for path in sorted(APP.rglob("*.py")):
        yield path.relative_to(APP), ast.parse(path.read_text())


def carriers() -> dict[str, list[str]]:
    """Record classes that hold three or more of a request's fields, with those fields."""
    found = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and _is_record(node):
                names = {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
                if len(names & CARRIED) >= THREE:
                    found[f"{path}:{node.name}"] = sorted(names & CARRIED)
    return found


def _is_record(node: ast.ClassDef) -> bool:
    words = {
        word.id for item in (*node.decorator_list, *node.bases) for word in ast.walk(item) if isinstance(word, ast.Name)
    }
    words |= {word.attr for item in node.bases for word in ast.walk(item) if isinstance(word, ast.Attribute)}
    return bool(words & RECORDS) or any("Request" in word for word in words)


def files_that_know(name: str) -> list[str]:
    """Files in which `name` is a variable, an attribute, an argument or a string of its own."""
    return [str(path) for path, tree in trees() if any(_names(node) == name for node in ast.walk(tree))]


def _names(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
            return name
        case ast.Constant(value=str() as name):
            return name
    return None


class Recorder:
    """Notes every call of a function of `app/`, on any thread, with its caller's file."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, int]] = []  # caller's file, file, function, thread

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(APP)):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(APP)):
            caller = caller.f_back
        file = frame.f_code.co_filename[len(str(APP)) + 1 :]
        came_from = caller.f_code.co_filename[len(str(APP)) + 1 :] if caller is not None else ""
        self.calls.append((came_from, file, frame.f_code.co_qualname, threading.get_ident()))

    def until_kernel(self) -> CallPath:
        """The calls before the first one into `kernels/`."""
        end = next(i for i, (_, file, _, _) in enumerate(self.calls) if file.startswith("kernels/"))
        way = self.calls[:end]
        often = Counter(f"{file}:{name}" for _, file, name, _ in way)
        return CallPath(
            len(way),
            sum(came_from != file for came_from, file, _, _ in way),
            len({file for _, file, _, _ in way}),
            len({thread for *_, thread in way}),
            {name: count for name, count in often.most_common(12) if count > 1},
        )


async def traced_chat() -> CallPath:
    """One streamed chat, traced; one like it before, so that nothing is imported or built meanwhile."""
    import httpx

    from app.api.server.app import create_app
    from app.config.limits import RequestLimits
    from tests.api.engine_in_this_process import EngineInThisProcess

    client = EngineInThisProcess()
    transport = httpx.ASGITransport(create_app(client, RequestLimits()))
    body = {"model": "tiny-chat", "stream": True, "max_tokens": 4, "temperature": 0, "seed": 1}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://manta") as http:
            await _chat(http, {**body, "messages": [{"role": "user", "content": "hi"}]})
            recorder = Recorder()
            _profile_engine(client, recorder)
            sys.setprofile(recorder)
            await _chat(http, {**body, "messages": [{"role": "user", "content": "Who are you?"}]})
            sys.setprofile(None)
            return recorder.until_kernel()
    finally:
        client.engine.shutdown()


class FreeEngine:
    """Answers with two tokens at no cost."""

    def __init__(self) -> None:
        from app.api.generation.served_models import load_served_model
        from app.config.model import ModelConfig

        self.models = {"tiny-chat": load_served_model(ModelConfig(name="tiny-chat"))}
        self.num_tokens, self.comes_alone = 2, False

    async def generate(self, model: str, request: Any, route: Any = None) -> AsyncIterator[Any]:
        """See EngineClient.generate."""
        from app.records.outputs import EngineOutput

        for number in range(self.num_tokens - 1):
            yield EngineOutput(request.request_id, [300 + number])
            if self.comes_alone:
                await asyncio.sleep(0)
        yield EngineOutput(request.request_id, [6], "length")


async def cost_us(num_tokens: int = 2, comes_alone: bool = False) -> float:
    """Microseconds of CPU for one streamed chat without its engine, client and server."""
    from app.api.server.app import create_app
    from app.config.limits import RequestLimits

    engine: Any = FreeEngine()
    engine.num_tokens, engine.comes_alone = num_tokens, comes_alone
    app = create_app(engine, RequestLimits())
    asked = {"model": "tiny-chat", "stream": True, "max_tokens": num_tokens, "temperature": 0, "seed": 1}
    raw = json.dumps({**asked, "messages": [{"role": "user", "content": "Who are you?"}]}).encode()
    headers = [(b"host", b"manta"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw))]

    async def chat() -> None:
        body = [{"type": "http.request", "body": raw, "more_body": False}]
        path = {"path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "root_path": ""}
        scope = {"type": "http", "method": "POST", "http_version": "1.1", "scheme": "http", "headers": headers, **path}

        async def receive() -> Any:
            return body.pop() if body else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200

        await app({**scope, "query_string": b"", "state": {}}, receive, send)

    rounds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(CHATS):
            await chat()
        rounds.append((time.process_time() - begin) / CHATS)
    return min(rounds) * 1e6


async def token_us(comes_alone: bool) -> float:
    """Microseconds of CPU for a further token of a chat."""
    return (await cost_us(2 + MANY, comes_alone) - await cost_us(2, comes_alone)) / MANY


def _profile_engine(client: Any, recorder: Recorder) -> None:
    """A thread sets its own profile: the engine's does so when it next runs."""
    core = client.engine._core
    step = core.step

    def profiled(*args: Any, **kwargs: Any) -> Any:
        sys.setprofile(recorder)
        return step(*args, **kwargs)

    core.step = profiled


async def _chat(http: Any, body: dict[str, Any]) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines: AsyncIterator[str] = answer.aiter_lines()
        async for _ in lines:
            pass


def main() -> None:
    """Print the counts; write them as JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the counts here too")
    options = parser.parse_args()
    known = {name: files_that_know(name) for name in FIELDS}
    path, chat_us = asyncio.run(traced_chat()), asyncio.run(cost_us())
    token = {"waits": asyncio.run(token_us(comes_alone=False)), "alone": asyncio.run(token_us(comes_alone=True))}
    counts = {"carriers": carriers(), "files": known, "chat": asdict(path), "chat_us": chat_us, "token_us": token}
    print(f"classes that carry a request   {len(counts['carriers']):4}  {', '.join(counts['carriers'])}")
    for name, files in known.items():
        print(f"files that know {name:18} {len(files):2}  {', '.join(files)}")
    print(f"calls to the first kernel      {path.calls:4}  {path.crossing_files} into another file, {path.files} files")
    print(f"CPU of a chat, no engine     {chat_us:6.0f}  us")
    print(f"CPU of a token with others   {token['waits']:6.1f}  us; that comes alone: {token['alone']:.1f} us")
    for name, count in path.repeated.items():
        print(f"{'':30} {count:4}  {name}")
    if options.json:
        options.json.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
