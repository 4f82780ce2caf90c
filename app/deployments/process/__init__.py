"""The needs of every process of a deployment: the secret, logs, start errors, termination. They stand here once."""
