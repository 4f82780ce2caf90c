"""Files and batches: many requests in a file, answered while nobody waits."""
