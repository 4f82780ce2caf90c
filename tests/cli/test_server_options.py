"""Which key a command sends: to a server that wants one, and where the key may come from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.api.http.auth import ApiKey, ApiKeys
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.conftest import ScriptedClient, Server, served, write_model
from tests.cli.conftest import Manta


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    client = ScriptedClient(served(write_model(tmp_path_factory.mktemp("model"))))
    keys = ApiKeys([ApiKey.parse("right-key", "test")])
    with Server(create_app(client, RequestLimits(), keys=keys)) as server:
        yield server.url


def commands(url: str) -> list[list[object]]:
    bench = ["bench", "--url", url, "--num-prompts", 1, "--input-len", 8, "--output-len", 4]  # asks /tokenize as well
    return [["chat", "--url", url, "-m", "hello"], bench]


def test_the_option_and_the_environment(manta: Manta, monkeypatch: pytest.MonkeyPatch, guarded_url: str) -> None:
    for command in commands(guarded_url):
        assert manta(*command, "--api-key", "right-key").code == 0
        monkeypatch.setenv("OPENAI_API_KEY", "right-key")
        assert manta(*command).code == 0
        monkeypatch.setenv("MANTA_API_KEY", "wrong-key")  # comes before the other
        assert manta(*command).code == 1
        assert manta(*command, "--api-key", "right-key").code == 0
        monkeypatch.delenv("MANTA_API_KEY")
        monkeypatch.delenv("OPENAI_API_KEY")


def test_no_key_and_a_wrong_one_are_said_in_one_line(manta: Manta, guarded_url: str) -> None:
    for command in commands(guarded_url):
        missing, wrong = manta(*command), manta(*command, "--api-key", "wrong-key")
        assert (missing.code, wrong.code) == (1, 1)
        assert missing.err.endswith("the server wants a key; give it with --api-key or MANTA_API_KEY\n")
        assert wrong.err.endswith("the key is not accepted; give another with --api-key or MANTA_API_KEY\n")
        assert (missing.err + wrong.err).count("\n") == 2
        assert "wrong-key" not in wrong.err
