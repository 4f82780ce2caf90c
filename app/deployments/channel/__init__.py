"""The channels between an ingress or a Router and the engine replicas, and how replicas are found."""
