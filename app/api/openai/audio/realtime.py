"""/v1/realtime: sessions that transcribe what is said, while it is said."""

from __future__ import annotations

from fastapi import APIRouter

from app.api.endpoint import Api, Endpoint
from app.api.http.live_sockets import LivePeer
from app.api.openai.audio.realtime_session import RealtimeSession
from app.config.limits import RequestLimits

REALTIME = "/v1/realtime"


def no_routes(api: Api) -> APIRouter:
    """A websocket alone, which is opened before routes are looked for."""
    return APIRouter()


def session(peer: LivePeer, limits: RequestLimits) -> RealtimeSession:
    """The session of an address: `?intent=transcription` wants the older form, `?model=` names what transcribes."""
    is_older = peer.query.get("intent") == "transcription"
    return RealtimeSession(peer, is_older=is_older, model=peer.query.get("model"), max_bytes=limits.max_sound_bytes)


ENDPOINT = Endpoint(no_routes, live={REALTIME: session})
