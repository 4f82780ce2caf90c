"""Lines of batches are bounded as bodies are, and their bodies go on as they came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.api.batches.lines import BadLine, BatchRequest, parse_line
from app.api.batches.run import PRIORITY, _payload

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": %s}'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": [' + b"[]," * 200_000 + b"[]]}", "the line has more than 131072 arrays and objects"),
        (b'{"prompt": [1' + b",1" * 3_000_000 + b"]}", "the line has more than 2097152 values"),
        (b"{" + b",".join(b'"a%d": 1' % i for i in range(200_000)) + b"}", "members"),
        (b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}", "the line nests arrays and objects more than 65 deep"),
        (b'{"prompt": ' + b"[" * 100_000, "more than 65 deep"),
        (b'{"prompt": "' + b"[{" * 600_000 + b'"}', "1048576 opening brackets"),
    ],
)
def test_a_line_is_bounded_as_a_body_is(body: bytes, says: str) -> None:
    found = parse_line(1, LINE % body)
    assert isinstance(found, BadLine)
    assert says in found.message


def test_the_bytes_of_a_body_go_on_as_they_came() -> None:
    body = b'{ "prompt" :"\xc3\xa4\\u00e4", "n": 1e0,"x":[1 , 2]}'
    found = parse_line(1, b"\xef\xbb\xbf" + LINE % (b"  " + body + b"\t"))
    assert isinstance(found, BatchRequest), found
    assert (found.custom_id, found.url, found.body) == ("a", "/v1/completions", body)
    assert _payload(found) == b'{"priority": %d, ' % PRIORITY + body[1:]


@pytest.mark.parametrize("body", [b"{}", b'{"n": 1}', b'{"priority": 3}', b'{"\\u0070riority": 3}'])
def test_a_priority_stands_where_there_is_none(body: bytes) -> None:
    found = parse_line(1, LINE % body)
    assert isinstance(found, BatchRequest)
    assert json.loads(_payload(found), object_pairs_hook=list) == list(
        ({"priority": PRIORITY} | json.loads(body)).items()
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (LINE % b"{} 1", "no JSON"),
        (LINE % b"[1]", "body: expected a JSON object"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "body: expected a JSON object"),
        (LINE.replace(b'"a"', b'"%s"' % (b"a" * 513)) % b"{}", "custom_id: expected a text of 1 to 512 characters"),
        (LINE.replace(b'"a"', b"7") % b"{}", "custom_id"),
        (LINE.replace(b'"a"', b'"\\ud800"') % b"{}", "no JSON"),
        (LINE.replace(b'"a"', b'"a", "\\ud800": 1') % b"{}", "no JSON"),
        (LINE.replace(b'"a"', b'"a", "%s": 1' % (b"x" * 9000)) % b"{}", "x" * 256 + ": unknown field"),
        (LINE.replace(b"POST", b"GET") % b"{}", "method: only POST"),
        (LINE.replace(b'"/v1/completions"', b"[]") % b"{}", "url: expected one of"),
        (LINE % b'{"stream": true}', "body.stream"),
        (LINE % b'{"background": [1]}', "body.background"),
    ],
)
def test_a_wrong_line_is_told(line: bytes, says: str) -> None:
    found: Any = parse_line(1, line)
    assert isinstance(found, BadLine)
    assert says in found.message
    assert len(found.message) < 600
    found.message.encode()  # it can be echoed
