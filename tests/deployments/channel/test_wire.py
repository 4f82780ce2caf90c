"""What a frame carries comes out of it as it went in."""

from __future__ import annotations

import numpy as np

from app.deployments.channel.wire import Frame, decode_frame, encode
from app.records.outputs import EngineOutput, PooledResult
from app.records.step import TokenLogprobs


def test_every_field_of_an_output_survives_the_channel() -> None:
    of_one = TokenLogprobs([7, 8], [-0.25, -1e-30], [1, 2])
    told = {"entropy": [0.5]}
    filled = EngineOutput(
        "1", [7], "error", 5, "why", [of_one], told, [None, of_one], 3, 4, 1, 2, 0.125, error_param="n"
    )
    outputs = [EngineOutput("0", [9]), filled, EngineOutput("2", [])]
    assert decode_frame(encode(Frame(4, outputs))) == Frame(4, outputs)


def test_a_pooled_result_survives_the_channel_bit_by_bit() -> None:
    array = np.array([[1.0, -0.0, np.pi], [np.nextafter(np.float32(1), np.float32(2)), 1e-40, np.inf]], np.float32)
    output = EngineOutput("7", [], "stop", pooled=PooledResult.of(array))
    (received,) = decode_frame(encode(Frame(0, [output]))).outputs
    assert received == output
    assert received.pooled is not None
    assert received.pooled.array().tobytes() == array.tobytes()
    assert received.pooled.array().shape == (2, 3)


def test_a_token_takes_few_bytes() -> None:
    frames = [encode(Frame(0, [EngineOutput(str(i), [50_000 + i]) for i in range(count)])) for count in (100, 200)]
    assert len(frames[1]) - len(frames[0]) <= 100 * 16
