"""OpenAI's dialect, with the extension fields that vLLM's users send."""
