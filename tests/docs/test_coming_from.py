"""docs/coming_from.md: every name of Manta is one of the code's, and each field of `manta convert` stands there."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel

from app.api.chat.chat_request import ChatRequest
from app.api.http.auth import ApiKeys
from app.api.http.request_log import QUIET_PATHS
from app.api.server.app import create_app
from app.backends import ATTENTION_BACKENDS, EXECUTORS, LOAD_FORMATS, QUANT_METHODS
from app.config.ingress import KEYS_VARIABLE
from app.config.limits import RequestLimits
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.converters.serve_llm_fields import ENGINE_KWARGS, LLM_CONFIG, SERVING_ARGS
from app.plugins import ALLOWED_VARIABLE
from app.telemetry.tracing import ENDPOINTS
from tests.docs.pages import DOCS, codes, rows, section
from tools.cli_docs import subparsers

PAGE = (DOCS / "coming_from.md").read_text()
VARIABLES = {KEYS_VARIABLE, ALLOWED_VARIABLE, *ENDPOINTS}
OTHER_WORDS = {
    "torch",
    "triton",
    "compressed-tensors",
    "ray_workers",
    "auto",
    "safetensors",
    "pt",
    "sharded_state",
    "gguf",
    "dummy",
}


def flags_of_serve() -> set[str]:
    return set(subparsers()["serve"]._option_string_actions)


def routes() -> set[str]:
    app = create_app(_NoEngine(), RequestLimits(), keys=ApiKeys())  # type: ignore[arg-type]
    return set(app.openapi()["paths"])


class _NoEngine:
    models: ClassVar[dict[str, Any]] = {}


def same_names(heading: str) -> list[str]:
    """The code of a section before its first table."""
    return codes(section(PAGE, heading).partition("\n| ")[0])


def test_flags() -> None:
    same = [name for name in same_names("Flags of `vllm serve`") if name.startswith("--")]
    ours = [
        word
        for _, manta, about in rows(section(PAGE, "Flags of `vllm serve`"))
        for code in codes(manta + about)
        for word in code.split()[:1]
        if word not in VARIABLES | OTHER_WORDS
    ]
    assert len(same) > 10
    assert len(ours) > 20
    assert set(same + ours) <= flags_of_serve()


def test_values_of_flags() -> None:
    """`--flag value` of the tables is what the option takes."""
    tables = (ATTENTION_BACKENDS, EXECUTORS, LOAD_FORMATS, QUANT_METHODS)
    assert OTHER_WORDS - {"auto"} <= {name for table in tables for name in table}
    assert "local_processes" in EXECUTORS
    assert set(LOAD_FORMATS) <= OTHER_WORDS


def test_routes() -> None:
    text = section(PAGE, "Routes")
    same = [name for name in same_names("Routes") if name.startswith("/")]
    ours = [code for _, manta in rows(text) for code in codes(manta) if code.startswith("/")]
    theirs = [code for vllm, manta in rows(text) if "not there yet" in manta for code in codes(vllm)]
    assert len(same) > 20
    assert theirs
    known = routes() | QUIET_PATHS  # /ready is there where there are replicas
    assert set(same + ours) <= known
    assert not set(theirs) & known


def test_fields_of_a_request() -> None:
    text = section(PAGE, "Fields of a request")
    taken, _, refused = text.partition("It refuses by name:")
    refused = refused.partition("\n\n`chat_template`")[0]
    takes = [code for code in codes(taken) if not code.startswith("/")]
    assert len(takes) > 30
    assert set(takes) <= set(ChatRequest.model_fields)
    assert len(codes(refused)) > 8
    assert set(codes(refused)) <= set(ChatRequest.refused)


def test_every_field_of_ray_serve_llm_is_there_and_no_other() -> None:
    theirs = [code for vllm, _ in rows(section(PAGE, "Ray Serve LLM")) for code in codes(vllm)]
    assert sorted(theirs) == sorted([*LLM_CONFIG, *SERVING_ARGS, *ENGINE_KWARGS])


def test_options_of_a_configuration() -> None:
    names = [code for _, ours in rows(section(PAGE, "Ray Serve LLM")) for code in codes(ours)]
    assert len(names) > 20
    assert [name for name in names if not is_option(name)] == []


def is_option(name: str) -> bool:
    """Whether a dotted name is an option of a model, or of a section of the application."""
    of_model = name.partition(".")[0] in ModelConfig.model_fields or name in {"engine", "runtime_env"}
    model: Any = ModelConfig if of_model else ServeConfig
    for part in name.split("."):
        if name == "runtime_env":
            return True  # Serve's own
        if not (isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields):
            return False
        model = model.model_fields[part].annotation
    return True


def test_what_is_no_option() -> None:
    assert not is_option("engine.max_len")
    assert not is_option("ingress.limits.most")
    assert is_option("ingress.limits.max_logprobs")
