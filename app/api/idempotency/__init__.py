"""`Idempotency-Key`: a request that is sent again gets the answer that the first one gets, and runs once."""
