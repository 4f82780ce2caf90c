"""The spans of requests as text: `python -m tools.trace_tree [--port 4318]`.

Stands where a collector would (OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318) and prints each request's tree when
its server span has come: when a span began, how long it took, where it lies in the whole, what it says. To try it out;
nothing is kept, and it listens on this machine only.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tools.otlp_receiver import Receiver, attributes

BAR = 40  # characters that the whole request is wide
POLL_S = 0.5
MS = 1_000_000  # nanoseconds
DEFAULT_PORT = 4318
HIDDEN = {"manta.engine_request_id", "gen_ai.response.id"}  # long, and the same through the whole tree
PREFIX = re.compile(r"^(gen_ai|manta|http)\.")


def tree(spans: Sequence[Span]) -> str:
    """The spans of one trace, parents before children, siblings by their beginning.

    A span whose parent is not among them is a root: a client's own span stays with the client.
    """
    begin = min(span.start_time_unix_nano for span in spans)
    whole = max(span.end_time_unix_nano for span in spans) - begin
    lines = [f"trace {spans[0].trace_id.hex()}", f"{'began':>9} {'took':>9}  {'':{BAR}}"]
    for depth, span in _ordered(spans):
        start, end = span.start_time_unix_nano - begin, span.end_time_unix_nano - begin
        head = f"{start / MS:6.1f} ms {(end - start) / MS:6.1f} ms  {_bar(start, end, whole)}  {'  ' * depth}"
        lines.append(f"{head}{span.name}{_said(attributes(span))}")
        for event in sorted(span.events, key=lambda event: event.time_unix_nano):
            at = event.time_unix_nano - begin
            mark = " " * _column(at, whole) + "*"
            lines.append(
                f"{at / MS:6.1f} ms {'':9}  {mark:{BAR}}  {'  ' * depth}  * {event.name}{_said(attributes(event))}"
            )
    return "\n".join(line.rstrip() for line in lines)


def _ordered(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    known = {span.span_id for span in spans}

    def below(parent: bytes | None, depth: int) -> Iterator[tuple[int, Span]]:
        found = [s for s in spans if (s.parent_span_id == parent if parent else s.parent_span_id not in known)]
        for span in sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano)):
            yield depth, span
            yield from below(span.span_id, depth + 1)

    return below(None, 0)


def _column(at: int, whole: int) -> int:
    return min(BAR - 1, at * BAR // max(1, whole))


def _bar(start: int, end: int, whole: int) -> str:
    first = _column(start, whole)
    return f"{' ' * first + '#' * max(1, _column(end, whole) - first + (end == whole)):{BAR}}"


def _said(told: dict[str, object]) -> str:
    """Attributes on the span's own line, without the prefixes that most share."""
    return "".join(f"  {PREFIX.sub('', name)}={value}" for name, value in told.items() if name not in HIDDEN)


def finished(spans: Sequence[Span]) -> list[bytes]:
    """The ids of traces whose server span has come, which is sent last."""
    return sorted({span.trace_id for span in spans if span.kind == Span.SPAN_KIND_SERVER})


def main() -> int:
    """Print trees until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    with Receiver(parser.parse_args().port) as receiver:
        print(f"OTEL_EXPORTER_OTLP_ENDPOINT={receiver.endpoint}", flush=True)
        while True:
            time.sleep(POLL_S)
            for trace_id in finished(receiver.spans):
                print(tree(receiver.pop(trace_id)), end="\n\n", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(0)
