"""OpenAI's routes of sound: transcriptions and translations."""
