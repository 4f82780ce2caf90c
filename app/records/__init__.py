"""Records of requests, steps and results: what the engine, the API and the deployments exchange."""
