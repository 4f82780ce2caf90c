"""Times of tokens by how much they attend to the sound: dynamic time warping (Sakoe and Chiba, "Dynamic programming
algorithm optimization for spoken word recognition", 1978), with the choices of Whisper's own program where costs are
equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WARP_S_PER_CELL = 6e-8  # what a cell costs, in seconds of one core
_BOTH, _NEXT_TOKEN, _NEXT_PLACE = 0, 1, 2  # where the cheapest way to a cell comes from


def token_ends(weights: npt.NDArray[np.float32], step_s: float) -> list[float]:
    """Seconds at which each of n tokens is heard, of weights fp32 [n, P]: how much it attends to each place, of which
    one comes every `step_s`. They never go back. n and P are at least 1."""
    trace = _cheapest(-weights.astype(np.float64))
    token, place = weights.shape
    first = [0] * token
    while token > 0 or place > 0:
        if token > 0:
            first[token - 1] = max(0, place - 1)
        came = _NEXT_PLACE if token == 0 else _NEXT_TOKEN if place == 0 else int(trace[token, place])
        token -= came != _NEXT_PLACE
        place -= came != _NEXT_TOKEN
    return [place * step_s for place in first]


def _cheapest(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Finds where the cheapest way to each cell comes from, uint8 [n + 1, P + 1], of cells [n, P]: of all cells of an
    antidiagonal at once, as each needs only those of the two before."""
    n, places = costs.shape
    flat, stride = costs.reshape(-1), max(1, places - 1)
    trace = np.zeros((n + 1, places + 1), np.uint8)
    before = np.full(n + 1, np.inf, np.float32)  # of the diagonal two before, by token
    last = np.full(n + 1, np.inf, np.float32)
    before[0] = 0.0
    for diagonal in range(2, n + places + 1):  # token + place, each from 1
        low, high = max(1, diagonal - places), min(n, diagonal - 1)
        tokens = np.arange(low, high + 1)
        both, token, place = before[low - 1 : high], last[low - 1 : high], last[low : high + 1]
        is_both = (both < token) & (both < place)
        is_token = (token < both) & (token < place)
        came = np.where(is_both, _BOTH, np.where(is_token, _NEXT_TOKEN, _NEXT_PLACE))
        least = np.where(is_both, both, np.where(is_token, token, place))
        begin = (low - 1) * places + diagonal - low - 1
        cells = flat[begin : begin + (high - low) * stride + 1 : stride]
        now = np.full(n + 1, np.inf, np.float32)
        now[low : high + 1] = cells + least.astype(np.float64)
        trace[tokens, diagonal - tokens] = came
        before, last = last, now
    return trace
