"""`manta convert`: Ray Serve LLM's configurations, judged by Ray's own classes, become ours or are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.cli import main as manta
from app.converters.convert import convert
from app.converters.serve_llm_fields import ENGINE_KWARGS, LLM_CONFIG
from app.deployments.autoscaling import POLICY_FUNCTION
from app.deployments.serve.serve_args import parse_args
from app.errors import ConfigError

JUDGE = Path(__file__).with_name("ray_serve_llm.py")
QWEN: dict[str, Any] = {
    "model_loading_config": {"model_id": "qwen", "model_source": "/models/Qwen3-8B", "tokenizer_source": "/models/tok"},
    "llm_engine": "vLLM",
    "accelerator_type": "H100",
    "engine_kwargs": {
        **{"tensor_parallel_size": 2, "max_model_len": 8192, "gpu_memory_utilization": 0.85, "dtype": "half"},
        **{"enable_prefix_caching": True, "max_num_seqs": 64, "num_gpu_blocks_override": 1000, "quantization": "fp8"},
        **{"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enforce_eager": True, "kv_cache_dtype": "fp8"},
        **{
            "kv_offloading_size": 2,
            "cpu_offload_gb": 4.5,
            "disable_hybrid_kv_cache_manager": True,
            "served_model_name": ["qwen-8b"],
            "max_logprobs": 5,
            "enable_chunked_prefill": True,
        },
    },
    "placement_group_config": {"bundle_per_worker": {"CPU": 2, "GPU": 1}, "strategy": "PACK"},
    "deployment_config": {
        **{"num_replicas": 3, "graceful_shutdown_timeout_s": 120, "health_check_period_s": 5},
        "request_router_config": {"request_router_class": "ray.serve.experimental.round_robin_router.RoundRobinRouter"},
    },
    "experimental_configs": {"num_ingress_replicas": 2},
    "runtime_env": {"env_vars": {"NCCL_DEBUG": "WARN"}},
    "log_engine_metrics": True,
}
# What has no counterpart: (where in the configuration, value, what the remark says beside the field's name).
LOST: list[tuple[str, Any, str]] = [
    ("model_loading_config.model_source", {"bucket_uri": "s3://bucket/qwen"}, "copy s3://bucket/qwen"),
    ("lora_config", {"max_num_adapters_per_replica": 4}, "name each adapter"),
    ("engine_kwargs.trust_remote_code", True, "no counterpart"),
    ("engine_kwargs.enable_chunked_prefill", False, "no counterpart"),
    ("engine_kwargs.speculative_config", {"method": "ngram"}, "no counterpart"),
    ("engine_kwargs.quantization", "no_such", "there are"),
    ("engine_kwargs.tool_call_parser", "no_such", "there are"),
    ("engine_kwargs.load_format", "runai_streamer", "there are"),
    ("deployment_config.autoscaling_config", {"max_replicas": 4, "target_ongoing_requests": 8}, "seconds of work"),
    ("deployment_config.num_replicas", "auto", "set num_replicas"),
    ("deployment_config.max_ongoing_requests", 64, "max_waiting_requests"),
    ("deployment_config.user_config", {"a": 1}, "no counterpart"),
    ("deployment_config.request_router_config", {"request_router_class": "my.Router"}, "Router has no counterpart"),
    ("placement_group_config.bundles", [{"GPU": 1}, {"CPU": 1}], "bundles that differ"),
    ("placement_group_config.bundle_per_worker", {"GPU": 1, "TPU": 1}, "TPU"),
    ("accelerator_config", {"kind": "tpu"}, "NVIDIA GPUs only"),
    ("runtime_env.env_vars", {"VLLM_LOGGING_LEVEL": "DEBUG", "A": "b"}, "VLLM_LOGGING_LEVEL"),
    ("runtime_env.pip", ["numpy"], "no counterpart"),
    ("callback_config", {"callback_class": "my.Callback"}, "no counterpart"),
    ("experimental_configs.stream_batching_interval_ms", 0, "one message per engine step"),
]


def written(folder: Path, document: Any, name: str = "ray.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(document))
    return path


def serve_yaml(*configs: dict[str, Any], **args: Any) -> dict[str, Any]:
    application = {"name": "llm", "route_prefix": "/", "import_path": "ray.serve.llm:build_openai_app"}
    return {"applications": [{**application, "args": {"llm_configs": list(configs), **args}}]}


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    """What Ray's classes read out of the example."""
    found = subprocess.run(
        [sys.executable, JUDGE], input=json.dumps({"llm_configs": [QWEN]}), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    answer: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return answer


def test_the_example_is_one_that_ray_takes_and_the_table_knows_all_of_rays_fields(judged: dict[str, Any]) -> None:
    assert judged["models"] == ["qwen"]
    known = {path.split(".")[0] for path in LLM_CONFIG} | {"engine_kwargs"}
    assert set(judged["fields"]["LLMConfig"]) - known == {"callback_config", "server_cls"}  # these have no counterpart
    loading = {path.split(".")[1] for path in LLM_CONFIG if path.startswith("model_loading_config.")}
    assert loading == set(judged["fields"]["ModelLoadingConfig"])
    assert set(judged["fields"]["LLMServingArgs"]) == {"llm_configs", "ingress_deployment_config", "ingress_cls_config"}


def test_every_field_arrives(tmp_path: Path) -> None:
    document, remarks = convert(written(tmp_path, serve_yaml(QWEN)))
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    config = parse_args(application["args"])
    (model,) = config.models
    engine = model.engine
    assert (model.name, model.aliases, model.num_replicas) == ("qwen", ("qwen-8b",), 3)
    assert (engine.model, engine.tokenizer, engine.device) == ("/models/Qwen3-8B", "/models/tok", "cuda")
    assert (engine.tensor_parallel_size, engine.max_model_len, engine.gpu_memory_utilization) == (2, 8192, 0.85)
    assert (engine.dtype, engine.quantization, engine.kv_cache_dtype) == ("float16", "fp8", "fp8")
    assert (engine.max_num_seqs, engine.num_blocks, engine.cuda_graphs) == (64, 1000, "off")
    assert (engine.kv_host_memory_bytes, engine.cpu_offload_gb) == (2 << 30, 4.5)
    assert engine.hybrid_kv_cache == "off"
    assert (model.tool_parser, model.reasoning_parser) == ("hermes", "think")
    assert (model.cpus_per_worker, model.gpus_per_worker, model.placement_strategy) == (2, 1, "PACK")
    assert (model.graceful_shutdown_timeout_s, model.health_check_period_s) == (120, 5)
    assert (config.ingress.num_replicas, config.ingress.limits.max_logprobs) == (2, 5)
    assert config.router.policy == "round_robin"
    assert application["runtime_env"]["env_vars"]["NCCL_DEBUG"] == "WARN"
    assert [remark.split(":")[0] for remark in remarks] == ["llm_configs[0].accelerator_type"]


@pytest.mark.parametrize(("path", "value", "says"), LOST, ids=[f"{path}={value}" for path, value, _ in LOST])
def test_what_has_no_counterpart_is_named(path: str, value: Any, says: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_loading_config": {"model_id": "m", "model_source": "/models/m"}}
    node = config
    *above, last = path.split(".")
    for key in above:
        node = node.setdefault(key, {})
    node[last] = value
    _, remarks = convert(written(tmp_path, config))
    (remark,) = remarks
    assert remark.startswith(f"llm_configs[0].{path.removesuffix('_config') if 'kind' in str(value) else path}")
    assert says in remark


def test_autoscaling_becomes_ours(tmp_path: Path) -> None:
    scaled = {"autoscaling_config": {"min_replicas": 0, "initial_replicas": 1, "max_replicas": 4}}
    config = {"model_loading_config": {"model_id": "m", "model_source": "/models/m"}, "deployment_config": scaled}
    document, remarks = convert(written(tmp_path, config))
    (application,) = document["applications"]
    ServeDeploySchema.model_validate(document)
    (model,) = parse_args(application["args"]).models
    assert model.autoscaling is not None
    limits = model.autoscaling.min_replicas, model.autoscaling.initial_replicas, model.autoscaling.max_replicas
    assert (limits, remarks) == ((0, 1, 4), [])
    assert application["autoscaling_policy"]["policy_function"] == POLICY_FUNCTION


def test_a_hubs_model_stays_one(tmp_path: Path) -> None:
    config = {
        "model_loading_config": {"model_id": "q", "model_source": "Qwen/Qwen3-8B"},
        "engine_kwargs": {"revision": "v1", "download_dir": "/models", "load_format": "pt", "model_impl": "vllm"},
        "runtime_env": {"env_vars": {"HF_HOME": "/cache"}},
    }
    document, remarks = convert(written(tmp_path, config))
    (application,) = document["applications"]
    engine = parse_args(application["args"]).models[0].engine
    assert (engine.model, engine.revision, engine.download_dir) == ("Qwen/Qwen3-8B", "v1", "/models")
    assert engine.model_impl == "native"
    assert (engine.load_format, application["runtime_env"]["env_vars"]["HF_HOME"], remarks) == ("pt", "/cache", [])


def test_every_line_of_the_tables_is_tried() -> None:
    tried = {f"engine_kwargs.{name}" for name in QWEN["engine_kwargs"]} | {path for path, _, _ in LOST}
    plain = {"seed", "runner", "block_size", "max_num_batched_tokens", "scheduling_policy", "pipeline_parallel_size"}
    plain |= {"revision", "download_dir", "model_impl", "enable_expert_parallel"}
    plain |= {"enable_lora", "max_loras", "max_lora_rank"}
    plain |= {
        "tokenizer",
        "chat_template",
        "async_scheduling",
        "enable_auto_tool_choice",
        "distributed_executor_backend",
    }
    plain |= {"disable_log_stats", "disable_log_requests", "distributed_executor_backend"}
    assert {f"engine_kwargs.{name}" for name in ENGINE_KWARGS} <= tried | {f"engine_kwargs.{name}" for name in plain}


@pytest.mark.parametrize("form", ["serve", "llm_configs", "one", "beside"])
def test_each_form_of_the_file_is_read(form: str, tmp_path: Path) -> None:
    config = {"model_loading_config": {"model_id": "m", "model_source": "/models/m"}, "engine_kwargs": {"seed": 3}}
    forms = {
        "serve": serve_yaml(config),
        "llm_configs": {"llm_configs": [config]},
        "one": config,
        "beside": serve_yaml("model.yaml"),  # type: ignore[arg-type]
    }
    written(tmp_path, config, "model.yaml")
    document, remarks = convert(written(tmp_path, forms[form]))
    (model,) = parse_args(document["applications"][0]["args"]).models
    assert (model.name, model.engine.seed, remarks) == ("m", 3, [])


def test_several_models_and_another_application_stay_together(tmp_path: Path) -> None:
    small = {"model_loading_config": {"model_id": "small", "model_source": "/models/small"}}
    other = {"name": "other", "route_prefix": "/other", "import_path": "my:app"}
    document = serve_yaml(QWEN, small, ingress_deployment_config={"num_replicas": 4, "max_ongoing_requests": 9})
    document["applications"].append(other)
    document["http_options"] = {"port": 9000}
    made, remarks = convert(written(tmp_path, document))
    first, second = made["applications"]
    config = parse_args(first["args"])
    assert [model.name for model in config.models] == ["qwen", "small"]
    assert config.ingress.num_replicas == 4
    assert (second, made["http_options"]) == (other, {"port": 9000})
    assert any("max_ongoing_requests" in remark for remark in remarks)
    assert any("taken as it is (my:app)" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"applications": [{"import_path": "my:app"}]}, "ray.serve.llm:build_openai_app"),
        ({"some": "thing"}, "none of applications"),
        ([1], "expected a Serve configuration"),
        ({"llm_configs": []}, "llm_configs"),
        ({"llm_configs": [{"engine_kwargs": {}}]}, "model_id: this field is required"),
        ({"llm_configs": ["missing.yaml"]}, "missing.yaml"),
        ({"model_loading_config": {"model_id": "m"}, "engine_kwargs": {"max_model_len": -1}}, "max_model_len"),
    ],
)
def test_a_file_that_is_none_is_a_line(
    document: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, document)
    with pytest.raises(ConfigError, match=says):
        convert(path)
    assert manta(["convert", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_the_command_writes_what_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = written(tmp_path, serve_yaml(QWEN)), tmp_path / "manta.yaml"
    assert manta(["convert", str(path), "-o", str(output)]) == 0
    assert "accelerator_type" in capsys.readouterr().err
    again = ["serve", str(output), "--skip-preflight", "--dry-run"]
    assert manta(again) == 0
    output.write_text("mine")
    assert manta(["convert", str(path), "-o", str(output)]) == 2
    assert output.read_text() == "mine"
    assert manta(["convert", str(path), "-o", str(output), "--force"]) == 0
