"""The head for tiny-chat: what it is trained as is what the engine runs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from app.checkpoints.model_info import ASSETS
from app.offline.llm import LLM
from app.offline.metrics import Counter
from app.quantize.questions import read_questions
from app.records.sampling_params import SamplingParams
from tests.worker.spec_decode.test_chain import assert_drafts, config_of, run_greedy
from tools.tiny_chat.eagle.head import CONFIG, KNOWN, UNROLLED, Head, lesson, passes, unrolled
from tools.tiny_chat.eagle.lessons import TARGET, batches, continued, load_target, made_up, openings, padded
from tools.tiny_chat.eagle.train import save, tokens_of
from tools.tiny_chat.model import Llama

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_target(TARGET, CPU)


def head_of(seed: int = 3) -> Head:
    torch.manual_seed(seed)
    return Head(CONFIG).bfloat16().float()  # as it is stored


def test_the_engine_drafts_what_training_unrolls(target: Llama, tmp_path: Path) -> None:
    known = torch.from_numpy(np.random.default_rng(0).permutation(1024)[:KNOWN]).sort().values
    head = head_of()
    save(head, known, tmp_path, {})
    assert torch.equal(tokens_of(tmp_path), known)

    @torch.no_grad()
    def reference(tokens: list[int], count: int) -> list[int]:
        drafts: list[int] = []
        read = lesson(target, torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool)).read
        for ahead in range(count):
            ids = torch.tensor([tokens + drafts])
            longer = torch.nn.functional.pad(read, (0, 0, 0, len(drafts)))
            place = torch.tensor([[len(tokens) - 2]])
            _, made = next(islice(unrolled(head, ids, longer, place), ahead, None))
            drafts.append(int(known[made[0, 0].argmax()]))
        return drafts

    asked = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 4}
    _, spy = run_greedy(config_of(TARGET, asked))
    assert_drafts(spy, reference, 4)


def test_it_learns_what_the_target_says(target: Llama) -> None:
    spoken = continued(target, openings(made_up(3, 4), 0), 16)
    ids, own = padded(batches(spoken, 4096)[0], CPU)
    assert all(own[row, len(one[0]) - 1] for row, one in enumerate(batches(spoken, 4096)[0])), "the answers' ends"
    read, head, known = lesson(target, ids, own), head_of(), torch.arange(KNOWN)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss, right, told = passes(head, known, read)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert right.shape == told.shape == (UNROLLED, len(ids), int(read.says[:, 1:].sum(1).max()))
    assert (right <= told).all()
    # The first pass guesses all that is said: the first token from the place before the prompt's last token.
    assert int(told[0].sum()) == 16 * len(spoken)


def test_the_shipped_head_is_right_often() -> None:
    """By its name, in the engine: of seven drafts a step most are right on held-out questions."""
    assert (ASSETS / "tiny-chat-eagle3" / "model.safetensors").stat().st_size <= 1 << 20
    asked = {"method": "eagle3", "model": "tiny-chat-eagle3", "num_speculative_tokens": 7}
    questions = [one for one in read_questions(TARGET) if one["family"] in ("about_manta", "long_answer")][::7]
    with LLM("tiny-chat", num_threads=1, num_blocks=200, max_model_len=1024, speculative_config=asked) as llm:
        for one in questions:
            llm.chat(one["messages"], SamplingParams(temperature=0.0, max_tokens=80), use_tqdm=False)
        counted = {one.name: one.value for one in llm.get_metrics() if isinstance(one, Counter)}
    made, right = (counted[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert made > 50
    assert right > 0.5 * made
