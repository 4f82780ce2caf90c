"""The workers of one engine as a group: their processes, how they are found, connected and heard."""
