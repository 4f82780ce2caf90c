"""A scripted server, as the tests of the API have it."""

from tests.api.conftest import client, http, model_dir, serve, served_model, server

__all__ = ["client", "http", "model_dir", "serve", "served_model", "server"]
