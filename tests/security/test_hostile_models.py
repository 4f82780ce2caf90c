"""Model directories that would run code: the real loaders take tensors and texts of them, or refuse them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from app.api.server.app import create_app
from app.checkpoints.model_info import ModelInfo
from app.config.limits import RequestLimits
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.loading.loader import load_model
from app.text.chat_template import ChatTemplate
from tests import limits
from tests.api.conftest import ScriptedClient, served, write_model
from tests.api.json_routes import TEXT_BODIES, bodies
from tests.loading.load_formats.formats import as_pt, contexts
from tests.security.bomb import Bomb
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
CODE = "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\nclass Evil: pass\n"


def load(directory: Path) -> None:
    context: BuildContext = contexts(directory)[0]
    load_model(ModelInfo.from_directory(str(directory)), context, "auto", 0)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("place", ["a tensor", "beside them"])
def test_an_object_in_a_pickled_checkpoint_is_not_made(tmp_path: Path, is_zip: bool, place: str) -> None:
    directory, trace = as_pt(tiny_model("llama"), tmp_path / "model"), tmp_path / "executed"
    load(directory)
    tensors = torch.load(directory / "pytorch_model.bin", weights_only=True)
    tensors[next(iter(tensors)) if place == "a tensor" else "extra"] = Bomb(trace)
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        load(directory)
    assert not trace.exists()


def hostile_directory(path: Path, weights: Path) -> Path:
    """A model that asks for its own code in each place where transformers would follow it."""
    shutil.copytree(weights, path)
    write_model(path.with_name("texts"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(path.with_name("texts") / name, path / name)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        file = path / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
        file.write_text(json.dumps({**fields, "auto_map": auto, "trust_remote_code": True}))
    for name in ("evil.py", "modeling_llama.py", "tokenizer.py", "__init__.py", "custom_generate.py"):
        (path / name).write_text(CODE)
    return path


def read_all(directory: Path) -> None:
    """What ingress and engine read of a model."""
    load(directory)
    assert served(directory).tokenizer.encode_plain(["hi"])


def test_code_of_a_model_directory_is_not_run(tmp_path: Path) -> None:
    directory = hostile_directory(tmp_path / "model", tiny_model("llama"))
    read_all(directory)
    assert not list(directory.rglob("executed"))
    assert not [name for name in sys.modules if name == "evil" or "transformers_modules" in name]


@pytest.mark.slow  # all is compiled anew
def test_nor_where_python_drops_assertions(tmp_path: Path) -> None:
    """A guard that is an `assert` is none under -O."""
    directory = hostile_directory(tmp_path / "model", tiny_model("llama"))
    program = "import sys; from pathlib import Path; from tests.security.test_hostile_models import read_all; "
    program += "read_all(Path(sys.argv[1])); print(__debug__)"
    command = [sys.executable, "-O", "-c", program, str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limits.patience_s(), check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr[-2000:]
    assert not list(directory.rglob("executed"))


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch TRACE').read() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ (messages | attr('append')).__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('touch TRACE').read() }}",
    "{% set x = messages.append(1) %}{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
)


def conversations() -> Iterator[tuple[str, dict[str, Any]]]:
    """A body with messages for every route that takes them, rendered or not."""
    for path in TEXT_BODIES:
        for body in bodies(path, "hi"):
            yield path, body | ({"model": "m"} if "model" in body else {})


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_model_s_template_does_not_leave_its_sandbox_on_any_route(tmp_path: Path, escape: str) -> None:
    trace = tmp_path / "executed"
    model = served(write_model(tmp_path / "model"))
    model.chat_template = ChatTemplate({"default": escape.replace("TRACE", str(trace))}, {})
    client = ScriptedClient(model)
    app = create_app(client, RequestLimits())

    async def send() -> dict[str, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return {path: await http.post(path, json=body) for path, body in conversations()}

    answers = limits.run(send())
    refused = {path for path, answer in answers.items() if answer.status_code == 400}
    assert {path for path, answer in answers.items() if answer.status_code >= 500} == set()
    rendering = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    assert set(rendering) <= refused, "what renders it says so"
    assert not trace.exists()
    shown = "".join(answer.text for answer in answers.values())
    assert "<class" not in shown
    assert "<function" not in shown
