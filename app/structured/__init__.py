"""Structured output on the host: what a request may constrain its text to, compiled grammars, token masks."""
