"""Trains `tiny-chat-hears`, a Whisper of a million numbers, on speech that a synthesizer makes."""
