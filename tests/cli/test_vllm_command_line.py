"""Command lines of `vllm serve`: each flag of vLLM 0.26 is taken, changes nothing, or is refused by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.cli.vllm_command_line import translate
from app.cli.vllm_flags import ACCEPTED, INSTEAD, RENAMED, SIZES, SWITCHES, TRANSLATED
from app.errors import ConfigError
from tools.cli_docs import subparsers

# Names of `vllm serve --help=all` of vLLM 0.26.
_NAMES = """
--additional-config --aggregate-engine-logging --all2all-backend --allow-credentials --allow-deprecated-quantization
--allowed-headers --allowed-local-media-path --allowed-media-domains --allowed-methods --allowed-origins --api-key
--api-server-count --async-scheduling --attention-backend --attention-config --block-size --calculate-kv-scales
--chat-template --chat-template-content-format --code-revision --collect-detailed-traces --compilation-config --config
--config-format --convert --cp-kv-cache-interleave-size --cpu-distributed-timeout-seconds --cpu-offload-gb
--cpu-offload-params --cudagraph-capture-sizes --cudagraph-metrics --data-parallel-address --data-parallel-backend
--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-multi-port-external-lb --data-parallel-rank
--data-parallel-rpc-port --data-parallel-size --data-parallel-size-local --data-parallel-start-rank
--data-parallel-supervisor-port --dbo-decode-token-threshold --dbo-prefill-token-threshold --dcp-comm-backend
--dcp-kv-cache-interleave-size --decode-context-parallel-size --default-chat-template-kwargs --default-mm-loras
--device-ids --diffusion-config --disable-access-log-for-endpoints --disable-cascade-attn --disable-chunked-mm-input
--disable-custom-all-reduce --disable-fastapi-docs --disable-hybrid-kv-cache-manager --disable-log-stats
--disable-nccl-for-dp-synchronization --disable-sliding-window --disable-uvicorn-access-log
--distributed-executor-backend --distributed-timeout-seconds --download-dir --dp-supervisor-probe-failure-threshold
--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --dtype --ec-transfer-config
--enable-auto-tool-choice --enable-bf16x3-router-gemm --enable-chunked-prefill --enable-cumem-allocator --enable-dbo
--enable-elastic-ep --enable-ep-weight-filter --enable-eplb --enable-expert-parallel --enable-flash-late-interaction
--enable-flashinfer-autotune --enable-force-include-usage --enable-layerwise-nvtx-tracing --enable-log-deltas
--enable-log-outputs --enable-log-requests --enable-logging-iteration-details --enable-lora
--enable-mamba-cache-stochastic-rounding --enable-mfu-metrics --enable-mixed-moe-lora-format --enable-mm-embeds
--enable-moe-shared-loras --enable-offline-docs --enable-per-request-metrics --enable-prefix-caching
--enable-prompt-embeds --enable-prompt-tokens-details --enable-request-id-headers --enable-return-routed-experts
--enable-server-load-tracking --enable-sleep-mode --enable-ssl-refresh --enable-tokenizer-info-endpoint
--enable-tower-connector-lora --enforce-eager --eplb-config --exclude-tools-when-tool-choice-none
--expert-placement-strategy --fail-on-environ-validation --fingerprint-mode --fingerprint-value --fully-sharded-loras
--gdn-prefill-backend --generation-config --gpu-memory-utilization --grpc --h11-max-header-count
--h11-max-incomplete-event-size --headless --hf-config-path --hf-overrides --hf-token --host --ignore-patterns
--interleave-mm-strings --io-processor-plugin --ir-op-priority --jit-monitor-mode --jit-monitor-verbose
--kernel-config --kv-cache-dtype --kv-cache-dtype-skip-layers --kv-cache-memory-bytes --kv-cache-metrics
--kv-cache-metrics-sample --kv-events-config --kv-offloading-backend --kv-offloading-size --kv-sharing-fast-prefill
--kv-transfer-config --language-model-only --limit-mm-per-prompt --linear-backend --load-format --log-config-file
--log-error-stack --logits-processors --logprobs-mode --long-prefill-token-threshold --lora-dtype --lora-modules
--lora-target-modules --mamba-backend --mamba-block-size --mamba-cache-dtype --mamba-cache-mode
--mamba-cache-philox-rounds --mamba-ssm-cache-dtype --master-addr --master-port --max-cpu-loras
--max-cudagraph-capture-size --max-log-len --max-logprobs --max-long-partial-prefills --max-lora-rank --max-loras
--max-model-len --max-num-batched-tokens --max-num-partial-prefills --max-num-scheduled-tokens --max-num-seqs
--max-parallel-loading-workers --media-io-kwargs --middleware --mm-encoder-attn-backend --mm-encoder-attn-dtype
--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-encoder-only
--mm-encoder-tp-mode --mm-ipc-gpu-memory-gb --mm-processor-cache-gb --mm-processor-cache-type --mm-processor-kwargs
--mm-shm-cache-max-object-size-mb --mm-tensor-ipc --model --model-class-overrides --model-impl
--model-loader-extra-config --moe-backend --nnodes --node-rank --num-gpu-blocks-override --numa-bind --numa-bind-cpus
--numa-bind-nodes --offload-backend --offload-group-size --offload-num-in-group --offload-params
--offload-prefetch-step --optimization-level --otlp-traces-endpoint --override-attention-dtype
--override-generation-config --performance-mode --pipeline-parallel-size --pooler-config --port
--prefill-context-parallel-size --prefill-schedule-interval --prefix-caching-hash-algo --prefix-match-unit
--profiler-config --pt-load-map-location --quantization --quantization-config --ray-workers-use-nsight
--reasoning-config --reasoning-parser --reasoning-parser-plugin --renderer-num-workers --response-role
--return-tokens-as-token-ids --revision --root-path --runner --safetensors-load-strategy
--safetensors-prefetch-block-size --safetensors-prefetch-num-threads --scheduler-cls --scheduler-reserve-full-isl
--scheduling-policy --seed --served-model-name --show-hidden-metrics-for-version --shutdown-timeout
--skip-mm-profiling --skip-tokenizer-init --spec-method --spec-model --spec-tokens --specialize-active-lora
--speculative-config --ssl-ca-certs --ssl-cert-reqs --ssl-certfile --ssl-ciphers --ssl-keyfile --stream-interval
--structured-outputs-config --tensor-parallel-size --tokenizer --tokenizer-mode --tokenizer-revision --tokens-only
--tool-call-parser --tool-parser-plugin --tool-server --trust-remote-code --trust-request-chat-template --ubatch-size
--uds --use-fp64-gumbel --use-tqdm-on-load --uvicorn-log-level --video-pruning-rate --watermark
--weight-transfer-config --worker-cls --worker-extension-cls -ac -asc -cc -dc -dcp -dp -dpa -dpb -dpe -dph -dpl -dpm
-dpn -dpp -dpr -ep -n -pcp -pp -q -r -sc -tp
"""
VLLM_FLAGS = _NAMES.split()


def ours() -> set[str]:
    return set(subparsers()["serve"]._option_string_actions)


def test_every_flag_of_vllm_has_a_place() -> None:
    places = ours() | RENAMED.keys() | SWITCHES.keys() | TRANSLATED.keys() | ACCEPTED.keys() | INSTEAD.keys()
    assert sorted(set(VLLM_FLAGS) - places - {"--model"}) == []
    assert len(VLLM_FLAGS) > 280


def test_a_flag_has_one_place_and_hides_none_of_ours() -> None:
    tables = [RENAMED, SWITCHES, TRANSLATED, ACCEPTED, INSTEAD]
    names = [name for table in tables for name in table]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    # Values of these are read in vLLM's way as well; all that ours means stays.
    assert ours() & set(names) <= {"--dtype", "--reasoning-parser"}
    assert set(SIZES) <= ours()


def test_what_stands_for_a_flag_is_an_option() -> None:
    flags = {*RENAMED.values(), *(flag for flag, _ in SWITCHES.values())}
    flags |= {translated.words(["1"])[0] for translated in TRANSLATED.values()}
    assert flags <= ours()


@pytest.mark.parametrize(
    ("vllm", "manta"),
    [
        ("qwen -tp 2 --enforce-eager", "qwen --tensor-parallel-size 2 --cuda-graphs off"),
        ("--model qwen -dp=4", "qwen --num-replicas=4"),
        ("qwen --served-model-name a b c --port 1", "qwen --name a --aliases b --aliases c --port 1"),
        ("qwen --max_model_len 1k", "qwen --max-model-len 1000"),
        ("qwen --max-num-batched-tokens=8K", "qwen --max-num-batched-tokens 8192"),
        ("qwen --max-model-len 25.6k", "qwen --max-model-len 25600"),
        ("qwen --max-model-len -1", "qwen"),
        ("qwen --dtype half --tool-call-parser openai", "qwen --dtype float16 --tool-parser harmony"),
        ("qwen --reasoning-parser qwen3", "qwen --reasoning-parser think"),
        ("qwen --kv-offloading-size 0.5", "qwen --kv-host-memory-bytes 536870912"),
        ("qwen --cudagraph-capture-sizes 1 2", "qwen --cuda-graph-sizes 1 --cuda-graph-sizes 2"),
        ("qwen --distributed-executor-backend mp", "qwen --executor local_processes"),
        ("qwen --enable-lora --lora-modules a=/b c=/d", 'qwen --enable-lora --adapters {"a":"/b","c":"/d"}'),
        ("qwen --no-async-scheduling --seed=3", "qwen --max-inflight-steps 1 --seed=3"),
    ],
)  # fmt: skip
def test_what_means_the_same_is_taken(vllm: str, manta: str) -> None:
    assert translate(vllm.split()) == (manta.split(), [])


def test_what_changes_nothing_is_said() -> None:
    arguments, notes = translate(
        ["qwen", "--trust-remote-code", "--swap-space", "4", "--tokenizer-mode=auto", "--seed", "1"]
    )
    assert arguments == ["qwen", "--seed", "1"]
    assert [note.partition(" ")[0] for note in notes] == ["--trust-remote-code", "--swap-space", "--tokenizer-mode"]
    assert "never run" in notes[0]


@pytest.mark.parametrize(
    ("vllm", "says"),
    [
        ("--lora-target-modules q_proj", "adapters.md"),
        ("--spec-method ngram", "a key of --speculative-config"),
        ("--media-io-kwargs {}", "are not there"),
        ("--tokenizer-mode slow", "only auto"),
        ("--no-enable-chunked-prefill", "cannot be turned off"),
        ("--api-key k", "MANTA_API_KEYS"),
        ("--swap-space", "expected a value"),
        ("--served-model-name --port 1", "expected a value"),
        ("--max-model-len 1.3K", "no whole number"),
    ],
)
def test_the_rest_says_what_to_do_instead(vllm: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        translate(vllm.split())
    assert raised.value.message.startswith(vllm.partition(" ")[0])


def test_the_command_reads_it() -> None:
    command = [sys.executable, "-m", "app.cli", "serve", "tiny-chat", "--enable-auto-tool-choice", "-tp", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--enable-auto-tool-choice changes nothing: always on" in done.stderr
    assert "--tensor-parallel-size" in done.stderr
