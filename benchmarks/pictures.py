"""Pictures on random weights: the encoder alone, the time to the first token beside as many tokens of text, pictures a
second with the steps of a server and with those of a batch, the waiting of others meanwhile, and text with and without
the part that sees, in turns.

    python -m benchmarks.pictures --shape qwen3-vl-8b [--side 1024] [--out results/pictures.json]

Pixels come prepared, as the engine gets them: nothing is decoded. Times are the best of several.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.models.multimodal.base import Picture
from app.records.media import MediaAsk, MediaItem
from app.records.media_info import MediaInfo
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.worker.media.media import Media
from benchmarks.offline import write
from benchmarks.shapes import write_shape

REPEATS = 6
NUM_BLOCKS = 8192  # of the KV cache: for 64 requests of 2,048 tokens, and two engines fit one GPU


class Bench:
    """One engine in this process."""

    def __init__(self, shape: str, side: int, **options: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = EngineConfig(
                model=str(write_shape(shape, Path(folder))), load_format="dummy", executor="in_process",
                **{"max_num_seqs": 64, "max_model_len": 8192, "max_num_batched_tokens": 8192,
                   "num_blocks": NUM_BLOCKS, **options},
            )  # fmt: skip
            self.info = ModelInfo.of(config)
            self.executor = InProcessExecutor(config)
            self.core = EngineCore(config, self.info, self.executor, b"a key for benchmarks")
            self.core.start()
        self._grid = (1, side // 16, side // 16)
        self._rng = np.random.default_rng(0)
        self._count = 0

    @property
    def item_tokens(self) -> int:
        """Tokens of one picture."""
        return int(np.prod(self._grid)) // 4

    def item(self, offset: int) -> MediaItem:
        """A picture that nobody has seen before."""
        shape = (self._grid[1] * self._grid[2], 3, 16, 16)
        pixels = self._rng.integers(0, 256, shape, np.uint8).tobytes()
        return MediaItem("image", secrets.token_bytes(16), offset, self.item_tokens, self._grid, shape, pixels)

    def request(self, *, item: MediaItem | None, num_tokens: int, max_tokens: int = 1) -> EngineRequest:
        """A picture between a few words, or text of `num_tokens` tokens."""
        tokens = self._rng.integers(1000, 100_000, num_tokens).tolist()
        media = MediaInfo.of(self.info)
        if item is not None:
            assert media is not None
            tokens[item.offset : item.end] = [media.image_token_id] * item.length
        self._count += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        asks = () if item is None else (MediaAsk((item,)),)
        return EngineRequest(f"r{self._count}", tokens, params, asks=asks)

    def run(self, *requests: EngineRequest) -> float:
        """Seconds until all are done."""
        begin = time.perf_counter()
        for request in requests:
            self.core.add_request(request)
        while self.core.has_work():
            self.core.step()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Give the memory back."""
        self.core.shutdown()
        del self.core, self.executor
        gc.collect()
        torch.cuda.empty_cache()

    # ---- measurements

    def encoder(self) -> dict[str, float]:
        """Pictures a second, one and four at a time."""
        worker: Any = self.executor._worker
        encoder, device = worker._parts.model.encoder, worker._device
        rows: dict[str, float] = {}
        for count in (1, 4):
            item = self.item(0)
            pixels = torch.frombuffer(bytearray(item.pixels), dtype=torch.uint8).view(item.shape).to(device)
            pictures = [Picture(pixels, self._grid)] * count
            with torch.inference_mode():
                seconds = [_timed_call(partial(encoder, pictures), device) for _ in range(REPEATS)]
            rows[f"encoder_ms_{count}"] = 1e3 * min(seconds)
            rows[f"pictures_per_s_{count}"] = count / min(seconds)
        feature = next(one for one in worker._parts.features._all if isinstance(one, Media))
        for count in (1, 4):  # as steps do it: pixels sent, common sizes replayed
            with torch.inference_mode():
                seconds = []
                for _ in range(REPEATS):
                    items = [self.item(0) for _ in range(count)]
                    seconds.append(_timed_call(partial(feature._encoded, items), device))
            rows[f"encoded_ms_{count}"] = 1e3 * min(seconds)
        return rows

    def first_tokens(self) -> dict[str, float]:
        """Milliseconds to the first token: a new picture, text of as many tokens, a picture that was shown before in
        another prompt, another question about it, the same prompt again, and a few words."""
        size, shown = self.item_tokens + 32, self.item(16)
        kinds = {
            "text": lambda: self.request(item=None, num_tokens=size),
            "picture": lambda: self.request(item=self.item(16), num_tokens=size),
            "picture_again": lambda: self.request(item=shown, num_tokens=size),
            "few_words": lambda: self.request(item=None, num_tokens=16),
        }
        rows = {}
        for name, make in kinds.items():
            self.run(make())
            rows[f"ttft_{name}_ms"] = 1e3 * min(self.run(make()) for _ in range(REPEATS))
        same = self.request(item=shown, num_tokens=size)
        self.run(same)
        for name in ("prompt", "question"):
            times = []
            for _ in range(REPEATS):
                self._count += 1
                tokens = list(same.prompt_token_ids)
                if name == "question":
                    tokens[-16:] = self._rng.integers(1000, 100_000, 16).tolist()
                times.append(self.run(EngineRequest(f"r{self._count}", tokens, same.work, asks=same.asks)))
            rows[f"ttft_{name}_again_ms"] = 1e3 * min(times)
        return rows

    def whole(self) -> dict[str, float]:
        """Pictures a second of 32 that come at once, prompts and all: with steps as short as a server's, for the sake
        of those who decode, and as long as `LLM`'s."""
        rows: dict[str, float] = {}
        prompt_time = self.core.scheduler._rules.prompt_time
        usual_s = prompt_time.max_step_s
        for name, step_s in (("pictures_per_s_whole", usual_s), ("pictures_per_s_long_steps", 0.0)):
            prompt_time.max_step_s = step_s
            for _ in range(4):
                several = [self.request(item=self.item(16), num_tokens=self.item_tokens + 32) for _ in range(32)]
                rows[name] = max(len(several) / self.run(*several), rows.get(name, 0.0))
        prompt_time.max_step_s = usual_s
        return rows

    def others_meanwhile(self) -> dict[str, float]:
        """Waits between tokens of 8 that decode, while pictures come or text of as many tokens does: the middle, the
        99th of a hundred, the longest."""
        rows = {}
        for name in ("text", "pictures"):
            for _ in range(8):
                self.core.add_request(self.request(item=None, num_tokens=64, max_tokens=160))
            gaps, last, sent = [], time.perf_counter(), 0
            for step in range(10_000):
                if step % 20 == 10 and sent < 6:
                    sent += 1
                    item = self.item(16) if name == "pictures" else None
                    self.core.add_request(self.request(item=item, num_tokens=self.item_tokens + 32))
                if not self.core.has_work():
                    break
                outputs = self.core.step()
                if outputs:
                    gaps.append(time.perf_counter() - last)
                    last = time.perf_counter()
            figures = np.percentile(gaps[2:], (50, 99, 100)) * 1e3
            rows |= {f"itl_{name}_{which}_ms": ms for which, ms in zip(("p50", "p99", "most"), figures, strict=True)}
        return rows

    def text(self) -> dict[str, float]:
        """Milliseconds a step of runs that decode, for 1 and 32 requests, and of a prompt of 1,024 tokens."""
        rows = {}
        for count in (1, 32):
            several = [self.request(item=None, num_tokens=16, max_tokens=129) for _ in range(count)]
            rows[f"decode_{count}_ms"] = 1e3 * self.run(*several) / 129
        rows["prefill_1024_ms"] = 1e3 * self.run(self.request(item=None, num_tokens=1024))
        return rows


def text_in_turns(seeing: Bench, alone: Bench) -> dict[str, float]:
    """The best and the middle of each figure of text, and the middle of the pairs' ratios."""
    seen, plain = [], []
    for turn in range(2 + 2 * REPEATS):  # the first two warm up
        pair = [seeing, alone] if turn % 2 else [alone, seeing]
        found = {id(bench): bench.text() for bench in pair}
        if turn > 1:
            seen.append(found[id(seeing)])
            plain.append(found[id(alone)])
    rows = {}
    for name in seen[0]:
        with_it, without = (np.array([row[name] for row in rows_]) for rows_ in (seen, plain))
        rows |= {f"text_{name}": with_it.min(), f"alone_{name}": without.min()}
        rows |= {f"text_{name}_ratio_of_best": with_it.min() / without.min()}
        rows |= {f"text_{name}_middle_ratio": float(np.median(with_it / without))}
    return rows


def _timed_call(call: Any, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-vl-8b")
    parser.add_argument("--side", type=int, default=1024, help="Pixels of a picture's side.")
    parser.add_argument("--engine", type=json.loads, default={}, help="Engine options, as JSON.")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape, "side": args.side}

    def note(rows: dict[str, float]) -> None:
        figures.update(rows)
        print(", ".join(f"{name} {value:.4g}" for name, value in rows.items()), flush=True)
        write(args.out, figures)

    bench = Bench(args.shape, args.side, **args.engine)
    for part in (bench.encoder, bench.first_tokens, bench.whole, bench.others_meanwhile):
        note(part())
    alone = Bench(args.shape, args.side, language_model_only=True, **args.engine)
    note(text_in_turns(bench, alone))
    bench.close()
    alone.close()


if __name__ == "__main__":
    main()
