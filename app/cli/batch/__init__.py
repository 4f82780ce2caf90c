"""`manta run-batch`: files of requests, in OpenAI's batch format or shorter."""
