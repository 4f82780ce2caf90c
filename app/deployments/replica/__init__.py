"""The EngineReplica deployment: one engine, its metrics and its watches."""
