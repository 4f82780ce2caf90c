"""An hour of sound through the whole Ray Serve graph, over HTTP, on random weights: how long its transcript takes.

    python -m benchmarks.sound_hour --shape whisper-large-v3 [--minutes 60] [--kinds ogg mp3] [--out FILE]

The sound is noise that swells like speech, 16 kHz and mono, no two pieces alike. A piece has as many tokens as the
context leaves it, as random weights end none, and a temperature is given, as their doubts would have each asked six
times. The whole is taken apart by the server's own word (the header Server-Timing) and by the engine's metrics. Beside
it stand the host's parts, each alone in this process's own media processes: decoding and cutting the file, and the
features of all pieces. `--engine '{"device":"cpu"}' --shape tiny-whisper --minutes 2` tries it where
there is no GPU.
"""

from __future__ import annotations

import io
import itertools
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soundfile

from app.config.media import MediaConfig
from app.media.audio.mel import MelSettings
from app.media.audio.reader import SoundReader
from app.media.audio.sound import Cutter, Piece, Sound
from benchmarks.offline import arguments, write
from benchmarks.serve_process import ServeProcess
from benchmarks.serving import CONFIG, TOKENIZER
from benchmarks.shapes import SHAPES, write_shape

RATE = 16_000
FORMATS = {
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "flac": ("FLAC", "PCM_16"),
}
LANGUAGES = ("en", "zh", "de", "es", "ru")
PROMPT = 4  # start, language, task, no times
LIMIT_S = 300.0
SNAPSHOT_S = 1.5  # until a replica's figures are on the page
ENGINE = (
    "manta:step_seconds",
    "vllm:iteration_tokens_total",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
)


def sound(seconds: float, kind: str, seed: int) -> bytes:
    """A file of so many seconds: noise of a voice's band in syllables, with a pause every few seconds."""
    container, subtype = FORMATS[kind]
    rng, out = np.random.default_rng(seed), io.BytesIO()
    with soundfile.SoundFile(out, "w", RATE, 1, format=container, subtype=subtype) as file:
        left = round(seconds * RATE)
        while left > 0:
            count = min(left, 10 * RATE)
            times = np.arange(count) / RATE
            carrier = sum(np.sin(2 * np.pi * rng.uniform(90, 3_000) * times + rng.uniform(0, 6)) for _ in range(12))
            swell = np.clip(np.sin(2 * np.pi * rng.uniform(2, 5) * times), 0, None) * (times % 5 < 4.5)
            wave = 0.05 * carrier * swell + rng.normal(0, 0.002, count)
            file.write(wave.astype(np.float32))
            left -= count
    return out.getvalue()


def write_model(shape: str, path: Path) -> Path:
    """The shape's directory, with the tokens of Whisper's languages, tasks and times."""
    directory = write_shape(shape, path)
    first = int(SHAPES[shape]["decoder_start_token_id"]) + 1
    (directory / "generation_config.json").write_text(
        json.dumps(
            {
                "decoder_start_token_id": first - 1,
                "eos_token_id": SHAPES[shape]["eos_token_id"],
                "lang_to_id": {f"<|{code}|>": first + i for i, code in enumerate(LANGUAGES)},
                "task_to_id": {"translate": 50359, "transcribe": 50360},
                "no_timestamps_token_id": 50364,
            }
        )
    )
    return directory


def pieces_of(whole: Sound, max_s: float) -> list[Piece]:
    """All of a sound in pieces."""
    cutter = Cutter(whole.rate, max_s)
    return [*cutter.add(whole.samples), *cutter.end()]


def host_parts(data: bytes, media: MediaConfig, mel: MelSettings) -> dict[str, float]:
    """Seconds of decoding and cutting, and of the features of all pieces, with processes that are there already."""
    reader = SoundReader(media, b"a key for benchmarks")
    with ThreadPoolExecutor(media.max_decoders) as threads:
        short = reader.decode(sound(1.0, "ogg", 0), RATE)
        list(threads.map(lambda piece: reader.features(piece, mel), pieces_of(short, 0.1)))
        begin = time.perf_counter()
        whole = reader.decode(data, RATE)
        decoded = time.perf_counter()
        pieces = pieces_of(whole, mel.seconds)
        cut = time.perf_counter()
        list(threads.map(lambda piece: reader.features(piece, mel), pieces))
        heard = time.perf_counter()
    reader.close()
    return {
        "decode_s": decoded - begin, "cut_s": cut - decoded, "features_s": heard - cut, "pieces": float(len(pieces))
    }  # fmt: skip


def transcribe(url: str, name: str, data: bytes, kind: str, language: str | None) -> dict[str, Any]:
    """One request's seconds and answer."""
    fields = {"model": name, "temperature": "0.2", "response_format": "json", "seed": "1"}
    if language is not None:
        fields["language"] = language
    begin = time.perf_counter()
    answer = httpx.post(
        f"{url}/v1/audio/transcriptions", data=fields, files={"file": (f"a.{kind}", data)}, timeout=LIMIT_S
    )
    taken = time.perf_counter() - begin
    answer.raise_for_status()
    body = answer.json()
    parts = {
        name.strip(): round(float(milliseconds) / 1e3, 3)
        for name, _, milliseconds in (part.partition(";dur=") for part in answer.headers["server-timing"].split(","))
    }
    return {"s": taken, "usage": body.get("usage"), "characters": len(body["text"]), "parts_s": parts}


def of_engine(url: str) -> dict[str, float]:
    """Sums and counts of the engine's histograms, once its last steps are among them."""
    time.sleep(SNAPSHOT_S)
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=LIMIT_S).text.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name.removesuffix("_sum").removesuffix("_count") in ENGINE:
            phase = labels.partition('phase="')[2].partition('"')[0]
            key = " ".join(filter(None, (name.partition(":")[2], phase)))
            found[key] = found.get(key, 0.0) + float(value)
    return found


def main() -> None:
    """Serve, send a short sound, then long ones of each kind, print, write JSON."""
    parser = arguments(__doc__, "whisper-large-v3")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kinds", choices=sorted(FORMATS), nargs="+", default=["ogg"])
    parser.add_argument("--tokens", type=int, default=120, help="Tokens of a piece.")
    parser.add_argument("--decoders", type=int, default=MediaConfig().max_decoders, help="media.max_decoders")
    parser.add_argument("--rounds", type=int, default=3, help="Files of each kind, no two alike.")
    args = parser.parse_args()
    figures: dict[str, Any] = {"shape": args.shape, "minutes": args.minutes}
    engine = {"max_num_seqs": 64, "max_num_batched_tokens": 12_000, "max_model_len": PROMPT + args.tokens}
    with ThreadPoolExecutor() as threads, tempfile.TemporaryDirectory() as folder:
        made = {
            kind: [threads.submit(sound, 60 * args.minutes, kind, seed) for seed in range(args.rounds)]
            for kind in args.kinds
        }
        directory = str(write_model(args.shape, Path(folder)))
        options = {"model": directory, "tokenizer": TOKENIZER, "load_format": "dummy", **engine, **args.engine}

        def change(config: dict[str, Any]) -> None:
            own = config["applications"][0]["args"]
            own["models"] = [{"name": args.shape, "engine": options}]
            own.setdefault("ingress", {})["media"] = {"max_decoders": args.decoders}

        with ServeProcess(CONFIG, change, ready_timeout_s=240, ends_gracefully=False) as server:
            print(f"ready after {server.start_time_s:.1f} s", flush=True)
            files = {kind: [one.result() for one in ones] for kind, ones in made.items()}
            for seed in range(2):  # the processes start, graphs are captured
                transcribe(server.base_url, args.shape, sound(300, "ogg", 100 + seed), "ogg", None)
            seen = of_engine(server.base_url)
            for index, kind in itertools.product(range(args.rounds), args.kinds):
                data = files[kind][index]
                figures[f"{kind}_{index}"] = row = transcribe(server.base_url, args.shape, data, kind, None)
                before, seen = seen, of_engine(server.base_url)
                row["engine"] = {name: round(value - before.get(name, 0.0), 3) for name, value in seen.items()}
                print(
                    f"{args.minutes:g} minutes of {kind} ({len(data) / 1e6:.1f} MB) over HTTP: {row['s']:.2f} s, "
                    f"usage {row['usage']}\n   its parts {row['parts_s']}\n   its engine {row['engine']}",
                    flush=True,
                )
                write(args.out, figures)
        media, mel = (
            MediaConfig(max_decoders=args.decoders),
            MelSettings(num_mels=int(SHAPES[args.shape]["num_mel_bins"])),
        )
        for kind in args.kinds:
            figures[f"{kind}_parts"] = parts = host_parts(files[kind][0], media, mel)
            print(kind, ", ".join(f"{name} {value:.3f}" for name, value in parts.items()), flush=True)
            write(args.out, figures)


if __name__ == "__main__":
    main()
