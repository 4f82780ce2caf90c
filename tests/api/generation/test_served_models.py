"""What the ingress keeps of a model and of its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from app.api.generation.served_models import load_served_model
from app.api.http.auth import ApiKeys
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.config.model import ModelConfig
from app.text.served_model import ServedModel
from tests.api.conftest import ScriptedClient, write_model


def load(engine: dict[str, Any], **options: Any) -> ServedModel:
    fields = {"name": "m", "engine": {"model": "tiny-chat", **engine}, **options}
    return load_served_model(ModelConfig.model_validate(fields))


def test_one_request_leaves_rows_of_all_replicas_and_of_each() -> None:
    served = load({"max_num_seqs": 8}, num_replicas=3)
    assert (served.max_running, served.max_running_of_prompt) == (18, 6)


def test_the_tokenizer_that_is_told_of_is_the_one_in_use(tmp_path: Path) -> None:
    """A --tokenizer of its own; and what is told was read once, at the start."""
    own = write_model(tmp_path / "own")
    file = own / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "OwnTokenizer"}))
    app = create_app(
        ScriptedClient(load({"tokenizer": str(own)})),
        RequestLimits(),
        IngressConfig(tokenizer_info=True),
        keys=ApiKeys(),
    )
    file.unlink()
    told = TestClient(app).get("/tokenizer_info").json()
    assert told["tokenizer_class"] == "OwnTokenizer"
    assert told["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in told["chat_template"]
