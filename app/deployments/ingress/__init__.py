"""The Ingress deployment, and what takes its requests to replicas."""
