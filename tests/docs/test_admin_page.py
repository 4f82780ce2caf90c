"""The lines of curl on docs/admin.md ask for what the operator's listener has."""

from __future__ import annotations

import shlex
from itertools import pairwise

from starlette.testclient import TestClient

from app.api.admin.app import create_admin_app
from app.api.http.auth import ApiKey, ApiKeys
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.telemetry.tenant_tokens import TenantLabels
from tests.api.admin.test_app import Fleet
from tests.docs.pages import DOCS, blocks

KEY = "operator-key-0123"
ADDRESS = "http://127.0.0.1:8001"


def test_each_line_is_answered() -> None:
    config = ServeConfig(models=(ModelConfig(name="m"),))
    fleet = Fleet()
    http = TestClient(create_admin_app(fleet, config, ApiKeys([ApiKey.parse(KEY, "here")]), TenantLabels()))
    lines = [line for block in blocks((DOCS / "admin.md").read_text(), "sh") for line in block.splitlines()]
    assert len(lines) > 8
    for line in lines:
        program, *words = shlex.split(line.replace("$MANTA_ADMIN_KEY", KEY))
        options = list(pairwise(words))
        headers = dict(value.split(": ", 1) for option, value in options if option == "-H")
        body = next((value for option, value in options if option == "-d"), None)
        method = next((value for option, value in options if option == "-X"), "GET" if body is None else "POST")
        (url,) = (word for word in words if word.startswith("http"))
        assert program == "curl"
        answer = http.request(method, url.removeprefix(ADDRESS), headers=headers, content=body)
        assert answer.status_code == 200, f"{line}: {answer.text}"
    assert len(fleet.asked) == 9
