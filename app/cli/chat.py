"""`manta chat`: talk in the terminal to a server that runs.

Answers stream; Ctrl-C stops an answer (and, with the connection, the engine's work on it), Ctrl-D or /exit leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Any

from app.cli.command import Command, CommandError
from app.cli.sampling import add_sampling, sampling_given
from app.cli.server_options import add_server, server_given
from app.cli.server_queries import choose_model
from app.cli.stream_client import Chunk, Server, StreamResult, stream_completion

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = "/exit or /quit leaves, /new starts again, /system TEXT does so with a system prompt, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Server, conversation, sampling."""
    add_server(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("-m", "--message", metavar="TEXT", help="send this one message, print the answer and leave")
    parser.add_argument("--stats", action="store_true", help="after each answer: time to first token, tokens/s")
    add_sampling(parser)


def run(args: argparse.Namespace) -> int:
    """One message, or a conversation until the end of input."""
    sampling = sampling_given(args)
    server = server_given(args)
    chat = Conversation(server, choose_model(server, args.model), args.system, sampling, args.stats)
    if args.message is not None:
        return 0 if chat.say(args.message) else 1
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history for input())
        print(f"{chat.model} at {server.base}. {HELP}.")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text:
            chat.take(text)


class Conversation:
    """The messages so far, and the screen they are printed on."""

    def __init__(self, server: Server, model: str, system: str | None, sampling: dict[str, Any], stats: bool) -> None:
        self.server, self.model, self.sampling, self.stats = server, model, sampling, stats
        self.messages: list[dict[str, Any]] = []
        self._styled = sys.stdout.isatty()
        self._reasoning = False  # what is being printed now
        self._start(system)

    def take(self, text: str) -> None:
        """A command or a message. A failure is printed, and the conversation goes on."""
        name, _, rest = text.partition(" ")
        if name == "/new":
            self._start(next((m["content"] for m in self.messages if m["role"] == "system"), None))
        elif name == "/system":
            self._start(rest.strip() or None)
        elif name == "/help":
            print(f"{HELP}.")
        elif name.startswith("/"):
            print(f"{name}: no such command. {HELP}.")
        else:
            try:
                self.say(text)
            except CommandError as error:
                print(f"manta: {error.message}", file=sys.stderr)

    def say(self, text: str) -> bool:
        """Send a message and stream the answer; False when it was stopped. CommandError when there was none."""
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, **self.sampling}
        try:
            result = asyncio.run(stream_completion(self.server, body, "/v1/chat/completions", self._show))
        except KeyboardInterrupt:
            self._style(PLAIN)
            print(" [stopped]")
            self.messages.pop()
            return False
        self._style(PLAIN)
        self._reasoning = False
        print()
        if result.error is not None:
            self.messages.pop()
            raise CommandError(result.error)
        self.messages.append({"role": "assistant", "content": result.text})
        if self.stats:
            self._print_stats(result)
        return True

    def _start(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def _show(self, chunk: Chunk) -> None:
        for choice in chunk.choices or []:
            delta = choice.delta
            if delta is None:
                continue
            if delta.reasoning_content:
                self._switch(True)
                print(delta.reasoning_content, end="", flush=True)
            if delta.content:
                self._switch(False)
                print(delta.content, end="", flush=True)
            for call in delta.tool_calls or []:
                function = call.get("function") or {}
                print(f"{function.get('name') or ''}{function.get('arguments') or ''}", end="", flush=True)

    def _switch(self, reasoning: bool) -> None:
        """Switch between printing reasoning and answer."""
        if reasoning != self._reasoning:
            self._style(DIM if reasoning else PLAIN)
            if not reasoning:
                print("\n")
            self._reasoning = reasoning

    def _style(self, code: str) -> None:
        if self._styled:
            print(code, end="", flush=True)

    def _print_stats(self, result: StreamResult) -> None:
        seconds = result.e2e_s - result.ttft_s
        rate = f", {(result.num_tokens - 1) / seconds:.0f} tokens/s" if result.num_tokens > 1 and seconds > 0 else ""
        self._style(DIM)
        print(f"[{result.num_tokens} tokens, first after {1e3 * result.ttft_s:.0f} ms{rate}]")
        self._style(PLAIN)


COMMAND = Command("chat in the terminal with a running server", add_arguments, run)
