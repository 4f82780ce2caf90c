"""A file that Ray runs for each worker process."""
