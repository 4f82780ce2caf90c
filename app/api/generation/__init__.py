"""From bodies to EngineRequests, and from outputs to streams of events, for every dialect."""
