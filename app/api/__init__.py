"""The HTTP dialects: validation, rendering, streaming. FastAPI and Starlette, no Ray, no torch."""
