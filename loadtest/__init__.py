"""Load over HTTP: Locust users that read streams, and a runner that sweeps load levels into one report."""
