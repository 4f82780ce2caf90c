"""Videos of requests on the host: containers, frames decoded in processes of their own, processors. No torch."""
