"""A sound becomes text through the OpenAI SDK: whole, with times, as subtitles, and as a stream.

pip install 'manta-serve[audio]'
manta serve openai/whisper-large-v3-turbo
.venv/bin/python examples/transcribe.py speech.mp3 [http://127.0.0.1:8000]
"""

from __future__ import annotations

import sys
from pathlib import Path

from openai import OpenAI


def main(path: str, url: str) -> None:
    """Print what is said in a file."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model, file = client.models.list().data[0].id, Path(path)

    verbose = client.audio.transcriptions.create(model=model, file=file, response_format="verbose_json")
    print(f"{verbose.duration:.1f} s of {verbose.language}")
    for segment in verbose.segments or ():
        print(f"{segment.start:7.2f} - {segment.end:7.2f} {segment.text}")

    print(client.audio.transcriptions.create(model=model, file=file, response_format="srt"))

    for event in client.audio.transcriptions.create(model=model, file=file, stream=True):
        if event.type == "transcript.text.delta":
            print(event.delta, end="", flush=True)
        elif event.type == "transcript.text.done" and event.usage:
            print(f"\n{event.usage.output_tokens} tokens")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000")
