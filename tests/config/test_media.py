"""Hosts that pictures may be fetched from are names."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.config.media import MediaConfig


def test_domains_are_whole_names() -> None:
    assert MediaConfig(allowed_media_domains=("Images.Example.org.",)).allowed_media_domains == ("images.example.org",)
    for wrong in ("https://example.org", "*", "example.org/x", "user@example.org", ""):
        with pytest.raises(ValidationError, match="is not the name of a host"):
            MediaConfig(allowed_media_domains=(wrong,))
