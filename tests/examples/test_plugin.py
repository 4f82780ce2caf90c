"""examples/plugin, installed by pip: each of its plugins is found by name and used."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from app import LLM, SamplingParams
from app.api.generation.served_models import load_served_model
from app.config.model import ModelConfig
from app.deployments.ingress.adapter_finder import create_resolvers
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import RouteQuery
from app.errors import CheckpointError, ConfigError, UnsupportedError
from app.parsers.answer import ToolOptions, plan_parsers
from app.parsers.base import ParsedAnswer
from app.plugins import ALLOWED_VARIABLE, all_installed
from benchmarks.serve_process import ServeProcess
from tests.adapters import write_adapter
from tests.deployments.routing.test_load_book import report
from tests.examples.conftest import RunExample
from tests.limits import wait_until
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.plugin_packages import forget_plugins, on_the_path
from tests.tiny_models import hf_greedy, hf_model, tiny_model

PROMPT = [5, 9, 200, 31, 77, 8]
VOCAB = {"vocab_size": 1024}  # that of tiny-chat's tokenizer


@pytest.fixture(autouse=True)
def _installed(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ALLOWED_VARIABLE, raising=False)
    on_the_path(plugin_folder, monkeypatch)
    yield
    forget_plugins()
    for name in [name for name in sys.modules if name.partition(".")[0] == "manta_example"]:
        del sys.modules[name]


def _greedy(model: Path, max_tokens: int = 12, prompt: Sequence[int] = PROMPT, **options: Any) -> list[int]:
    """What `LLM` makes of a prompt."""
    settings = {"tokenizer": "app/assets/tiny-chat", "device": "cpu", "num_threads": 1, "num_blocks": 64, **options}
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(str(model), **settings) as llm:
        (output,) = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def _arcee(folder: Path) -> tuple[Path, PreTrainedModel]:
    """A checkpoint under a model type, an architecture and names of sizes that only the package knows; and
    transformers' own reading of it."""
    source = tiny_model("arcee", **VOCAB)
    config = json.loads((source / "config.json").read_text())
    for ours, theirs in (("num_hidden_layers", "depth"), ("hidden_size", "width"), ("num_attention_heads", "heads")):
        config[theirs] = config.pop(ours)
    config |= {"architectures": ["ArceeForCausalLMExample"], "model_type": "arcee_example"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return folder, hf_model(source)


def test_every_group_has_one() -> None:
    groups = {
        *("models", "pooling_models", "model_configs", "quantizations", "attention_backends", "logits_processors"),
        *("routing_policies", "tool_parsers", "tool_parser_marks", "reasoning_parsers", "reasoning_parser_marks"),
        *("stat_loggers", "kv_connectors", "executors", "proposers", "adapter_resolvers"),
    }
    assert {plugin.group for plugin in all_installed() if plugin.package == "manta-example"} == groups


def test_a_model_of_another_config_gives_transformers_tokens(tmp_path: Path) -> None:
    directory, judge = _arcee(tmp_path)
    assert _greedy(directory) == hf_greedy(judge, PROMPT, 12)


def test_a_pooling_model(tmp_path: Path) -> None:
    directory, judge = _arcee(tmp_path)
    with LLM(
        str(directory), runner="pooling", tokenizer="app/assets/tiny-chat", device="cpu", num_threads=1, num_blocks=64
    ) as llm:
        (output,) = llm.embed({"prompt_token_ids": PROMPT}, use_tqdm=False)
    with torch.inference_mode():
        hidden = judge.model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(hidden, dim=0)
    torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=1e-5)


def test_a_config_that_cannot_be_translated_is_named(tmp_path: Path) -> None:
    directory, _ = _arcee(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({key: config[key] for key in config.keys() - {"width"}}))
    with pytest.raises(
        CheckpointError, match=r"config.json of model type 'arcee_example' is not usable: KeyError: 'width"
    ):
        _greedy(directory)


def test_a_config_of_ours_is_not_the_packages_to_change(tmp_path: Path) -> None:
    directory, _ = _arcee(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedError, match=r"package manta-example .* LlamaForCausalLM is Manta's own"):
        _greedy(directory)


def test_a_model_that_may_not_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model("arcee", **VOCAB)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ArceeForCausalLMExample"]}))
    monkeypatch.setenv(ALLOWED_VARIABLE, "")
    with pytest.raises(UnsupportedError, match=r"package manta-example .*, which MANTA_PLUGINS does not name"):
        _greedy(tmp_path)


def test_attention_gives_transformers_tokens() -> None:
    for family, changes in (("llama", {}), ("mistral", {"sliding_window": 4})):
        model = tiny_model(family, **VOCAB, **changes)
        expected = hf_greedy(hf_model(model), PROMPT, 12)
        assert _greedy(model, attention_backend="example_gather", max_num_batched_tokens=4) == expected


def test_attention_serves_latent_models() -> None:
    """Absorbed where a step brings few tokens, expanded where it brings many."""
    family, changes = EXPERT_VARIANTS["deepseek_v3"]
    model = tiny_model(family, **{**VOCAB, **changes})
    prompt = list(range(40, 80))
    expected = hf_greedy(hf_model(model), prompt, 8)
    for tokens in (4, 64):
        options = {"attention_backend": "example_gather", "max_num_batched_tokens": tokens}
        assert _greedy(model, 8, prompt, **options) == expected
    with pytest.raises(ConfigError, match="attention_backend=example_gather: it does not serve a KV cache in fp8"):
        _greedy(model, attention_backend="example_gather", kv_cache_dtype="fp8")


def test_an_adapter_lies_in_its_teams_directory(tmp_path: Path) -> None:
    engine = {"model": "tiny-chat", "enable_lora": True}
    values = {"name": "m", "engine": engine, "adapter_resolver": "example_team", "adapter_directory": str(tmp_path)}
    own = write_adapter(tmp_path / "poets" / "sonnets")
    resolver = create_resolvers([ModelConfig.model_validate(values)])["m"]
    assert resolver.find("poets:sonnets") == own
    for name in ("sonnets", "poets:odes", "..:poets", "poets:../poets/sonnets"):
        assert resolver.find(name) is None


def test_int8_weights_are_the_nearest_of_their_channels() -> None:
    from manta_example.int8 import Int8Weight  # type: ignore[import-not-found]  # installed by this test

    weight, x = torch.randn(24, 40), torch.randn(7, 40)
    packed = Int8Weight.of(weight)
    restored = packed.stored.float() * packed.scale[:, None]
    assert ((restored - weight).abs() <= packed.scale[:, None] / 2 + 1e-6).all()
    torch.testing.assert_close(packed.linear(x, None), x @ restored.T)


def test_int8_gives_the_tokens_of_the_rounded_weights() -> None:
    model = tiny_model("llama", **VOCAB)
    judge = hf_model(model)
    with torch.no_grad():
        for layer in judge.model.modules():
            if isinstance(layer, torch.nn.Linear):
                scale = layer.weight.abs().amax(1, keepdim=True) / 127
                layer.weight.copy_((layer.weight / scale).round() * scale)
    assert _greedy(model, quantization="example_int8") == hf_greedy(judge, PROMPT, 12)


class _NoEcho(LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -1:], -float("inf"))


def test_a_logits_processor_edits_as_one_of_transformers_would() -> None:
    model = tiny_model("llama", **VOCAB)
    judge = hf_model(model)
    with torch.no_grad():
        judge.model.embed_tokens.weight *= 50  # a token likes to follow itself
        judge.lm_head.weight.copy_(judge.model.embed_tokens.weight)
    folder = model.parent / f"{model.name}-echoes"
    judge.save_pretrained(folder)
    plain = _greedy(folder)
    tokens = _greedy(folder, logits_processors=["example_no_echo"])
    with torch.inference_mode():
        out = judge.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
            logits_processor=LogitsProcessorList([_NoEcho()]),
        )  # fmt: skip
    assert tokens == out[0, len(PROMPT) :].tolist()
    assert any(a == b for a, b in itertools.pairwise(plain))
    with pytest.raises(ConfigError, match="'example_no_echo' is named twice"):
        _greedy(folder, logits_processors=["example_no_echo"] * 2)


def test_a_proposer_changes_no_token() -> None:
    model = tiny_model("llama", **VOCAB)
    drafting = {"method": "example_loop", "num_speculative_tokens": 3}
    assert _greedy(model, speculative_config=drafting) == hf_greedy(hf_model(model), PROMPT, 12)


def test_a_grammar_outlasts_a_logits_processor() -> None:
    """What ours rule out no plugin allows again: it comes before them."""
    with LLM("tiny-chat", device="cpu", num_threads=1, num_blocks=64, logits_processors=["example_no_echo"]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs={"regex": "a b a"})
        (output,) = llm.generate("Write: ", params, use_tqdm=False)
    assert output.outputs[0].text == "a b a"


def test_tier_and_executor() -> None:
    model = tiny_model("llama", **VOCAB)
    options = {"kv_connector": "example_counting", "executor": "example_timed", "kv_host_memory_bytes": 1 << 20}
    with LLM(
        str(model),
        tokenizer="app/assets/tiny-chat",
        device="cpu",
        num_threads=1,
        num_blocks=12,
        block_size=4,
        **options,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        first, *_, again = [  # those between push the first one's blocks out to the tier
            llm.generate({"prompt_token_ids": [token, *PROMPT]}, params, use_tqdm=False)[0].outputs[0].token_ids
            for token in (3, 4, 5, 6, 3)
        ]
        tier = llm._core.scheduler.kv.connector
        assert llm._core.executor.submit_s > 0  # type: ignore[attr-defined]
    assert first == again == hf_greedy(hf_model(model), [3, *PROMPT], 12)
    assert tier.hits > 0  # type: ignore[union-attr]


def test_parsers() -> None:
    named = {"tool_parser": "example_at", "reasoning_parser": "example_hmm"}
    model = load_served_model(ModelConfig.model_validate({"name": "m", **named}))
    parser = plan_parsers(model, [1, 2, 3], ToolOptions({"now": {"type": "object"}})).new_parser()
    answer = ParsedAnswer()
    for piece in ("hmm:so ", ":hmm", 'well @now {"a":', " 1}@"):
        answer.add(parser.push(piece))
    answer.add(parser.flush())
    assert (answer.reasoning, answer.content) == ("so ", "well")
    assert [(call.name, call.arguments) for call in answer.calls] == [("now", '{"a": 1}')]


def test_auto_finds_the_parsers(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{# calls: @name {json}@ ; thoughts: hmm: ... :hmm #}{{ messages[0]['content'] }}")
    model = load_served_model(ModelConfig(name="m", chat_template=str(template)))
    plan = plan_parsers(model, [1, 2, 3], ToolOptions({"now": {"type": "object"}}))
    assert plan.tools is not None
    assert plan.reasoning is not None
    assert (plan.tools.__name__, plan.reasoning.__name__) == ("AtParser", "HmmParser")


def test_a_routing_policy_keeps_sessions() -> None:
    book = LoadBook(create_policy("example_sticky"))
    for name in "abcd":
        book.report(report(name))
    places = {}
    for session in map(str, range(20)):
        chosen = {
            decision.replica_id for _ in range(3) if (decision := book.route(RouteQuery(10, 10, session=session)))
        }
        assert len(chosen) == 1
        places[session] = chosen.pop()
    assert set(places.values()) == set("abcd")


def test_a_server_uses_them(run_here: RunExample, server: ServeProcess, stats_file: Path) -> None:
    """Router, engine replica and worker actors each find what they were told to use."""
    lines = run_here("several_models", server.base_url).splitlines()
    assert [line.split(":")[0] for line in lines] == ["tiny-chat", "tiny-chat-draft"]

    def generated() -> list[list[str]]:
        rows = [line.split(",") for line in stats_file.read_text().splitlines()] if stats_file.exists() else []
        return [row for row in rows if int(row[-1]) > 0]

    wait_until(lambda: bool(generated()))
    assert generated()[-1][:2] == ["tiny-chat", "0"]
    log = server.log_path.read_text()
    assert "attention: example_gather (CPU)" in log
    assert "quantization: example_int8 (linear layers)" in log
