"""Fields that other servers hand to code which trusts them: here no route of any dialect lets them reach an engine."""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.json_routes import TEXT_BODIES, bodies
from tests.limits import run
from tests.security.bomb import Bomb


def tensor() -> str:
    """A sparse tensor whose indices lie outside of it, as torch.save writes it."""
    outside = torch.sparse_coo_tensor(torch.tensor([[0], [0]]), torch.tensor([1.0]), (2, 2), check_invariants=True)
    outside._indices()[0, 0] = 1 << 40
    file = io.BytesIO()
    torch.save(outside, file)
    return base64.b64encode(file.getvalue()).decode()


# Each is read by some other server.
FIELDS: dict[str, Any] = {
    "prompt_embeds": tensor(),
    "input_embeds": [[0.1, 0.2]],
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1 << 40},
    "shm_handle": {"name": "psm_1", "size": 1 << 40},
    "ec_transfer_params": {"x": {}},
    "bootstrap_host": "127.0.0.1",
    "bootstrap_room": 1 << 62,
    "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1 << 30}]}},
    "mm_hashes": ["a"],
    "multi_modal_uuids": {"image": ["a"]},
    "multi_modal_data": {"image": "x"},
    "mm_processor_kwargs": {"num_crops": 1 << 30},
    "media_io_kwargs": {"video": {"num_frames": -1}},
    "image_data": "http://127.0.0.1/x",
    "lora_path": "../../etc",
    "lora_request": {"lora_path": "../../etc"},
    "custom_logit_processor": "eval",
    "logits_processors": ["os.system"],
    "session_params": {"id": "x" * 1000, "offset": -1},
    "rid": "",
    "vllm_xargs": {"a": "b"},
    "chat_template": "{{ messages }}",
    "guided_regex": "(a+)+b",
    "guided_decoding_backend": "outlines",
    "sampling_params": {"n": 1 << 30},
    "worker_extension_cls": "os.system",
}
GENERATING = [path for path in TEXT_BODIES if path.split("/")[-1] not in ("score", "rerank", "classify", "pooling")]


def post_all(app: Any, path: str, sent: list[dict[str, Any]], **headers: str) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return [await http.post(path, json=body, headers=headers) for body in sent]

    return run(send())


@pytest.mark.parametrize("path", [*GENERATING, "/inference/v1/generate"])
def test_what_other_servers_trust_is_refused_or_changes_nothing(client: Any, path: str) -> None:
    """Agents' routes ignore fields that nobody knows: the engine gets what it gets without them."""
    own = {"token_ids": [5, 6], "sampling_params": {"seed": 1}} if "inference" in path else bodies(path, "hi")[0]
    app = create_app(client, RequestLimits())
    (plain,) = post_all(app, path, [own])
    usual = [(request.prompt_token_ids, request.work.model_copy(update={"seed": 1})) for request in client.requests]
    for name, value in FIELDS.items():
        if name in own:
            continue
        client.requests.clear()
        (answer,) = post_all(app, path, [{**own, name: value}])
        if answer.status_code == 400:
            assert name in answer.text
            assert client.requests == []
            continue
        assert (answer.status_code, path.startswith(("/v1/responses", "/v1/messages"))) == (plain.status_code, True)
        found = [(request.prompt_token_ids, request.work.model_copy(update={"seed": 1})) for request in client.requests]
        assert found == usual, name


@pytest.mark.parametrize("path", GENERATING)
def test_a_pickle_is_no_body(client: Any, path: str, tmp_path: Path) -> None:
    app, trace = create_app(client, RequestLimits()), tmp_path / "executed"
    raw = pickle.dumps({"prompt": Bomb(trace)})

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            kinds = ("application/json", "application/octet-stream", "application/x-pickle", "application/vnd.ray+json")
            return [await http.post(path, content=raw, headers={"content-type": kind}) for kind in kinds]

    assert {answer.status_code for answer in run(send())} == {400}
    assert not trace.exists()


def test_a_client_s_id_names_no_request_of_an_engine(client: Any) -> None:
    """Not even its own: what ends a request is the connection that it came by, or an id that the server drew."""
    app = create_app(client, RequestLimits())
    body = {"prompt": "hi", "max_tokens": 2, "request_id": "c"}
    post_all(app, "/v1/completions", [body, body], **{"x-request-id": "cm"})
    ids = [request.request_id for request in client.requests]
    assert len(set(ids)) == 2
    assert not [name for name in ids if name in ("c", "cm") or name.startswith(("c-", "cm-"))]
    for path in ("/abort_request", "/v1/abort", "/abort", "/flush_cache", "/update_weights_from_disk", "/dump"):
        (answer,) = post_all(app, path, [{"rid": "c", "abort_all": True}])
        assert answer.status_code == 404


def test_a_background_response_is_ended_by_its_whole_id_only(http: httpx.Client, client: Any) -> None:
    client.gate = asyncio.Event()  # which nobody opens
    made = http.post("/v1/responses", json={"input": "hi", "background": True, "max_output_tokens": 200}).json()
    for name in (made["id"][:-1], made["id"][:6], "resp_", made["id"] + "0", made["id"].upper(), "*"):
        assert http.post(f"/v1/responses/{name}/cancel").status_code == 404
    assert http.get(f"/v1/responses/{made['id']}").json()["status"] in ("queued", "in_progress")
    assert http.post(f"/v1/responses/{made['id']}/cancel").json()["status"] == "cancelled"


def test_many_cache_salts_change_nothing_but_the_root(client: Any) -> None:
    """Any text, of any script, is a salt; what is none is refused, and nothing fails behind that."""
    app = create_app(client, RequestLimits())
    good: list[Any] = ["a", "\x00", "../..", "東京", "a" * 4096, "5:alice", "%s%n", "\ud7ff"]
    bad: list[Any] = [1, True, [], {}, ["a"], "a" * 4097]
    answers = post_all(app, "/v1/completions", [{"prompt": "hi", "cache_salt": salt} for salt in [*good, *bad]])
    assert [answer.status_code for answer in answers] == [200] * len(good) + [400] * len(bad)
    assert len({bytes(request.placement.cache_root) for request in client.requests}) == len(good)
