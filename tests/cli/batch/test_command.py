"""`manta run-batch`: over an engine in this process, and through a server that is full, slow, gone or killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from tests import limits
from tests.api.picture_table import BROKEN, SHOWING, url_of
from tests.chatting_media import ask_of, chatting_media_model
from tests.cli.conftest import Manta
from tests.media.pictures import file_of, picture
from tests.tiny_encoders import tiny_encoder
from tests.tiny_media import judged

SMALL = ("--max-model-len", 256, "--kv-cache-memory-bytes", 32 << 20, "--num-threads", 1)
URL = "/v1/completions"


def line(custom_id: str, url: str = URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


class Scripted(ThreadingHTTPServer):
    """Answers with the prompt, once it `may_answer`; `statuses` go to the first requests of each prompt."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: dict[str, list[int]] = {}
        self.may_answer: Callable[[], bool] = lambda: True
        self.seen: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, server = body["prompt"], self.server
        with server.lock:
            server.seen[prompt] += 1
            server.headers.append(dict(self.headers))
            server.num_running += 1
            server.most_running = max(server.most_running, server.num_running)
            left = server.statuses.get(prompt) or [200]
            status = left.pop(0)
        limits.wait_until(lambda: server.may_answer(), "leave to answer")
        with server.lock:
            server.num_running -= 1
        if status == 0:  # cut
            self.close_connection = True
            return
        payload = json.dumps({"text": prompt} if status == 200 else {"error": {"message": "no"}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("x-request-id", f"id-{prompt}")
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_without_a_server(manta: Manta, tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "What is 3 + 4?"}]
    source = write(
        tmp_path / "in.jsonl",
        line("chat", "/v1/chat/completions", model="tiny-chat", messages=hello, temperature=0),
        "",
        line("text", prompt=[5, 6, 7], max_tokens=3, n=2, seed=1),
        line("beams", prompt="Once", max_tokens=3, use_beam_search=True, n=2),
        line("wrong", prompt="x", max_tokens=-1),
        line("unknown", model="other", prompt="x"),
        line("vectors", "/v1/embeddings", input="x"),
        "{not JSON",
        line("text", prompt="again"),
        {"custom_id": "get", "method": "GET", "url": URL, "body": {}},
        line("where", "/v1/files"),
        line("streams", prompt="x", stream=True),
        line("", prompt="x"),
    )
    out = tmp_path / "deep" / "out.jsonl"
    done = manta("run-batch", source, out, *SMALL)
    assert done.code == 1
    assert "3 done, 9 failed, 0 had results" in done.err
    found = read(out)
    by_id = {entry["custom_id"]: entry for entry in found if entry["error"] is None}
    chat = ChatCompletion.model_validate(by_id["chat"]["response"]["body"])
    assert "7" in (chat.choices[0].message.content or "")
    text = Completion.model_validate(by_id["text"]["response"]["body"])
    assert [choice.index for choice in text.choices] == [0, 1]
    assert len(by_id["beams"]["response"]["body"]["choices"]) == 2
    assert {name: entry["response"]["status_code"] for name, entry in by_id.items()} == {
        "chat": 200, "text": 200, "beams": 200, "wrong": 400, "unknown": 404, "vectors": 400,
    }  # fmt: skip
    assert by_id["wrong"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert all(entry["response"]["request_id"] for entry in by_id.values())
    faults = {entry["error"]["line"]: entry["error"]["message"] for entry in found if entry["error"] is not None}
    expected = {8: "no JSON", 9: "twice", 10: "POST", 11: "url", 12: "stream", 13: "custom_id"}
    assert set(faults) == set(expected)
    assert all(words in faults[number] for number, words in expected.items())
    assert len({entry["id"] for entry in found}) == len(found)

    before = out.read_bytes()
    again = manta("run-batch", source, out, *SMALL)
    assert again.code == 1, "failures are kept, and said again"
    assert "0 done, 0 failed, 12 had results (9 of them failures: --retry-failed)" in again.err
    assert out.read_bytes() == before


def test_files_by_option_as_in_vllm(manta: Manta, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", "not empty")
    twice = manta("run-batch", source, tmp_path / "out.jsonl", "-i", source)
    for done in (twice, manta("run-batch", "-i", source), manta("run-batch", source)):
        assert done.mistake == "give IN.jsonl and OUT.jsonl, once each: as two words, or with -i and -o"
    for words in (("-i", source, "-o", source), ("-o", source, source), ("-i", source, source)):
        assert manta("run-batch", *words).mistake == "OUT.jsonl is IN.jsonl"


def test_prompts_instead_of_requests(manta: Manta, tmp_path: Path) -> None:
    hello = [{"role": "user", "content": "What is 3 + 4?"}]
    source = write(
        tmp_path / "prompts",
        "What is 1 + 1?",
        "",
        {"messages": hello, "id": "seven"},
        {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True},
        {"messages": hello, "n": 2, "temperature": 1, "seed": 5, "max_tokens": 2},
        {"prompt": "a", "temprature": 1},
        {"prompt": [5] * 300},
    )
    out = tmp_path / "out.jsonl"
    done = manta("run-batch", source, out, "--chat", "--temperature", 0, *SMALL)
    assert "4 done, 2 failed" in done.err
    bodies = {entry["custom_id"]: entry["response"]["body"] for entry in read(out)}
    assert ChatCompletion.model_validate(bodies["line-1"]).choices[0].message.content == "1 + 1 = 2."
    assert ChatCompletion.model_validate(bodies["seven"]).choices[0].message.content == "3 + 4 = 7."
    ids = Completion.model_validate(bodies["line-4"])
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens, ids.choices[0].finish_reason) == (3, 3, "length")
    assert len(ChatCompletion.model_validate(bodies["line-5"]).choices) == 2
    assert bodies["line-6"]["error"]["param"] == "temprature"
    assert "300" in bodies["line-7"]["error"]["message"]


def test_pictures_as_over_http(manta: Manta, tmp_path: Path) -> None:
    """Each dialect's own form, and the limits of a server; transformers is the judge."""
    model, url = chatting_media_model("qwen3_vl", tmp_path / "m"), url_of(30, 20)
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    greedy: dict[str, Any] = {"model": "m", "temperature": 0}
    chat = {"max_tokens": 5, "return_token_ids": True}
    fields = dict(zip(paths, (chat, {"max_output_tokens": 5}, {"max_tokens": 5}), strict=True))
    source = write(
        tmp_path / "in.jsonl",
        *(line(path, path, **{**SHOWING[path][0]([url]), **greedy, **fields[path]}) for path in paths),
        line("two", paths[0], **SHOWING[paths[0]][0]([url, url]), **greedy),
        line("broken", paths[0], **SHOWING[paths[0]][0]([BROKEN]), **greedy),
        line("fetched", paths[0], **SHOWING[paths[0]][0](["http://images.example/a.png"]), **greedy),
    )
    out = tmp_path / "out.jsonl"
    done = manta("run-batch", source, out, "--model", model, *SMALL, "--limit-mm-per-prompt", '{"image": 1}')
    assert "3 done, 3 failed" in done.err, done.err
    bodies = {entry["custom_id"]: entry["response"]["body"] for entry in read(out)}
    answer, ids = bodies[paths[0]]["choices"][0], bodies[paths[0]]["prompt_token_ids"]
    assert answer["token_ids"] == judged("qwen3_vl", ids, ask_of(model, ids, file_of(picture(30, 20))), 5)[1]
    said = answer["message"]["content"]
    assert [part["text"] for part in bodies[paths[1]]["output"][0]["content"]] == [said]
    assert [block["text"] for block in bodies[paths[2]]["content"]] == [said]
    errors = {name: bodies[name]["error"] for name in ("two", "broken", "fetched")}
    assert {error["param"].rpartition(".")[2] for error in errors.values()} == {"image_url"}
    assert "2 pictures; at most 1 a prompt" in errors["two"]["message"]
    assert "takes pictures as data URLs only" in errors["fetched"]["message"]


def test_pooling_models(manta: Manta, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("vectors", "/v1/embeddings", input=["one", "two"]),
        line("score", "/v1/score", text_1="one", text_2=["one", "two"]),
    )
    out = tmp_path / "out.jsonl"
    done = manta("run-batch", source, out, "--model", tiny_encoder("bert"), "--num-threads", 1)
    assert done.code == 0, done.err
    bodies = {entry["custom_id"]: entry["response"]["body"] for entry in read(out)}
    assert len(CreateEmbeddingResponse.model_validate(bodies["vectors"]).data) == 2
    same, other = (entry["score"] for entry in bodies["score"]["data"])
    assert same == pytest.approx(1.0, abs=1e-4)
    assert other < same


def test_a_full_server_is_asked_again(manta: Manta, server: Scripted, tmp_path: Path) -> None:
    server.statuses = {"a": [429, 503, 200], "b": [0, 200], "c": [400], "d": [500]}
    source = write(tmp_path / "in.jsonl", *(line(name, prompt=name) for name in "abcde"))
    out = tmp_path / "out.jsonl"
    done = manta("run-batch", source, out, "--url", server.url, "--api-key", "secret")
    assert done.code == 1
    results = {entry["custom_id"]: entry["response"] for entry in read(out)}
    assert {name: result["status_code"] for name, result in results.items()} == {
        "a": 200, "b": 200, "c": 400, "d": 500, "e": 200,
    }  # fmt: skip
    assert dict(server.seen) == {"a": 3, "b": 2, "c": 1, "d": 1, "e": 1}
    assert results["e"] == {"status_code": 200, "request_id": "id-e", "body": {"text": "e"}}
    assert all(headers["Authorization"] == "Bearer secret" for headers in server.headers)


def test_at_most_so_many_at_a_time(manta: Manta, server: Scripted, tmp_path: Path) -> None:
    server.may_answer = lambda: server.most_running >= 3
    source = write(tmp_path / "in.jsonl", *(line(f"{i}", prompt=f"{i}") for i in range(30)))
    done = manta("run-batch", source, tmp_path / "out.jsonl", "--url", server.url, "--concurrency", 3)
    assert done.code == 0
    assert server.most_running == 3


def test_a_server_that_is_gone_ends_the_run_and_the_next_one_goes_on(
    manta: Manta, server: Scripted, tmp_path: Path
) -> None:
    server.statuses = {"1": [503], "3": [401]}
    source = write(tmp_path / "in.jsonl", *(line(f"{i}", prompt=f"{i}") for i in range(5)))
    out = tmp_path / "out.jsonl"
    options = (source, out, "--url", server.url, "--concurrency", 1, "--retries", 0)
    for expected in ("HTTP 503", "HTTP 401"):
        done = manta("run-batch", *options)
        assert done.code == 1
        assert expected in done.err
    assert manta("run-batch", *options).code == 0
    assert sorted(entry["custom_id"] for entry in read(out)) == list("01234")
    assert server.seen == {"0": 1, "1": 2, "2": 1, "3": 2, "4": 1}, "what has a result is not sent again"


def test_killed_and_taken_up_again(manta: Manta, server: Scripted, tmp_path: Path) -> None:
    killed = threading.Event()
    server.may_answer = lambda: sum(server.seen.values()) < 12 or killed.is_set()
    num = 60
    source = write(tmp_path / "in.jsonl", *(line(f"{i}", prompt=f"{i}") for i in range(num)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "app.cli", "run-batch", source, out, "--url", server.url, "--concurrency", "2"]
    process = subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL)
    limits.wait_until(lambda: sum(server.seen.values()) >= 9 or process.poll() is not None, "nine requests")
    assert process.poll() is None
    busy = manta("run-batch", source, out, "--url", server.url)
    assert "another run" in busy.mistake
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed.set()
    kept = read(out)
    assert 0 < len(kept) < num
    with out.open("ab") as file:
        file.write(json.dumps({"id": "batch_req_1", "custom_id": "cut"}).encode()[:25])  # as a kill would leave it
    done = manta("run-batch", source, out, "--url", server.url)
    assert done.code == 0
    assert f"{num - len(kept)} done, 0 failed, {len(kept)} had results" in done.err
    results = read(out)
    assert results[: len(kept)] == kept
    assert Counter(entry["custom_id"] for entry in results) == Counter(str(i) for i in range(num))
    assert all(entry["response"]["body"] == {"text": entry["custom_id"]} for entry in results)


def test_failures_are_retried_when_asked(manta: Manta, server: Scripted, tmp_path: Path) -> None:
    server.statuses = {"b": [500, 200], "c": [400]}
    source = write(tmp_path / "in.jsonl", *(line(name, prompt=name) for name in "abc"), "{not JSON")
    out = tmp_path / "out.jsonl"
    options = (source, out, "--url", server.url)
    assert manta("run-batch", *options).code == 1
    first = read(out)
    again = manta("run-batch", *options)
    assert again.code == 1
    assert "3 of them failures" in again.err
    assert read(out) == first
    write(source, *(line(name, prompt=name) for name in "abc"))  # mended
    server.statuses = {"b": [200], "c": [200]}
    done = manta("run-batch", *options, "--retry-failed")
    assert done.code == 0, done.err
    assert "2 done, 0 failed, 1 had results" in done.err
    assert sorted(entry["custom_id"] for entry in read(out)) == list("abc")
    assert all(entry["response"]["status_code"] == 200 for entry in read(out))
    assert server.seen == {"a": 1, "b": 2, "c": 2}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_results_of_another_batch_do_not_count(manta: Manta, server: Scripted, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for names in ("ab", "cd"):
        source = write(tmp_path / f"{names}.jsonl", *(line(name, prompt=name) for name in names))
        done = manta("run-batch", source, out, "--url", server.url)
        assert "2 done, 0 failed, 0 had results" in done.err
    assert dict(server.seen) == dict.fromkeys("abcd", 1)


@pytest.mark.parametrize("wrong", [[], {}, 5, None, True])
def test_a_url_of_another_type_is_that_lines_fault(
    manta: Manta, server: Scripted, tmp_path: Path, wrong: object
) -> None:
    source = write(tmp_path / "in.jsonl", {**line("odd"), "url": wrong}, line("good", prompt="good"))
    out = tmp_path / "out.jsonl"
    done = manta("run-batch", source, out, "--url", server.url)
    assert "1 done, 1 failed" in done.err
    (fault,) = [entry["error"] for entry in read(out) if entry["error"]]
    assert fault["message"].startswith("line 1: url: expected one of /classify")


def test_a_pipe_as_input(server: Scripted, tmp_path: Path) -> None:
    lines = "".join(json.dumps(line(name, prompt=name)) + "\n" for name in "abc")
    for source in ("-", "/dev/stdin"):
        out = tmp_path / f"{len(source)}.jsonl"
        command = [sys.executable, "-m", "app.cli", "run-batch", source, str(out), "--url", server.url]
        done = subprocess.run(
            command, input=lines, capture_output=True, text=True, timeout=limits.patience_s(), check=False
        )
        assert (done.returncode, done.stderr) == (0, "3 done, 0 failed, 0 had results\n")
        assert sorted(entry["custom_id"] for entry in read(out)) == list("abc")
    empty = subprocess.run(command, input="", capture_output=True, text=True, timeout=limits.patience_s(), check=False)
    assert (empty.returncode, empty.stderr) == (2, "manta: error: /dev/stdin: no requests\n")


def test_mistakes(manta: Manta, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a", prompt="a"))
    assert "No such file" in manta("run-batch", tmp_path / "none", tmp_path / "out").mistake
    assert "OUT.jsonl is IN.jsonl" in manta("run-batch", source, source).mistake
    other = write(tmp_path / "notes.txt", "my notes")
    assert "line 1 is no result" in manta("run-batch", source, other).mistake
    assert other.read_text() == "my notes\n"
    out = tmp_path / "out"
    assert "--concurrency" in manta("run-batch", source, out, "--concurrency", 0).mistake
    assert "--model" in manta("run-batch", source, out, "--url", "http://127.0.0.1:1", "--model", "x").mistake
    assert "--temperature" in manta("run-batch", source, out, "--temperature", -1).mistake
    assert "--max-num-seqs" in manta("run-batch", source, out, "--url", "http://x", "--max-num-seqs", 4).mistake
    assert "--api-key" in manta("run-batch", source, out, "--api-key", "k").mistake
    assert "url" in manta("run-batch", source, out, "--url", "nonsense").mistake
    gone = manta("run-batch", source, out, "--url", "http://127.0.0.1:1", "--retries", 0)
    assert gone.code == 1
    assert "run it again" in gone.err
    assert out.read_text() == ""
