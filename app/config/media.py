"""The limits of pictures, videos and sounds that requests bring: the section `media` of the ingress."""

from __future__ import annotations

from pydantic import Field, field_validator

from app.config.frozen import Frozen


class MediaConfig(Frozen):
    """Pictures, videos and sounds: what one may be, what reading it may take, and from where it may be fetched."""

    max_image_bytes: int = Field(20 << 20, ge=1, description="Largest file of one picture.")
    max_image_pixels: int = Field(
        33_000_000, ge=1, le=1 << 28, description="Most pixels of one picture, by its header: before it is decoded."
    )
    max_image_side: int = Field(16_384, ge=1, le=1 << 16, description="Most pixels along one side of a picture.")
    max_images: int = Field(64, ge=0, description="Most pictures of one request, whatever the model takes.")
    max_videos: int = Field(8, ge=0, description="Most videos of one request, whatever the model takes.")
    max_video_bytes: int = Field(
        64 << 20,
        ge=1,
        description="Largest file of one video. One in the request itself is base64 within limits.max_body_bytes: "
        "three quarters of them.",
    )
    max_video_s: float = Field(
        3600.0,
        gt=0,
        le=86_400,
        description="Longest that one video may last, in seconds, by its header and its frames.",
    )
    max_video_frames: int = Field(
        216_000, ge=1, le=1 << 24, description="Most frames that lie in the file of one video, shown or not."
    )
    max_video_pixels: int = Field(
        1 << 32,
        ge=1,
        description="Most pixels of all frames of one video up to the last that is shown: they are decoded. One frame "
        "may have max_image_pixels, and max_image_side along a side.",
    )
    max_sounds: int = Field(16, ge=0, description="Most sounds of one request, whatever the model takes.")
    max_prompt_bytes: int = Field(
        96 << 20,
        ge=1,
        description="Most bytes of the pixels of one prompt (of a video those of the frames shown, once resized), or "
        "of the features of its sounds. They go to an engine in one message, so it is less than "
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH.",
    )
    max_sound_s: float = Field(
        7200.0,
        gt=0,
        le=86_400,
        description="Longest that one sound may last, in seconds, whatever its header says.",
    )
    decode_timeout_s: float = Field(
        2.0,
        gt=0,
        description="CPU time that decoding one picture, or a quarter MiB of a sound, may take; it is refused and its "
        "process killed then. A video gets as much, 50 us for each packet that its file may hold, and a second for "
        "each 33 million pixels of its frames.",
    )
    decode_memory_bytes: int = Field(
        1 << 30, ge=64 << 20, description="Memory that decoding one picture, video or sound may take."
    )
    max_decoders: int = Field(
        2,
        ge=1,
        le=64,
        description="Processes that decode pictures, as many that decode videos, as many that decode sounds, and as "
        "many that make features of their pieces, each started when it is needed first.",
    )
    cache_bytes: int = Field(
        64 << 20,
        ge=0,
        description="Memory for pictures, videos and sounds that were decoded, which a request that brings one again "
        "finds: in each ingress, and in each engine replica, which is not sent again what it has.",
    )
    engine_bytes: int = Field(
        4 << 30,
        ge=1,
        description="Memory for pixels of the requests that wait or run in one engine, from all ingress replicas; what "
        "finds no room there gets a 429.",
    )
    allowed_media_domains: tuple[str, ...] = Field(
        (),
        description="Hosts that pictures, videos and sounds may be fetched from over http and https, each by its whole "
        "name; with none, requests bring them as data only.",
    )
    fetch_timeout_s: float = Field(
        5.0, gt=0, description="Longest that fetching one picture, video or sound may take, in seconds."
    )
    max_redirects: int = Field(3, ge=0, le=16, description="Most redirects that are followed, each to an allowed host.")

    def most(self, kind: str) -> int:
        """Most items of a kind in one request."""
        return {"audio": self.max_sounds, "video": self.max_videos}.get(kind, self.max_images)

    @field_validator("allowed_media_domains")
    @classmethod
    def _as_looked_up(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        for domain in domains:
            if not domain or any(mark in domain for mark in "/:@*?#% "):
                raise ValueError(f"{domain!r} is not the name of a host, such as images.example.org")
        return tuple(domain.rstrip(".").lower() for domain in domains)
