"""Names what driver and workers send each other besides steps and their replies."""

from __future__ import annotations

import pickle

PARK = b"\x00"  # instead of a pickled step message: wait on the socket until a frame comes
IN_SOCKET = b"\x01"  # instead of a payload too large for a channel: it is the next frame of the socket
CALL_RUN = pickle.dumps(("run", ()))  # to a local process: enter the loop
STOP = b"\x02"  # on the socket: leave the loop
NO_REPLY = b"\x04"  # in a graph, for a step that failed: the socket has the rank's last word
