"""`manta chat` against a scripted server, in a pipe and in a terminal."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess

import pytest

from benchmarks.serve_process import ROOT, interruptible
from tests import limits
from tests.cli.conftest import Manta
from tests.cli.fake_server import FakeServer, Script


def test_one_message(manta: Manta) -> None:
    with FakeServer([Script([0.0, 0.0], 2, 5, ["Hel", "lo"])]) as server:
        done = manta("chat", "--url", server.url, "-m", "hi", "--system", "be brief", "--temperature", 0, "--stats")
    assert done.code == 0
    assert done.out.startswith("Hello\n[2 tokens, first after ")
    body = server.seen[0].body
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (body["model"], body["temperature"]) == ("fake", 0)
    assert "top_p" not in body  # what is not given is the server's to choose


def test_conversation(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = [Script([0.0], 1, 1, ["one"]), Script([0.0], 1, ending="error"), Script([0.0], 1, 1, ["three"])]
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n\nc\n/new\n/nonsense\n/help\n/system s\nd\n/quit\ne\n"))
    with FakeServer(scripts) as server:
        done = manta("chat", "--url", server.url)
    assert done.code == 0
    assert "the engine died" in done.err  # and the conversation goes on
    assert "/nonsense: no such command" in done.out
    assert "\n/exit or /quit leaves" in done.out, "/help"
    said = [[(m["role"], m["content"]) for m in s.body["messages"]] for s in server.seen]
    assert said[2] == [("user", "a"), ("assistant", "one"), ("user", "c")]  # b got no answer
    assert said[3] == [("system", "s"), ("user", "d")]
    assert len(said) == 4


def test_no_server_and_no_model(manta: Manta) -> None:
    done = manta("chat", "-m", "hi", "--url", "http://127.0.0.1:9")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "no server answers at http://127.0.0.1:9" in done.err
    with FakeServer([], {"/v1/models": {"data": []}}) as server:
        assert "lists no model" in manta("chat", "-m", "hi", "--url", server.url).err
    with FakeServer([], {"/v1/models": None}) as server:
        assert "HTTP 404" in manta("chat", "-m", "hi", "--url", server.url).err
    with FakeServer([Script([], ending="status")]) as server:
        done = manta("chat", "-m", "hi", "--url", server.url)
    assert (done.code, done.err) == (1, "manta: error: 400 Bad Request: the context is too short\n")


def read_until(terminal: int, text: str) -> str:
    """What the terminal showed until `text` came."""
    shown, limit = "", limits.Limit(20.0)
    os.set_blocking(terminal, False)
    while text not in shown:
        if not limit.left_s():
            limit.fail(f"{text!r} in {shown!r}")
        try:
            shown += os.read(terminal, 4096).decode()
        except BlockingIOError:
            limits.pause(0.02)
    return shown


def test_in_a_terminal_ctrl_c_stops_the_answer_only() -> None:
    scripts = [Script([0.02] * 500, 500, 1), Script([0.0], 1, 1, ["again"])]
    with FakeServer(scripts) as server:
        terminal, end = pty.openpty()
        process = subprocess.Popen(
            interruptible("-m", "app.cli", "chat", "--url", server.url),
            cwd=ROOT, stdin=end, stdout=end, stderr=end, start_new_session=True,
        )  # fmt: skip
        try:
            read_until(terminal, "> ")
            os.write(terminal, b"long\n")
            read_until(terminal, "xxx")
            process.send_signal(signal.SIGINT)
            read_until(terminal, "[stopped]")
            os.write(terminal, b"more\n")
            read_until(terminal, "again")
            os.write(terminal, b"/exit\n")
            assert process.wait(limits.patience_s()) == 0
        finally:
            process.kill()
            process.wait()
        assert server.seen[0].closed_early.wait(limits.patience_s())  # the server was told
        assert [m["content"] for m in server.seen[1].body["messages"]] == ["more"]
