"""Typical mistakes: each ends in one line that says what to do, exit code 2, before Ray starts."""

from __future__ import annotations

import difflib
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from app import LLM
from app.cli import serve
from app.cli.cluster import Cluster, RunningServe
from app.cli.machine import Machine
from app.cli.serve_ports import SERVE_PORTS
from app.errors import UnsupportedError
from app.models import MODELS
from benchmarks.serve_process import ROOT, free_port
from tests.cli.conftest import Manta

GIB = 1 << 30
LAPTOP = Machine("this machine", 8, 0, 16 * GIB, None)
TINY_CHAT = ROOT / "app/assets/tiny-chat"


@pytest.fixture(autouse=True)
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known machine; and nothing may be served by a mistake."""
    monkeypatch.setattr(serve, "find_machine", lambda: LAPTOP)

    def never(*_: object) -> None:
        raise AssertionError("served in spite of the mistake")

    monkeypatch.setattr(serve.os, "execve", never)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in model that a test may break."""
    return Path(shutil.copytree(TINY_CHAT, tmp_path / "model"))


def change_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def yaml_file(folder: Path, **args: object) -> Path:
    """The quickstart with other `args`."""
    document = yaml.safe_load((ROOT / "configs/serve/quickstart.yaml").read_text())
    document["http_options"]["port"] = free_port()
    if args:
        document["applications"][0]["args"] = args
    (folder / "serve.yaml").write_text(yaml.safe_dump(document))
    return folder / "serve.yaml"


def test_no_such_model(manta: Manta) -> None:
    assert "no such path" in manta("serve", "/nowhere/model").mistake
    assert "HF_HUB_OFFLINE forbids" in manta("serve", "some/model").mistake


def test_no_such_yaml(manta: Manta) -> None:
    assert (
        manta("serve", "nowhere.yaml").mistake == "nowhere.yaml: no such file; give a Serve YAML or a model directory"
    )


def test_not_a_model_directory(manta: Manta, tmp_path: Path) -> None:
    assert "not a model directory: it holds no config.json" in manta("serve", tmp_path).mistake
    (tmp_path / "0_CLIPModel").mkdir()
    (tmp_path / "0_CLIPModel/config.json").write_text("{}")
    assert f"its model is {str(tmp_path / '0_CLIPModel')!r}" in manta("serve", tmp_path).mistake


def test_weights_are_missing(manta: Manta, model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "holds no weights: none of model.safetensors" in manta("serve", model).mistake


def test_weights_are_no_safetensors(manta: Manta, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "model.safetensors: it is no safetensors file" in manta("serve", model).mistake


def test_unknown_architecture(manta: Manta, model: Path) -> None:
    change_config(model, architectures=["RwkvForCausalLM"])
    mistake = manta("serve", model).mistake
    assert "unknown architecture 'RwkvForCausalLM' (through transformers: it keeps a recurrent state" in mistake
    assert "PhiForCausalLM" in mistake


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers saves one: its sizes have names of their own."""
    folder = tmp_path_factory.mktemp("gpt")
    OpenAIGPTLMHeadModel(OpenAIGPTConfig(n_layer=1, n_embd=8, n_head=2, vocab_size=64)).save_pretrained(folder)
    return folder


def test_a_model_of_another_family(manta: Manta, gpt: Path) -> None:
    nearest = difflib.get_close_matches("OpenAIGPTLMHeadModel", MODELS, 3, cutoff=0.0)
    known = f"the nearest of {len(list(MODELS))} names: {', '.join(nearest)} (`manta models` lists all)"
    why = "through transformers: its attention there does not take an implementation from outside"
    for command in (("serve", gpt), ("generate", "hi", "--model", gpt)):
        assert manta(*command).mistake == f"{gpt}: unknown architecture 'OpenAIGPTLMHeadModel' ({why}); {known}"
    with pytest.raises(UnsupportedError, match=r"an implementation from outside\); the nearest of "):
        LLM(str(gpt))
    native = manta("serve", gpt, "--model-impl", "native").mistake
    assert native == f"{gpt}: unknown architecture 'OpenAIGPTLMHeadModel'; {known}"
    through = manta("serve", gpt, "--model-impl", "transformers").mistake
    assert through.startswith(f"{gpt}: model_impl=transformers cannot run OpenAIGPTLMHeadModel: its attention there")
    pooling = manta("serve", gpt, "--runner", "pooling").mistake
    known = "known: those of Albert, Bert, BgeM3Embedding, Bilingual, BioGpt, Bloom,"
    assert f"'OpenAIGPTLMHeadModel' of a model for embeddings and scores; {known}" in pooling


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_model(manta: Manta, model: Path, name: str) -> None:
    assert manta("serve", model / name).mistake == (
        f"{model / name} is a file of a model: give the directory that holds it, {model}"
    )
    assert "give the directory that holds config.json" in manta("generate", "hi", "--model", model / name).mistake


def test_what_only_a_replica_would_find(manta: Manta) -> None:
    assert manta("serve", "--ingress-api-keys-file", "nokeys.txt").mistake == (
        "api_keys_file: cannot read nokeys.txt: No such file or directory"
    )
    assert manta("serve", "--tensor-parallel-size", 3, "--cpus-per-worker", 0.1).mistake == (
        "tensor_parallel_size=3 does not divide num_attention_heads=8"
    )
    assert manta("serve", "--tool-parser", "foo").mistake.startswith(
        "--tool-parser: unknown tool parser 'foo'; known: auto, none, hermes"
    )


def test_keys_that_were_not_filled_in(manta: Manta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANTA_API_KEYS", "")
    assert manta("serve").mistake == "MANTA_API_KEYS is set but holds no key: give one, or unset it"
    monkeypatch.delenv("MANTA_API_KEYS")
    document = yaml.safe_load(yaml_file(tmp_path).read_text())
    document["applications"][0]["runtime_env"]["env_vars"]["MANTA_API_KEYS_FILE"] = "/nowhere"
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(document))
    assert "MANTA_API_KEYS_FILE: cannot read /nowhere" in manta("serve", tmp_path / "serve.yaml").mistake


@pytest.mark.parametrize("text", ["[]", "{", '{"architectures": ["LlamaForCausalLM"]}', '{"architectures": []}', "5"])
def test_unusable_config_json(manta: Manta, model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "config.json" in manta("serve", model).mistake


def test_a_size_of_the_wrong_kind(manta: Manta, model: Path) -> None:
    change_config(model, num_hidden_layers=0)
    assert "config.json is not usable" in manta("serve", model).mistake
    change_config(model, num_hidden_layers="many")
    assert "config.json is not usable" in manta("serve", model).mistake


def test_too_little_memory_for_the_model(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_machine", lambda: Machine("this machine", 8, 0, 100 << 20, None))
    mistake = manta("serve", "--kv-cache-memory-bytes", GIB, "--num-replicas", 2).mistake
    assert mistake.startswith("too little memory: weights and KV caches take ")
    assert "lower kv_cache_memory_bytes" in mistake


def test_too_little_memory_for_one_request(manta: Manta) -> None:
    mistake = manta("serve", "--kv-cache-memory-bytes", 1 << 20).mistake
    assert "less than one request of max_model_len=" in mistake
    needed = mistake.partition("raise it to ")[2].split()[0]
    assert manta("serve", "--kv-cache-memory-bytes", needed, "--port", free_port(), "--dry-run").code == 0
    assert manta("serve", "--kv-cache-memory-bytes", int(needed) - 1).code == 2
    pooled = ("--runner", "pooling", "--no-enable-prefix-caching", "--max-model-len", 512)  # which caches nothing
    assert manta("serve", "--kv-cache-memory-bytes", 1 << 16, *pooled, "--port", free_port(), "--dry-run").code == 0


def test_too_little_gpu_memory(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_machine", lambda: Machine("this machine", 8, 1, 16 * GIB, 1 << 20))
    mistake = manta("serve").mistake
    assert "of each GPU" in mistake
    assert "raise gpu_memory_utilization" in mistake


def test_port_taken(manta: Manta) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert manta("serve", "--port", port).mistake == (
            f"port {port} on 127.0.0.1 is taken: stop what listens there, or choose another with --port"
        )
    assert manta("serve", "--port", port, "--dry-run").code == 0


def test_quantization_of_plain_weights(manta: Manta) -> None:
    """`awq` reads what was quantized before; `w4` quantizes while it loads."""
    for command in (("serve", "--port", free_port(), "--dry-run"), ("generate", "hi", "--model", "tiny-chat")):
        mistake = manta(*command, "--quantization", "awq").mistake
        assert mistake.startswith("--quantization awq with model 'tiny-chat': this method reads quantized checkpoints")
    assert manta("serve", "--port", free_port(), "--dry-run", "--quantization", "w4").code == 0


def test_a_directory_is_no_gguf_file(manta: Manta, model: Path) -> None:
    for command in (("serve", model), ("generate", "hi", "--model", model)):
        assert manta(*command, "--load-format", "gguf").mistake == (
            f"load_format=gguf: {model} is a model directory: give the .gguf file itself as the model, or leave "
            "load_format out"
        )


@pytest.mark.parametrize("name", SERVE_PORTS)
def test_another_serve_runs_here(manta: Manta, taken_port: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, str(taken_port))
    mistake = manta("serve", "--port", free_port()).mistake
    assert mistake.startswith(f"port {taken_port} ({name}) is taken, likely by another Serve")


def test_a_dry_run_needs_nothing_of_the_machine(manta: Manta, taken_port: int) -> None:
    lacking = ("--port", taken_port, "--num-replicas", 9, "--device", "cuda")
    done = manta("serve", *lacking, "--dry-run")
    assert done.code == 0
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 4, "the GPU, CPUs and GPUs in all, and the port"
    assert f"port {taken_port} on 127.0.0.1 is taken" in notes[-1]
    assert "no mistake found; nothing is started" in done.out
    assert "is no port" in manta("serve", "--port", 70000, "--dry-run").mistake, "that is wrong on every machine"
    few = ("--kv-cache-memory-bytes", 1 << 20)
    assert "less than one request of max_model_len=" in manta("serve", *few, "--dry-run").mistake


def test_port_out_of_range_and_unknown_host(manta: Manta) -> None:
    assert "is no port" in manta("serve", "--port", 70000).mistake
    assert "--host" in manta("serve", "--host", "203.0.113.7", "--port", free_port()).mistake


def test_too_few_cpus(manta: Manta) -> None:
    mistake = manta("serve", "--num-replicas", 9).mistake
    assert mistake == "the application needs 9.9 CPUs, this machine has 8: lower num_replicas or cpus_per_worker"


def test_too_few_cpus_for_the_workers(manta: Manta) -> None:
    assert manta("serve", "--tensor-parallel-size", 8, "--pipeline-parallel-size", 2).mistake == (
        "the application needs 16.1 CPUs, this machine has 8: lower tensor_parallel_size, pipeline_parallel_size or "
        "cpus_per_worker"
    )


def cluster(monkeypatch: pytest.MonkeyPatch, running: RunningServe | None = None) -> None:
    found = Machine("the Ray cluster at x", 64, 1, None, None, Cluster("x", 64, 1, running))
    monkeypatch.setattr(serve, "find_machine", lambda: found)


def test_too_few_gpus_in_a_cluster(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch)
    mistake = manta("serve", "--num-replicas", 3).mistake
    assert "needs 3 GPUs, the Ray cluster at x has 1" in mistake
    assert "--skip-preflight if the cluster grows on demand" in mistake


def test_a_second_server_on_a_cluster(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, RunningServe(8300, ("manta",)))
    assert manta("serve", "--port", 8301).mistake == (
        "port 8301: Serve on the Ray cluster at x listens on 8300 for all its applications ('manta'); give --port 8300 "
        "to update them, or set RAY_ADDRESS=local to serve from a cluster of its own"
    )
    assert manta("serve", "--port", 8300, "--dry-run").code == 0


def test_unknown_option(manta: Manta) -> None:
    assert manta("serve", "--max-model-lenn", 5).mistake == (
        "--max-model-lenn: no such option; did you mean --max-model-len?"
    )
    assert "manta serve --help" in manta("serve", "--qqqqqq").mistake
    assert "invalid choice: 'sreve'" in manta("sreve").mistake
    assert "unexpected argument 'b'" in manta("serve", "a", "b").mistake


def test_unknown_option_in_yaml(manta: Manta, tmp_path: Path) -> None:
    file = yaml_file(tmp_path, models=[{"name": "a", "engine": {"max_modle_len": 5}}])
    assert manta("serve", file).mistake == (
        f"{file}: args.models.0.engine.max_modle_len: no such option; did you mean max_model_len?"
    )


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("controller_options", [1]),
        ("controller_options", {"runtime_env": "x"}),
        ("controller_options", {"runtime_env": {"env_vars": [1]}}),
        ("runtime_env", 5),
        ("runtime_env", {"env_vars": 5}),
    ],
)
def test_an_environment_of_a_wrong_type(manta: Manta, tmp_path: Path, place: str, wrong: Any) -> None:
    file = yaml_file(tmp_path)
    document = yaml.safe_load(file.read_text())
    section = document if place == "controller_options" else document["applications"][0]
    section[place] = wrong
    file.write_text(yaml.safe_dump(document))
    name = place if section is document else f"applications.0.{place}"
    while isinstance(wrong, dict):
        ((key, wrong),) = wrong.items()
        name += f".{key}"
    for more in ((), ("--dry-run",)):
        assert manta("serve", file, *more).mistake == f"{file}: {name}: expected keys and values, not {wrong!r}"


def test_unknown_key_of_serve(manta: Manta, tmp_path: Path) -> None:
    file = yaml_file(tmp_path)
    file.write_text(file.read_text() + "proxy_locatoin: HeadOnly\n")
    mistake = manta("serve", file, "--dry-run").mistake
    assert mistake == f"{file}: proxy_locatoin: no such option of Serve; did you mean proxy_location?"
    document = yaml.safe_load(file.read_text())
    del document["proxy_locatoin"]
    document["applications"][0]["rout_prefix"] = "/"
    file.write_text(yaml.safe_dump(document))
    assert (
        "applications.0.rout_prefix: no such option of Serve; did you mean route_prefix?"
        in manta("serve", file, "--dry-run").mistake
    )


def test_wrong_type_in_serves_part(manta: Manta, tmp_path: Path) -> None:
    file = yaml_file(tmp_path)
    file.write_text(file.read_text().replace("proxy_location: HeadOnly", "proxy_location: Moon"))
    assert "proxy_location: " in manta("serve", file, "--dry-run").mistake


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("applications: [\n  a: b: c\n", ":2:"),
        ("applications:\n\t- name: x\n", "bad YAML"),
        ("just a text", "`applications` must be a list"),
        ("", "`applications` must be a list"),
        (
            "applications: [{name: other, import_path: 'a:b'}]",
            "no application has import_path app.deployments.app:build",
        ),
        ("applications: [{import_path: 'app.deployments.app:build', args: 5}]", "args: expected options, not 5"),
        ("applications: [{import_path: 'app.deployments.app:build'}]", "args.models: this option is required"),
        ("applications: [{import_path: 'app.deployments.app:build', args: {models: 7}}]", "args.models: "),
        ("applications: [5]", "`applications` must be a list"),
        ("{applications: [], http_options: 5}", "http_options: expected host and port"),
    ],
)
def test_bad_yaml(manta: Manta, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    mistake = manta("serve", file).mistake
    assert mistake.startswith(str(file))
    assert says in mistake


def test_wrong_type(manta: Manta, tmp_path: Path) -> None:
    assert manta("serve", "--max-num-seqs", "many").mistake.startswith(
        "--max-num-seqs: Input should be a valid integer"
    )
    assert manta("serve", "--dtype", "int4").mistake.startswith("--dtype: Input should be 'auto', 'float32'")
    assert "--port" in manta("serve", "--port", "web").mistake
    file = yaml_file(tmp_path, models=[{"name": "a", "num_replicas": "two"}])
    assert f"{file}: args.models.0.num_replicas: Input should be a valid integer" in manta("serve", file).mistake


def test_context_longer_than_the_models(manta: Manta, model: Path) -> None:
    change_config(model, max_position_embeddings=512)
    mistake = manta("serve", model, "--max-model-len", 513).mistake
    assert (
        mistake == "max_model_len=513 is more than the model's context of 512 tokens: set max_model_len to 512 or less"
    )
    assert manta("serve", model, "--max-model-len", 512, "--port", free_port(), "--dry-run").code == 0


def test_missing_tokenizer(manta: Manta, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "; set --tokenizer to a directory that does" in manta("serve", model).mistake
    done = manta("serve", model, "--tokenizer", TINY_CHAT, "--port", free_port(), "--dry-run")
    assert done.code == 0


def test_missing_chat_template(manta: Manta) -> None:
    assert "no such file nowhere.jinja" in manta("serve", "--chat-template", "nowhere.jinja").mistake


def test_missing_gpu(manta: Manta) -> None:
    mistake = manta("serve", "--device", "cuda").mistake
    assert mistake == "device=cuda, but this machine has no GPU: set --device cpu, or use one that has"


def test_several_mistakes_are_a_line_each(manta: Manta) -> None:
    done = manta("serve", "--dtype", "int4", "--max-num-seqs", 0)
    assert done.code == 2
    assert [line.split(": ")[2] for line in done.err.splitlines()] == ["--dtype", "--max-num-seqs"]


def test_offline_commands_check_too(manta: Manta) -> None:
    assert "no such path" in manta("generate", "hi", "--model", "/nowhere").mistake
    assert manta("generate", "hi", "--temperature", "warm").mistake.startswith("--temperature: Input should be a valid")


def test_a_command_of_earlier_versions_says_what_it_became(manta: Manta) -> None:
    assert manta("run", "prompts", "-o", "out").mistake.startswith("manta run is now manta run-batch IN OUT.jsonl")


@pytest.mark.parametrize(
    "args",
    [
        {"models": [{"name": "a", "engine": 5}]},
        {"models": [{"name": "a", "engine": None}]},
        {"models": [None]},
        {},
        None,
    ],
)
def test_options_on_top_of_a_wrong_yaml(manta: Manta, tmp_path: Path, args: object) -> None:
    file = yaml_file(tmp_path)
    document = yaml.safe_load(file.read_text())
    document["applications"][0]["args"] = args
    file.write_text(yaml.safe_dump(document))
    assert str(file) in manta("serve", file, "--dtype", "float32", "--port", free_port()).mistake


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_skip_preflight_skips(manta: Manta, taken_port: int) -> None:
    assert manta("serve", "--port", taken_port, "--skip-preflight", "--dry-run").code == 0


def test_no_cluster_at_the_address(manta: Manta, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.cli.machine import find_machine

    monkeypatch.setattr(serve, "find_machine", find_machine)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    done = manta("serve")
    assert done.code == 1
    assert "no Ray cluster answers at" in done.err
    assert "Traceback" not in done.err


def test_a_model_with_windows_may_do_with_less(manta: Manta, model: Path) -> None:
    """Only the workers know how much less: they refuse what is too little even so."""
    change_config(model, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=16)
    little = ("serve", model, "--kv-cache-memory-bytes", 1 << 20, "--port", free_port(), "--dry-run")
    assert manta(*little).code == 0
    assert "less than one request of max_model_len=" in manta(*little, "--hybrid-kv-cache", "off").mistake
