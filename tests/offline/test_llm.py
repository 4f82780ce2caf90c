"""`LLM`, the entry point without HTTP, on the built-in model."""

from __future__ import annotations

import gc
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app import LLM, SamplingParams
from app.errors import CheckpointError, ConfigError, InvalidRequestError, PromptTooLongError
from app.worker.build.parts import Parts
from benchmarks.offline import choices_of
from tests.limits import patience_s

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-chat", device="cpu", num_threads=1, num_blocks=400, max_num_seqs=16) as llm:
        yield llm


def test_importing_app_is_cheap() -> None:
    code = "import sys, app; assert not {'torch', 'ray', 'pydantic'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_llm_imports_no_web_framework() -> None:
    code = "import sys, app.offline.llm; assert not {'torch', 'ray', 'fastapi'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_in_app_is_an_attribute_error() -> None:
    import app

    with pytest.raises(AttributeError, match="Nonsense"):
        _ = app.Nonsense


def test_what_app_exports() -> None:
    import app

    assert all(getattr(app, name).__name__ == name for name in app.__all__)
    assert "StructuredOutputs" in app.__all__


def test_what_starts_leave_to_idle_time_is_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such time. Of steps with prompts nothing is, unless it is asked for."""
    left = [3]

    def capture_next(_: Parts) -> int:
        assert gc.get_freeze_count() > 10_000, "what a start made is looked at for each graph"
        left.append(max(0, left[-1] - 1))
        return left[-1]

    monkeypatch.setattr(Parts, "num_deferred", property(lambda _: left[-1]))
    monkeypatch.setattr(Parts, "capture_next", capture_next)
    gc.unfreeze()  # what tests/conftest.py has set aside, too
    with LLM("tiny-chat", device="cpu", num_threads=1, num_blocks=400, max_num_seqs=16) as llm:
        assert left == [3, 2, 1, 0]
        assert llm.config.cuda_graph_prompt_tokens == "as_used"
        llm.sleep()
        left[:] = [2]
        llm.wake_up()
        assert left == [2, 1, 0]
    gc.freeze()


def test_without_parameters_16_tokens(llm: LLM) -> None:
    """vLLM's default; the end of the context would be a minute away."""
    for (result,) in (llm.generate("Once", use_tqdm=False), llm.chat(HELLO, use_tqdm=False)):
        assert len(result.outputs[0].token_ids) <= 16
    lengths = [len(r.outputs[0].token_ids) for r in llm.generate(["1 2 3", "a b"], use_tqdm=False)]
    assert max(lengths) == 16, "neither ends by itself"


@pytest.mark.parametrize("wrong", [{"temperature": 0}, "greedy", [{"temperature": 0}], 5])
def test_parameters_of_another_type(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params: expected SamplingParams") as error:
        llm.generate(["hi"], wrong)
    assert error.value.param == "sampling_params"


def test_a_misspelt_name_is_told_the_one_that_was_meant() -> None:
    from app import BeamSearchParams, PoolingParams

    for call, says in (
        (
            lambda: SamplingParams(temprature=1),
            "SamplingParams has no parameter 'temprature'; did you mean temperature?",
        ),  # type: ignore[call-arg]
        (
            lambda: BeamSearchParams(beam_with=2),
            "BeamSearchParams has no parameter 'beam_with'; did you mean beam_width?",
        ),  # type: ignore[call-arg]
        (lambda: PoolingParams(xyz=2), "PoolingParams has no parameter 'xyz'; known: task, dimensions"),  # type: ignore[call-arg]
    ):
        with pytest.raises(InvalidRequestError) as error:
            call()
        assert error.value.message.startswith(says)
    with pytest.raises(ConfigError, match=r"max_modle_len: no such option; did you mean max_model_len\?"):
        LLM("tiny-chat", max_modle_len=5)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 1, not -1"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number, "),
        ({"max_tokens": 2, "min_tokens": 5}, "min_tokens: 5 is more than max_tokens=2"),
    ],
)
def test_a_wrong_parameter_is_a_line(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**wrong)
    assert isinstance(error.value, InvalidRequestError)
    assert error.value.message.startswith(says)
    assert "\n" not in error.value.message
    assert error.value.param == list(wrong)[-1]


def test_generate_keeps_the_order_of_prompts(llm: LLM) -> None:
    prompts = ["One", "Two and more", "Three"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [result.prompt for result in together] == prompts
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert alone.outputs[0].text == result.outputs[0].text
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
        assert result.finished


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello there")
    forms: list[Any] = [
        "Hello there",
        ids,
        ["Hello there"],
        [ids],
        {"prompt": "Hello there"},
        {"prompt_token_ids": ids},
    ]
    results = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert all(len(result) == 1 for result in results)
    assert len({tuple(result[0].outputs[0].token_ids) for result in results}) == 1
    assert results[1][0].prompt is None
    assert results[1][0].prompt_token_ids == ids


def test_chat_renders_the_template(llm: LLM) -> None:
    (result,) = llm.chat(HELLO, GREEDY, use_tqdm=False)
    assert result.prompt is not None
    assert "Hello!" in result.prompt
    assert result.prompt_token_ids == llm.tokenizer.encode(result.prompt, add_special_tokens=False)
    both = llm.chat([HELLO, HELLO], GREEDY, use_tqdm=False)
    assert [r.outputs[0].text for r in both] == [result.outputs[0].text] * 2


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    (result,) = llm.generate("Hello", SamplingParams(temperature=1.0, seed=3, max_tokens=30), use_tqdm=False)
    (choice,) = result.outputs
    assert choice.text == llm.tokenizer.decode(choice.token_ids)


def test_n_choices_differ_and_a_seed_repeats_them(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=9, max_tokens=16)
    first, second = (llm.generate("Hello", params, use_tqdm=False)[0] for _ in range(2))
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) > 1
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    unseeded = SamplingParams(temperature=1.5, max_tokens=16)
    assert len({tuple(llm.generate("Hello", unseeded, use_tqdm=False)[0].outputs[0].token_ids) for _ in range(3)}) > 1


def test_a_stop_string_ends_the_request_in_the_engine_too(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    (free,) = llm.generate("Hello", params, use_tqdm=False)
    text = free.outputs[0].text
    stop = text[len(text) // 4 :][:3]
    before = llm.stats().figures["generation_tokens"]
    (stopped,) = llm.generate("Hello", params.model_copy(update={"stop": (stop,)}), use_tqdm=False)
    choice = stopped.outputs[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert len(choice.token_ids) < 200
    assert llm.stats().figures["generation_tokens"] - before < 150, "the engine ran on"
    assert llm.stats().num_free_blocks == 400


def test_parameters_per_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (3, 5)]
    results = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [3, 5]
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["a"], params)


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate("Hello there, you", params, use_tqdm=False)
    (choice,) = result.outputs
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 4
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry.token_ids[0] == token
        assert entry.ranks[0] == 1  # greedy
        assert len(entry.token_ids) == 3
    assert choice.cumulative_logprob == pytest.approx(sum(entry.logprobs[0] for entry in choice.logprobs))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_bad_words_never_come(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    produced = llm.chat(HELLO, params, use_tqdm=False)[0].outputs[0].token_ids
    words = {token: llm.tokenizer.decode([token]).strip() for token in produced}
    token = next(
        token
        for token, word in words.items()
        if word and [token] in (llm.tokenizer.encode(word), llm.tokenizer.encode(" " + word))
    )
    without = params.model_copy(update={"bad_words": (words[token],)})
    assert token not in llm.chat(HELLO, without, use_tqdm=False)[0].outputs[0].token_ids


def test_errors_name_the_prompt_and_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"prompts\[1\]: .* tokens"):
        llm.generate(["fine", [5] * 100_000], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: prompt: is empty; it must hold at least one token"):
        llm.generate([[]], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        llm.generate({"text": "x"}, GREEDY, use_tqdm=False)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_an_interrupt_leaves_an_empty_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = llm._core.step, []

    def interrupted() -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 400)
    assert len(llm.generate("a", GREEDY, use_tqdm=False)) == 1


def test_the_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown
    llm.generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_profile_of_every_worker(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a relative directory is the caller's
    options = {"tensor_parallel_size": ranks, "device": "cpu", "num_threads": 1, "num_blocks": 64}
    with LLM("tiny-chat", **options) as llm:
        alone = llm.generate("The capital", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        llm.start_profile("traces")
        with pytest.raises(InvalidRequestError, match="is being recorded"):
            llm.start_profile("elsewhere")
        assert llm.generate("The capital", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone
        traces = llm.stop_profile()
        with pytest.raises(InvalidRequestError, match="no profile"):
            llm.stop_profile()
        assert llm.generate("The capital", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == alone
    assert sorted(traces) == sorted(str(path) for path in (tmp_path / "traces").iterdir())
    assert len(traces) == ranks
    assert [f"rank-{rank}." in trace for rank, trace in enumerate(traces)] == [True] * ranks
    for trace in traces:
        names = {event.get("name") for event in json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]}
        assert {"aten::linear", "aten::mm", "aten::addmm"} & names


FORGOTTEN = """
import sys
from app import LLM, SamplingParams
options = {"device": "cpu", "num_threads": 1, "num_blocks": 64, "tensor_parallel_size": int(sys.argv[1])}
with LLM("tiny-chat", **options) as llm:
    llm.start_profile(sys.argv[2])
    llm.generate("The capital", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_profile_that_is_not_stopped_is_written_at_the_end(ranks: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", FORGOTTEN, str(ranks), str(tmp_path / "traces")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=patience_s())
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((tmp_path / "traces").iterdir())) == ranks


def test_what_torch_cannot_record_is_refused(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match="directory: ") as refused:
        llm.start_profile(tmp_path / "file" / "traces")
    assert refused.value.param == "directory"
    llm.start_profile(tmp_path)
    with (
        LLM("tiny-chat", device="cpu", num_threads=1, num_blocks=64) as other,
        pytest.raises(InvalidRequestError, match="in this process"),
    ):
        other.start_profile(tmp_path)
    with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidRequestError, match="the thread that started it"):
        pool.submit(llm.stop_profile).result()
    assert len(llm.stop_profile()) == 1


def test_default_sampling_is_the_models_own(llm: LLM) -> None:
    own = llm._core.info.generation_config
    params = llm.default_sampling_params()
    for name in ("temperature", "top_p", "top_k"):
        if own.get(name) is not None:
            assert getattr(params, name) == own[name]


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="max_num_sequences"):
        LLM("tiny-chat", max_num_sequences=4)
    with pytest.raises(ConfigError, match="block_size"):
        LLM("tiny-chat", block_size=0)
    with pytest.raises(CheckpointError, match="no such path"):
        LLM("/nowhere/at/all")


@pytest.mark.parametrize("given", [5, None, {"prompt": 5}, [7.5]])
def test_what_is_no_prompt_is_said(llm: LLM, given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompts: expected a text, .*, not (int|NoneType|float) "):
        llm.generate(given)


@pytest.mark.parametrize("given", ["hello", 5, ["hello"], {"role": "user", "content": "x"}, [[{"role": "user"}], 5]])
def test_what_is_no_conversation_is_said(llm: LLM, given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages: expected a list of messages such as "):
        llm.chat(given)


def test_offline_nobody_waits_beside_a_long_step() -> None:
    from app.offline.llm import _config

    assert _config({"model": "tiny-chat"}).max_step_s == 0
    assert _config({"model": "tiny-chat", "max_step_s": 0.2}).max_step_s == 0.2


def test_whoever_steps_the_core_gets_the_tokens_of_generate(llm: LLM) -> None:
    """As the benchmarks that time single steps do."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = list(llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids)
    (choice,) = choices_of(llm, 0, [5, 6, 7], params)
    llm._core.enqueue(choice.request)
    while llm._core.has_work():
        llm._core.step()
    assert list(choice.request.token_ids[3:]) == expected
