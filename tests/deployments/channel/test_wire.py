"""What a frame carries comes out of it as it went in."""

from __future__ import annotations

import numpy as np

from app.deployments.channel.wire import Frame, OutputRecord, decode_frame, encode
from app.engine.outputs import EngineOutput, PooledResult


def test_a_pooled_result_survives_the_channel_bit_by_bit() -> None:
    array = np.array([[1.0, -0.0, np.pi], [np.nextafter(np.float32(1), np.float32(2)), 1e-40, np.inf]], np.float32)
    output = EngineOutput("r", [], "stop", pooled=PooledResult.of(array))
    (record,) = decode_frame(encode(Frame(0, [OutputRecord.pack(7, output)]))).outputs
    received = record.unpack("r")
    assert received == output
    assert received.pooled is not None
    assert received.pooled.array().tobytes() == array.tobytes()
    assert received.pooled.array().shape == (2, 3)
