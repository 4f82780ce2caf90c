"""Pictures of requests on the host: headers, decoding in processes of their own, fetching, processors. No torch."""
