"""W3C Trace Context as it comes, and what a line in the log says."""

from __future__ import annotations

import pytest

from app.telemetry.request_record import GenerationRecord, Leg, RequestRecord, TraceParent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_traceparent() -> None:
    parent = TraceParent.parse(f"00-{TRACE}-{SPAN}-01", "vendor=1")
    assert parent == TraceParent(TRACE, SPAN, 1, "vendor=1")
    assert TraceParent.parse(f"01-{TRACE}-{SPAN}-00-later", None) == TraceParent(TRACE, SPAN, 0)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x" * 10_000,
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
    ],
)
def test_what_the_standard_ignores(header: str | None) -> None:
    assert TraceParent.parse(header, None) is None


def test_log_fields() -> None:
    record = RequestRecord("POST", "/v1/completions", status=200, request_id="r", tenant="0f1e2d3c4b5a")
    start = record.started
    record.ended = start + 2.0
    lost = Leg(start, start, "a", first_at=start + 0.5, left_because="lost")
    record.add(GenerationRecord("m", "r-0", 4, legs=[lost, Leg(start, start, "b")], num_output_tokens=7))
    fields = record.log_fields()
    assert fields["tokens"] == 7
    assert fields["attempts"] == 2
    assert fields["replica"] == "b"
    assert fields["ttft_s"] == 0.5
    assert fields["e2e_s"] == 2.0
    assert fields["tenant"] == "0f1e2d3c4b5a"


def test_a_long_tracestate_loses_whole_members() -> None:
    """W3C Trace Context 3.3.1.5: long ones first, then from the end."""

    def kept(state: str) -> str:
        parent = TraceParent.parse(f"00-{TRACE}-{SPAN}-01", state)
        assert parent is not None
        return parent.state

    members = [f"vendor{number:02d}={'x' * 40}" for number in range(20)]
    fitting = kept(", ".join(members)).split(",")
    assert fitting == members[: len(fitting)]
    assert len(fitting) == 513 // 51
    long = f"long={'y' * 300}"
    assert kept(",".join([long, *members[:9]])).split(",") == members[:9]
    assert kept(f"{long},a=b") == f"{long},a=b"
    assert kept(",".join(f"v{number}=1" for number in range(40))).count("=") == 32
    assert kept("z" * 600) == ""
