"""`manta config`: every value with its origin; what it prints loads back."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from app.cli.configuration import resolve
from app.config.serve import ServeConfig
from app.deployments.autoscaling import POLICY_FUNCTION
from benchmarks.serve_process import ROOT
from tests.cli.conftest import Manta

QUICKSTART = ROOT / "configs/serve/quickstart.yaml"


def origins(text: str) -> dict[str, str]:
    """Key -> origin, of the lines of a printed configuration (the last one of a key that comes twice)."""
    return {m[1]: m[2] for m in re.finditer(r"^[ -]*([\w]+): .*?  # (.*)$", text, re.MULTILINE)}


def test_model(manta: Manta) -> None:
    done = manta("config", "--max-model-len", 100, "--port", 9000)
    found = origins(done.out)
    assert done.code == 0
    assert found["max_model_len"] == "option --max-model-len"
    assert re.search(r"^  port: 9000 .*# option --port$", done.out, re.MULTILINE)  # the admin's stands further down
    assert found["model"] == "MODEL"
    assert found["block_size"] == "default"
    document = yaml.safe_load(done.out)
    assert document["applications"][0]["args"]["models"][0]["engine"]["max_model_len"] == 100


def test_file_and_options(manta: Manta) -> None:
    done = manta("config", QUICKSTART, "--block-size", 32, "--ingress-limits-max-n", 3)
    found = origins(done.out)
    assert found["kv_cache_memory_bytes"] == "file"
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "file"
    assert found["block_size"] == "option --block-size"
    assert found["max_n"] == "option --ingress-limits-max-n"
    assert found["max_num_seqs"] == "default"
    assert (
        yaml.safe_load(done.out)
        == resolve(
            str(QUICKSTART),
            {("models", "0", "engine", "block_size"): 32, ("ingress", "limits", "max_n"): 3},
            None,
            None,
        ).effective()
    )


def test_drafts_that_nobody_asked_for_stay_possible() -> None:
    """A null would turn a model's own drafter off, read back."""
    for given, wanted in (
        ({}, set()),
        ({("models", "0", "engine", "speculative_config"): None}, {"speculative_config"}),
    ):
        args = resolve("tiny-chat", given, None, None).effective()["applications"][0]["args"]
        (model,) = ServeConfig(**args).models
        assert model.engine.model_fields_set & {"speculative_config"} == wanted


def test_replicas_by_the_load_bring_the_policy_of_the_application() -> None:
    plain = resolve("tiny-chat", {}, None, None).document["applications"][0]
    assert "autoscaling_policy" not in plain
    scaled = resolve("tiny-chat", {("models", "0", "autoscaling"): {"max_replicas": 2}}, None, None)
    assert scaled.document["applications"][0]["autoscaling_policy"] == {"policy_function": POLICY_FUNCTION}
    shipped = resolve(str(ROOT / "configs/serve/autoscaling.yaml"), {}, None, None)
    assert not shipped.changed, "it names the policy already"


def test_every_line_with_a_value_has_an_origin(manta: Manta) -> None:
    for line in manta("config", QUICKSTART).out.splitlines():
        assert line.endswith(":") or re.search(r"  # (default|file)$", line), line


def test_lists_and_odd_values_load_back(manta: Manta, tmp_path: Path) -> None:
    document = yaml.safe_load(QUICKSTART.read_text())
    document["applications"][0]["args"]["models"] = [
        {"name": "a: #b", "aliases": ["x, y", "ü", "null", "1"]},
        {"name": "c"},
    ]
    document["applications"].append(
        {"name": "other", "route_prefix": "/o", "import_path": "a:b", "args": {"k": [1, {}]}}
    )
    file = tmp_path / "odd.yaml"
    file.write_text(yaml.safe_dump(document, allow_unicode=True))
    printed = yaml.safe_load(manta("config", file).out)
    models = printed["applications"][0]["args"]["models"]
    assert [model["name"] for model in models] == ["a: #b", "c"]
    assert models[0]["aliases"] == ["x, y", "ü", "null", "1"]
    assert printed["applications"][1] == document["applications"][1]


def test_mistakes(manta: Manta) -> None:
    assert "no such file" in manta("config", "nowhere.yaml").mistake
    assert manta("config", "--block-size", "x").mistake.startswith("--block-size: ")
