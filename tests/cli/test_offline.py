"""`manta generate` over the engine in this process."""

from __future__ import annotations

import argparse
import io

import pytest

from app.cli import engine
from app.cli.machine import Machine
from tests.cli.conftest import Manta

# The least that the built-in model needs, so that tests start quickly.
SMALL = ("--max-model-len", 256, "--kv-cache-memory-bytes", 32 << 20, "--num-threads", 1)


def test_generate_answers(manta: Manta) -> None:
    done = manta("generate", "What is 3 + 4?", "Spell cat.", "--temperature", 0, *SMALL)
    assert done.code == 0
    assert "# What is 3 + 4?\n3 + 4 = 7." in done.out
    assert "# Spell cat.\n" in done.out


def test_generate_raw_and_standard_input(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"))
    done = manta("generate", "--raw", "--temperature", 0, "--stop", "=", "--include-stop-str-in-output", *SMALL)
    assert done.out == "3 + 4 =\n"


@pytest.mark.parametrize(
    ("options", "executor"),
    [
        ((), "in_process"),
        (("--tensor-parallel-size", "1"), "in_process"),
        (("--tensor-parallel-size", "2"), "local_processes"),
        (("--pipeline-parallel-size", "2"), "local_processes"),
    ],
)
def test_several_ranks_are_processes(options: tuple[str, ...], executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "this_machine", lambda: Machine("this machine", 8, 0, 64 << 30, None))
    parser = argparse.ArgumentParser()
    engine.add_engine(parser)
    assert engine.offline_config(parser.parse_args([*options])).executor == executor


def test_an_empty_prompt(manta: Manta) -> None:
    assert "empty prompt" in manta("generate", " ").mistake
